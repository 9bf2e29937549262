"""One experiment: from train.toml to a verdict in the ledger.

`start` checks a request and submits its run. A worker (worker.py) trains and evaluates in its own process. `collect`
judges the result. Both read all that they need from the ledger, so a kill costs at most one run.
"""

from collections.abc import Sequence
from datetime import datetime

from msgspec.structs import replace

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.finish import close, crash, resume
from nightshift.campaign.git import CONFIG_NAME
from nightshift.campaign.ledger import STARTED, baseline_of
from nightshift.campaign.metrics import METRICS_NAME, read_steps
from nightshift.campaign.posterior import NIGHT_HOURS
from nightshift.campaign.records import Failure, Record, Request
from nightshift.config.train_toml import Config, load
from nightshift.engines.base import used_keys
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.experiment.admission import admit, require_ready
from nightshift.experiment.health import Conditions, digest
from nightshift.experiment.integrity import IntegrityError, require_branch, require_unchanged
from nightshift.experiment.setup import Setup
from nightshift.waiting import lasted


def run_experiment(request: Request, setup: Setup) -> Record:
    """Train, evaluate, decide and record one experiment. Return its closed record, also of a failed run.

    Call as the controller (Ledger.controller). Raises ConfigError, UsageError, IntegrityError or EngineError before
    anything is recorded; Interrupted or IntegrityError after the record was closed without a verdict.
    """
    try:
        config = load(setup.root / CONFIG_NAME)  # first: `resume` may write the file
        resume(setup.ledger, setup.repo, setup.reporter.note)
        campaign = setup.campaign()
        record = start(request, config, campaign, setup)
        while (closed := collect(record.number, setup)) is None:
            setup.wait()  # while the worker trains and evaluates
        return closed
    except (Interrupted, IntegrityError) as error:
        interrupt(error.cause, setup)
        raise
    finally:
        setup.cancel()


def start(request: Request, config: Config, campaign: Campaign, setup: Setup) -> Record:
    """Check a request, reserve its number, and submit its run. Return the record.

    It is closed already if the run could not be submitted.
    """
    if request.baseline:
        config = campaign.compose(())
    record = admit(config, request, campaign, setup)
    require_ready(setup)
    record = setup.ledger.reserve(record, {CONFIG_NAME: config.source}, setup.repo.last_experiment())
    limits = f"{setup.rules.budget_text} for training, at most {lasted(setup.rules.deadline_seconds)} in all"
    setup.reporter.note(f"experiment {record.number:04d}: {limits}")
    last = campaign.last_baseline()
    hours = (setup.now() - last).total_seconds() / 3600 if last else 0.0
    if request.run is None and record.run.new is not None and hours > NIGHT_HOURS:
        drift = f"the baseline ran {hours:.0f} h ago, and the machine may have drifted since"
        setup.reporter.note(f"{drift}: uv run run.py --baseline makes the effect of this change more certain")
    try:
        submit(record, campaign, setup)
        setup.ledger.sync_tsv()
    except (EngineError, UsageError, OSError) as error:
        setup.cancel(record.number)
        return conclude(crash(record, Failure.MACHINERY, str(error)), setup)
    return record


def submit(record: Record, campaign: Campaign, setup: Setup) -> None:
    """Submit the run of an experiment."""
    incumbent = None
    if campaign.parent is not None:  # validated again: its record lies where agents can write
        incumbent = dict(setup.engine.validate(setup.ledger.stored_config(campaign.parent)).settings)
    job = setup.job(record.effective, setup.next_seed(campaign), record.hardware, incumbent=incumbent)
    setup.submit(setup.ledger.run_dir(record.number), job)


def collect(number: int, setup: Setup) -> Record | None:
    """Judge and close an experiment whose run has ended. Return the closed record; None while the run is in flight.

    Raises IntegrityError if a measuring file or the branch changed. The run stays in flight.
    """
    record = setup.ledger.record(number)
    if record.status != STARTED:
        return record
    run_dir = setup.ledger.run_dir(number)
    if not setup.executor.is_over(run_dir):
        return None
    require_branch(setup.repo, record.branch)
    records = setup.ledger.records()
    first = baseline_of(records, record.branch) or record
    require_unchanged(setup.repo, setup.rules, record.rules_hash, first.commit, setup.rules_hash)
    try:
        result = setup.executor.result(run_dir)
    except (EngineError, UsageError, OSError) as error:
        return conclude(crash(record, Failure.MACHINERY, str(error)), setup)
    record = replace(record, result=result, hardware=record.hardware or result.hardware)
    training = result.training
    if result.hardware not in ("", record.hardware):
        cause = f"the run was made on {result.hardware}, and the campaign's on {record.hardware}"
        record = crash(record, Failure.MACHINERY, cause)
    elif result.evaluation is None:
        record = crash(record, training.failure or Failure.MACHINERY, training.cause or "no cause known")
    if result.evaluation is None or record.failure is not None:
        return conclude(record, setup)
    campaign = Campaign.of(records, record.branch, setup.rules_hash)
    baseline = setup.ledger.stored_config(campaign.baseline or record)
    record = campaign.judge(record, baseline, setup.engine.validate)
    if record.is_keep or record.is_incumbent:
        try:  # the engine proves that the weights that stay are those that were scored
            proof = setup.engine.prove(run_dir, result.evaluation.weights, setup.reporter.note)
        except EngineError as error:
            return conclude(crash(record, Failure.MACHINERY, str(error)), setup)
        record = replace(record, health=proof)
    return conclude(record, setup, campaign.remarks(record))


def conclude(record: Record, setup: Setup, remarks: Sequence[str] = ()) -> Record:
    """Close an experiment that has its verdict: in the ledger first, then in git. Return the closed record.

    `remarks`: lines on its scores (Campaign.remarks).
    """
    if record.decided is None and record.failure in (None, Failure.TRAINING):
        record = replace(record, decided=setup.ledger.num_decided() + 1)
    # A wall clock may be set back: no less than its run took.
    elapsed = (setup.now() - datetime.fromisoformat(record.started)).total_seconds()
    run_seconds = record.result.total_seconds if record.result else 0.0
    lines = [record.health] if record.health else []
    if record.result is not None:
        steps = read_steps(setup.ledger.run_dir(record.number) / METRICS_NAME)
        try:
            config = setup.ledger.stored_config(record)
            keys = used_keys(setup.engine, config)
            lines += map(str, digest(steps, Conditions(record.result, setup.rules, config.resolved, keys, remarks)))
        except UsageError as error:  # no reason to lose a verdict
            lines.append(f"the curves were not examined: {error}")
    health = "\n".join(lines) or None
    record = replace(record, total_seconds=max(elapsed, run_seconds), health=health)
    return close(record, setup.ledger, setup.repo)


def interrupt(cause: str, setup: Setup) -> None:
    """End the runs in flight and close their records: as interrupted, unless a record has its verdict already."""
    numbers = setup.experiments_in_flight()
    setup.cancel()
    records = setup.ledger.records()
    for record in records:
        if record.git_action is not None or (record.number not in numbers and record is not records[-1]):
            continue
        if record.status == STARTED:
            conclude(crash(record, Failure.INTERRUPTED, f"interrupted: {cause}"), setup)
        else:
            close(record, setup.ledger, setup.repo)

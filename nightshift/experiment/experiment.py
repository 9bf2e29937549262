"""One experiment: from train.toml to a verdict in the ledger.

`start` admits and submits; a worker (worker.py) trains and evaluates in a process of its own; `collect` judges and
settles. Both find all they need in the ledger, so that a kill costs no more than a run.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from typing import Any

from msgspec.structs import replace

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import change_keys, incumbent_config, user_decisions
from nightshift.campaign.finish import close, crash, resume, uncommitted
from nightshift.campaign.git import CONFIG_NAME, Head
from nightshift.campaign.ledger import EFFECTIVE_NAME, STARTED, baseline_of, require_same_setup
from nightshift.campaign.metrics import METRICS_NAME, read_steps
from nightshift.campaign.posterior import NIGHT_HOURS
from nightshift.campaign.records import Action, Change, Decision, Failure, Record, Request, Run
from nightshift.config.train_toml import Config, diff, load
from nightshift.config.values import shorten
from nightshift.engines.base import used_keys
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.executors.slots import Slot
from nightshift.experiment.baseline import adopt_baseline
from nightshift.experiment.health import Conditions, digest
from nightshift.experiment.integrity import IntegrityError, require_branch, require_committed, require_unchanged
from nightshift.experiment.runs import as_json, cancel, hash_of, submit
from nightshift.experiment.setup import Setup
from nightshift.waiting import lasted

_LONGEST = 200  # characters of a list in a refusal, which is one line


def run_experiment(request: Request, setup: Setup) -> Record:
    """Train, evaluate, decide, record, settle; returns the closed record. Call as the controller (Ledger.controller).

    Raises ConfigError, UsageError or IntegrityError before anything is recorded, EngineError, and Interrupted or
    IntegrityError after closing the record without a verdict. A failed run is a record.
    """
    try:
        record = start(request, load(setup.root / CONFIG_NAME), setup)  # steps 2 to 5 of docs/architecture.md
        while (done := collect(record.number, setup)) is None:
            setup.wait()  # a worker makes 6 and 7; collect is 8 and 9
        return done
    except (Interrupted, IntegrityError) as error:
        interrupt(error.cause, setup)
        raise
    finally:
        cancel(setup)


def start(request: Request, config: Config, setup: Setup) -> Record:
    """Admit an experiment, give it a number, and submit its run; the record as it was reserved."""
    resume(setup.ledger, setup.repo, setup.reporter.note, setup.experiments_in_flight())
    if (known := adopt_baseline(config, request, setup)) is not None:
        return known
    config = wanted_config(config, request, setup)
    record = admit(config, request, setup)
    require_ready(setup)
    files = {CONFIG_NAME: config.source, EFFECTIVE_NAME: as_json(record.effective)}
    record = setup.ledger.reserve(record, files)
    limits = f"{setup.rules.budget_text} for training, at most {lasted(setup.rules.deadline_seconds)} in all"
    setup.reporter.note(f"experiment {record.number:04d}: {limits}")
    last = setup.campaign(record.branch).last_baseline()
    hours = (setup.now() - last).total_seconds() / 3600 if last else 0.0
    if request.run is None and record.run.new is not None and hours > NIGHT_HOURS:
        told = f"the baseline ran {hours:.0f} h ago, and the machine may have drifted since"
        setup.reporter.note(f"{told}: uv run run.py --baseline makes the effect of this change more certain")
    try:
        submit(record, setup)
        setup.ledger.sync_tsv()
    except (EngineError, OSError) as error:
        cancel(setup, record.number)
        return conclude(crash(record, Failure.MACHINERY, str(error)), setup)
    return record


def collect(number: int, setup: Setup) -> Record | None:
    """The closed record of an experiment whose run has ended; None while the run is in flight.

    Raises IntegrityError where the checkout no longer is what measured it: the run stays in flight then.
    """
    record = setup.ledger.record(number)
    if record.status != STARTED:
        return record
    run_dir = setup.ledger.run_dir(number)
    if not setup.executor.is_over(run_dir):
        return None
    head = Head(record.branch, record.commit)
    if head.is_campaign:
        require_branch(setup.repo, record.branch)
    agreed = baseline_of(setup.ledger.records(), head) or record
    require_unchanged(setup.repo, setup.rules, record.rules_hash, agreed.commit, setup.rules_hash)
    try:
        result = setup.executor.result(run_dir)
        record = replace(record, result=result, hardware=record.hardware or result.hardware)
        failure = None
        if result.hardware not in ("", record.hardware):
            cause = f"it was made on {result.hardware}, and the campaign on {record.hardware}"
            failure = Failure.MACHINERY, cause
        elif result.evaluation is None:
            failure = result.training.failure or Failure.MACHINERY, result.training.cause or "no cause known"
    except (EngineError, UsageError, OSError) as error:
        failure = Failure.MACHINERY, str(error)
    if failure:
        return conclude(crash(record, *failure), setup)
    campaign = setup.campaign(record.branch)
    baseline = setup.ledger.stored_config(campaign.baseline or record)
    record = campaign.judge(record, baseline, setup.engine.validate)
    if record.evaluation and (record.is_keep or record.is_incumbent):
        try:  # the engine proves that the weights that stay were scored
            proof = setup.engine.prove(run_dir, record.evaluation.weights, setup.reporter.note)
        except EngineError as error:
            return conclude(crash(record, Failure.MACHINERY, str(error)), setup)
        record = replace(record, health=proof)
    return conclude(record, setup)


def conclude(record: Record, setup: Setup) -> Record:
    """Close an experiment that has its verdict: in the ledger first, then in git."""
    if record.decided is None and record.failure in (None, Failure.TRAINING):
        record = replace(record, decided=setup.ledger.num_decided() + 1)
    # A wall clock may be set back: no less than its run took.
    elapsed = (setup.now() - datetime.fromisoformat(record.started)).total_seconds()
    run_seconds = record.result.total_seconds if record.result else 0.0
    record = replace(record, total_seconds=max(elapsed, run_seconds))
    health = "\n".join(filter(None, (record.health, examine(record, setup)))) or None
    return close(replace(record, health=health), setup.ledger, setup.repo)


def admit(candidate: Config, request: Request, setup: Setup) -> Record:
    """The record of an experiment to come, compared with its campaign. UsageError for what is not fit to be run."""
    head, records = setup.repo.head(), setup.ledger.records()
    first = baseline_of(records, head)
    hardware, variables = setup.hardware, setup.variables
    if first:
        require_unchanged(setup.repo, setup.rules, first.rules_hash, first.commit, setup.rules_hash)
        require_same_setup(first, setup.engine.name, setup.rules_hash, hardware, variables)
    elif head.is_campaign:
        require_committed(setup.repo, head, candidate.source, setup.rules)
    campaign = setup.campaign(head.branch, records)
    kept, decisions = incumbent_now(campaign, setup)
    validated = setup.engine.validate(candidate)
    run, changes = _contents(candidate, request, campaign, kept, setup)
    effective_hash = hash_of(validated.settings)
    is_wanted = request.again or request.baseline or (request.run is not None and request.run.new is None)
    if not is_wanted and campaign.baseline is not None:
        _refuse_again(candidate, run, changes, validated.settings, campaign, setup)
    description = request.proposal.description or "; ".join(changes) or _name_of(run, campaign)
    return Record(
        number=0,
        status=STARTED,
        branch=head.branch,
        commit=head.commit,
        started=setup.now().isoformat(timespec="milliseconds"),
        parent=campaign.parent.number if campaign.parent else None,
        decided_before=setup.ledger.num_decided(),
        user_decisions=decisions,
        proposal=replace(request.proposal, description=description),
        run=run,
        diff=changes,
        scaled=validated.scaled,
        unused_keys=validated.unused,
        config_hash=candidate.hash,
        effective_hash=effective_hash,
        effective=dict(validated.settings),
        rules_name=setup.rules.name,
        rules_hash=setup.rules_hash,
        decision_rules=setup.rules.decision,
        budget_seconds=setup.rules.budget_seconds,
        engine=setup.engine.name,
        versions={"python": platform.python_version(), "nightshift": metadata.version("nightshift")} | variables,
        hardware=hardware,
        num_starts=1 + sum((r.branch, r.effective_hash) == (head.branch, effective_hash) for r in records),
    )


def wanted_config(config: Config, request: Request, setup: Setup) -> Config:
    """The config that a request runs: the campaign's baseline, or `config` as train.toml holds it."""
    if not request.baseline:
        return config
    baseline = setup.campaign(setup.repo.head().branch).baseline
    if baseline is None:
        raise UsageError("there is no baseline to run once more", "Run the first one: uv run run.py")
    return setup.ledger.stored_config(baseline)


def incumbent_now(campaign: Campaign, setup: Setup) -> tuple[tuple[Change, ...], tuple[Decision, ...]]:
    """The incumbent's changes, and what the user's own commits since the last experiment decided about them.

    As long as git lacks a commit of ours nobody can tell what the user changed.
    """
    records, head = setup.ledger.records(), setup.repo.head()
    if not head.is_campaign or campaign.baseline is None or uncommitted(records, head.branch):
        return campaign.kept, ()
    ours = [record for record in records if record.branch == head.branch]
    known = {id for record in ours for id in record.commits.values()}
    known |= {decision.commit for record in ours for decision in record.user_decisions if decision.commit}
    baseline = setup.ledger.stored_config(campaign.baseline)
    found = user_decisions(setup.repo, Head(head.branch, ours[-1].commit), baseline, campaign.kept, known)
    if not found:
        return campaign.kept, ()
    assert campaign.posterior is not None
    decisions = tuple(replace(d, change=campaign.posterior.known(d.change) or d.change) for d in found)
    posterior = campaign.posterior.copy()
    for decision in decisions:
        posterior.decide_for_user(decision.change, decision.action is Action.KEEP)
    return posterior.kept, decisions


def compose(changes: Iterable[Change], campaign: Campaign, setup: Setup) -> Config:
    """The campaign's baseline with these changes. UsageError if no valid train.toml holds them."""
    assert campaign.baseline is not None
    return incumbent_config(setup.ledger.stored_config(campaign.baseline), changes)


def _contents(
    candidate: Config, request: Request, campaign: Campaign, kept: tuple[Change, ...], setup: Setup
) -> tuple[Run, tuple[str, ...]]:
    """What the run is made of, and its new change, a line for each key."""
    if campaign.baseline is None or request.baseline:
        return Run(), ()
    if request.run is not None:
        before = compose(replace(request.run, new=None).changes, campaign, setup)
        return request.run, tuple(change.line for change in diff(before, candidate))
    incumbent = compose(kept, campaign, setup)
    keys = change_keys(incumbent, candidate)
    new = campaign.known(keys) if keys else None
    if request.again and new is not None and (new.experiment or new.commit):  # the same changes, none of them new
        return Run(kept=(*kept, new)), ()
    return Run(kept=kept, new=new), tuple(change.line for change in diff(incumbent, candidate))


def _refuse_again(
    candidate: Config, run: Run, changes: Sequence[str], settings: Mapping[str, Any], campaign: Campaign, setup: Setup
) -> None:
    """Raise UsageError for a config that was tried, that is in flight, or that trains like the incumbent."""
    if setup.repo.head().is_campaign:
        if tried := campaign.tried(run, candidate.hash):
            effect = tried.decision and tried.decision.estimate
            outcome = tried.status + (f", effect {effect}" if effect else "")
            cause = f"this config was already tried in experiment {tried.number:04d} ({outcome})"
            raise UsageError(cause, "Change train.toml, or repeat it with a new seed: --again.")
        for record in setup.in_flight:
            is_same = run.new and record.run.new and record.run.new.keys == run.new.keys
            if is_same or record.config_hash == candidate.hash:
                raise UsageError(f"this config is in flight as experiment {record.number:04d}", "Change train.toml.")
    if changes and setup.engine.validate(compose(replace(run, new=None).changes, campaign, setup)).settings == settings:
        keys = shorten("; ".join(changes), _LONGEST)
        cause = f"the only changes are to keys that this engine does not use: {keys}"
        raise UsageError(cause, "Change a key that it uses, or run it all the same: --again.")


def _name_of(run: Run, campaign: Campaign) -> str:
    if campaign.baseline is None:
        return "baseline"
    if run.is_baseline:
        return "baseline again"
    return "incumbent again" if run.changes == campaign.kept else "again"


def require_ready(setup: Setup, slots: Sequence[Slot] | None = None) -> None:
    """Raise EngineError with the first problem of these slots of this machine; None: of the next run's slot."""
    for slot in setup.executor.free_slots[:1] if slots is None else slots:
        if problems := setup.engine_of.get(slot.gpus, setup.engine).check():
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise EngineError(problems[0] + more)


def withdraw(number: int, cause: str, setup: Setup) -> None:
    """Take an experiment back of which no run has begun: it decides nothing."""
    cancel(setup, number)
    conclude(crash(setup.ledger.record(number), Failure.INTERRUPTED, cause), setup)


def interrupt(cause: str, setup: Setup) -> None:
    """End what is in flight, and close its record: as interrupted, unless it has its verdict already."""
    numbers = setup.experiments_in_flight()
    cancel(setup)
    records = setup.ledger.records()
    for record in records:
        if record.git_action is not None or (record.number not in numbers and record is not records[-1]):
            continue
        if record.status == STARTED:
            conclude(crash(record, Failure.INTERRUPTED, f"interrupted: {cause}"), setup)
        else:  # its verdict is in the journal, and stays as it is
            close(record, setup.ledger, setup.repo)


def examine(record: Record, setup: Setup) -> str:
    """What the curves of the record's run say; empty where it left none."""
    if record.result is None:
        return ""
    try:
        candidate = setup.ledger.stored_config(record)
    except UsageError as error:  # no reason to lose a verdict
        return f"the curves were not examined: {error}"
    steps = read_steps(setup.ledger.files_dir(record) / METRICS_NAME)
    used = used_keys(setup.engine, candidate)
    remarks = setup.campaign(record.branch).remarks(record) if record.failure is None else ()
    return digest(steps, Conditions(record.result, setup.rules.budget_seconds, candidate.resolved, used, remarks))

"""One experiment: from train.toml to a verdict in the ledger. The ten steps of design, in order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from nightshift import health
from nightshift.campaign import campaign as campaigns
from nightshift.campaign import decision
from nightshift.campaign.campaign import Campaign
from nightshift.engines import Engine, ProgressCallback, used_keys
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.evaluation import Posed, evaluate, examples_of
from nightshift.git.repo import CONFIG_NAME, Head
from nightshift.git.settlement import finish_earlier, settle, stored_config
from nightshift.guard import freeze
from nightshift.metrics import METRICS_NAME, read_steps
from nightshift.records import Evaluation, Failure, Judgement, Outcome, Record, Run, Side, Training, Verdict
from nightshift.rules import Rules
from nightshift.setup import Lab
from nightshift.train_toml import config as configs
from nightshift.train_toml.config import Config
from nightshift.train_toml.values import shorten

_LONGEST = 200  # characters of a list in a refusal, which is one line


@dataclass(frozen=True, slots=True)
class Request:
    """What the person or agent asked for.

    `prediction`: what the hypothesis in `description` is expected to do. `notes`: what the agent did besides.
    """

    description: str = ""
    max_runs: int = 3
    until: datetime | None = None
    again: bool = False
    prediction: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """An admitted experiment: the candidate beside what it is compared with."""

    head: Head
    agreed: str | None  # the commit whose harness the campaign runs; None away from a campaign
    campaign: Campaign
    hashes: Mapping[Side, str]  # of the configs
    settings: Mapping[Side, Mapping[str, Any]]
    seed_index: Mapping[Side, int]
    record: Record


def run_experiment(request: Request, lab: Lab) -> Record:
    """Train, evaluate, decide, record, settle; returns the closed record of one experiment.

    Raises ConfigError or UsageError before anything is recorded, EngineError when the machinery is
    missing, Interrupted (after closing the record) on Ctrl-C or SIGTERM. A failed run is a record.
    """
    began = lab.clock()
    candidate = configs.load(lab.root / CONFIG_NAME)  # 2: mistakes cost under a second
    with lab.ledger.lock():
        finish_earlier(lab)
        plan = admit(candidate, request, lab)
        require_ready(lab.engine)  # 4
        files = {CONFIG_NAME: candidate.source, "effective.json": _json(plan.record.effective)}
        record = lab.ledger.reserve(plan.record, files)  # 3
        lab.reporter.note(f"experiment {record.number:04d}: {_foretold(record, request, lab.rules)}")
        try:
            record = run_until_decided(record, plan, request, lab)  # 5 to 8
        except Interrupted as error:
            record = lab.ledger.read(record.number) or record
            record = crash(record, Failure.INTERRUPTED, f"interrupted: {error.cause}")
            lab.ledger.keep_model(record)
            lab.ledger.close(replace(record, total_seconds=lab.clock() - began))
            raise
        record = replace(record, total_seconds=lab.clock() - began, health=examine(record, candidate, lab))
        lab.ledger.write(record)  # 9: the verdict is safe before git is touched
        record = settle(record, plan.head, lab)
        lab.ledger.keep_model(record)
        lab.ledger.close(record)
    return record


def _foretold(record: Record, request: Request, rules: Rules) -> str:
    """How long it may take, as far as that can be said beforehand."""
    each = f"{rules.budget_seconds:g} s of training beside start-up and evaluation"
    if record.parent is None:
        return f"{min(request.max_runs, rules.decision.baseline_runs)} runs for the baseline, each with {each}"
    return f"one run with {each}; up to {request.max_runs} where more are worth their price"


def admit(candidate: Config, request: Request, lab: Lab) -> Plan:
    """Compare the candidate with its campaign; refuse what is not worth or not fit to be run. UsageError."""
    head = lab.repo.head()
    records = lab.ledger.records()
    first = campaigns.fixed_by(records, head)
    agreed = None
    if head.is_campaign:
        agreed = first.commit if first else None
        freeze.require_clean_start(lab.repo, head, candidate.source, agreed, lab.rules)  # it names the file
        agreed = agreed or head.commit
    if first:
        campaigns.require_same_setup(first, lab.engine.name, lab.rules_hash, lab.engine.hardware())
    ours = [r for r in records if r.branch == head.branch and r.rules_hash == lab.rules_hash]
    campaign = campaigns.replay(ours, lab.rules)
    validated = lab.engine.validate(candidate)
    settings = {Side.CANDIDATE: validated.settings}
    hashes = {Side.CANDIDATE: candidate.hash}
    incumbent = None
    if campaign.incumbent:
        incumbent = stored_config(campaign.incumbent, lab)
        settings[Side.INCUMBENT] = lab.engine.validate(incumbent).settings
        hashes[Side.INCUMBENT] = incumbent.hash
    seed_index = {side: campaign.num_runs_of(config_hash) for side, config_hash in hashes.items()}
    diff = configs.diff(incumbent, candidate) if incumbent else ()
    if not request.again:
        refuse_repetition(candidate, campaign, head, diff, settings, validated.unused)
    record = Record(
        number=0,
        status="started",
        branch=head.branch,
        parent=campaign.incumbent.number if campaign.incumbent else None,
        description=request.description or "; ".join(diff) or ("again" if incumbent else "baseline"),
        started=lab.now().isoformat(timespec="seconds"),
        engine=lab.engine.name,
        rules_name=lab.rules.name,
        rules_hash=lab.rules_hash,
        config_hash=candidate.hash,
        effective_hash=hashlib.sha256(_json(validated.settings)).hexdigest()[:12],
        diff=diff,
        unused_keys=validated.unused,
        commit=head.commit,
        versions=dict(lab.versions),
        hardware=lab.engine.hardware(),
        effective=dict(validated.settings),
        prediction=request.prediction,
        notes=request.notes,
    )
    return Plan(head, agreed, campaign, hashes, settings, seed_index, record)


def refuse_repetition(
    candidate: Config,
    campaign: Campaign,
    head: Head,
    diff: tuple[str, ...],
    settings: Mapping[Side, Mapping[str, Any]],
    unused: tuple[str, ...],
) -> None:
    """Raise UsageError for a config that was decided before, or that the engine cannot tell from the incumbent."""
    tried = campaign.tried(candidate.hash)
    if tried and tried.judgement and head.is_campaign:
        delta = tried.judgement.delta
        result = tried.status + (f", {100 * delta:+.1f} pp" if delta is not None else "")
        raise UsageError(
            f"this config was already tried in experiment {tried.number:04d} ({result})",
            "Change train.toml, or repeat it with new seeds: --again.",
        )
    if diff and settings.get(Side.INCUMBENT) == settings[Side.CANDIDATE]:
        changes, others = shorten("; ".join(diff), _LONGEST), shorten(", ".join(unused), _LONGEST)
        raise UsageError(
            f"the only changes are to keys that this engine does not use: {changes}",
            f"Change a key that it uses (unused: {others}), or run it all the same: --again.",
        )


def require_ready(engine: Engine) -> None:
    """Raise EngineError with the first problem that makes a run impossible."""
    problems = engine.check()
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise EngineError(problems[0] + more)


def run_until_decided(record: Record, plan: Plan, request: Request, lab: Lab) -> Record:
    """Runs of candidate and incumbent until the decision needs no further one; the record with its verdict."""
    rules = lab.rules.decision
    belief = plan.campaign.belief
    comparison = decision.compare(belief, rules) if belief else None
    examples = examples_of(lab.rules, lab.root, "selection")
    side = Side.CANDIDATE
    while True:
        run = execute(record, plan, side, examples, lab)
        record = replace(record, runs=(*record.runs, run))
        if plan.agreed and (changed := freeze.changed_harness_files(lab.repo, plan.agreed, lab.rules)):
            cause = f"{', '.join(changed[:3])} changed while the experiment ran: it counts for nothing"
            return crash(record, Failure.MACHINERY, cause)
        lab.ledger.write(record)  # an interruption loses the run in flight only
        can_replicate = len(record.runs) < request.max_runs and _has_time(run, request, lab)
        if run.evaluation is None and side is Side.CANDIDATE:
            return crash(record, run.training.failure or Failure.MACHINERY, run.training.cause or "no cause known")
        if comparison is None:  # the baseline
            if can_replicate and len(record.runs) < rules.baseline_runs:
                continue
            return replace(record, status=Verdict.KEEP, judgement=_baseline(record.runs, lab))
        if run.evaluation is None:  # the incumbent's run failed: decide with what there is
            can_replicate = False
        else:
            comparison = decision.observe(comparison, side, run.evaluation.scores, rules)
        choice = decision.decide(comparison, rules, can_replicate)
        judgement = decision.judge(comparison, choice)
        if choice.replicate is None:
            kept = [record.number for record in plan.campaign.kept]
            judgement = decision.taken_back(judgement, comparison, rules, kept)
            return replace(record, status=judgement.verdict, judgement=judgement)
        side = choice.replicate
        lab.reporter.note(f"{judgement.why}: close enough for one more run of the {side}")


def execute(record: Record, plan: Plan, side: Side, examples: list[Posed], lab: Lab) -> Run:
    """One run: start, train within the budget, evaluate the final weights, leave no process behind."""
    index = len(record.runs) + 1
    # A config never sees a seed twice, also where candidate and incumbent are one config (--again).
    used = sum(plan.hashes[r.side] == plan.hashes[side] and r.evaluation is not None for r in record.runs)
    seed = lab.rules.seed(plan.seed_index[side] + used)
    run_dir = lab.ledger.run_dir(record.number) / f"run-{index}"
    run_dir.mkdir()
    progress, began = lab.reporter.progress(record, index, side), lab.clock()
    training, evaluation, startup = train_and_evaluate(
        plan.settings[side], seed, run_dir, examples, run_dir / "evaluation.jsonl", progress, lab
    )
    return Run(index, side, seed, training, evaluation, startup, lab.clock() - began)


def train_and_evaluate(
    settings: Mapping[str, Any],
    seed: int,
    run_dir: Path,
    examples: list[Posed],
    path: Path,
    progress: ProgressCallback,
    lab: Lab,
) -> tuple[Training, Evaluation | None, float | None]:
    """(training, evaluation, seconds of start-up) of one run in `run_dir`; `path` gets a line an example.

    The evaluation is None where there was nothing to evaluate; then `training` has the cause and who is to blame.
    """
    began, startup, evaluation = lab.clock(), None, None
    training = Training(Outcome.CRASHED, num_steps=0, failure=Failure.MACHINERY)
    try:
        session = lab.engine.open(settings, seed, run_dir, lab.rules.deadline_seconds)
        try:
            startup = lab.clock() - began
            training = session.train(lab.rules.budget_seconds, progress)
            if training.outcome.is_success:
                evaluation = evaluate(session, examples, lab.rules, path, progress, lab.clock)
        finally:
            session.close()
    except (EngineError, OSError) as error:
        is_config_fault = isinstance(error, EngineError) and error.is_config_fault
        failure = Failure.TRAINING if is_config_fault else Failure.MACHINERY
        training = replace(training, outcome=Outcome.CRASHED, failure=failure, cause=str(error))
        evaluation = None
    return training, evaluation, startup


def examine(record: Record, candidate: Config, lab: Lab) -> str | None:
    """What the curves of the candidate's last run say; None where it left none."""
    run = [run for run in record.runs if run.side is Side.CANDIDATE][-1]
    steps = read_steps(lab.ledger.run_dir(record.number) / f"run-{run.index}" / METRICS_NAME)
    facts = health.facts_of(run, lab.rules.budget_seconds, candidate.resolved, used_keys(lab.engine, candidate))
    return health.digest(steps, facts) or None


def crash(record: Record, failure: Failure, cause: str) -> Record:
    """The record of an experiment that has no verdict."""
    return replace(record, status=Verdict.CRASH, failure=failure, judgement=Judgement(Verdict.CRASH, cause))


def _baseline(runs: tuple[Run, ...], lab: Lab) -> Judgement:
    scores = [run.evaluation.scores for run in runs if run.evaluation is not None]
    belief = decision.baseline(scores, lab.rules.decision)
    plural = "s" if len(scores) != 1 else ""
    return Judgement(Verdict.KEEP, f"baseline: {len(scores)} run{plural}", incumbent_score=belief.mean)


def _has_time(last: Run, request: Request, lab: Lab) -> bool:
    """True if one more run like the last one ends before --until."""
    return request.until is None or lab.now() + timedelta(seconds=last.total_seconds) <= request.until


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode()

"""`nightshift certify`: train two configs afresh, with seeds that no experiment had, and compare them.

    nightshift certify                                   baseline and incumbent, on the test split
    nightshift certify --environment countdown           elsewhere, on that environment's validation split
    nightshift certify --budget-seconds 600              with another budget, on the validation split
    nightshift certify --baseline REV --incumbent REV    train.toml of two commits

Runs alternate (baseline, incumbent, incumbent, baseline, ...), so that a machine that slows down slows both. The plan
is written to runs/certify/NNNN/plan.json before the first run, and finished runs stay: run the same command again to
resume. No text of the test split is kept, because agents read in runs/.
"""

import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.journal import JOURNAL_NAME, Access
from nightshift.campaign.ledger import COMPARISON_NAME, PLAN_NAME, RUN_NAME, Ledger, baseline_of, require_same_setup
from nightshift.campaign.metrics import METRICS_NAME
from nightshift.campaign.records import JOB_NAME, NOT_ISOLATED, RESULT_NAME, Evaluation, Failure, Record, Result
from nightshift.campaign.results import last_campaign
from nightshift.campaign.scores import split, weighted
from nightshift.config.rules_toml import rules_elsewhere
from nightshift.config.train_toml import Config, parse
from nightshift.engines.base import Effective, on_cards, open_engine
from nightshift.engines.downloads import data_problem
from nightshift.errors import ConfigError, EngineError, Interrupted, UsageError, listed
from nightshift.executors.gpus import num_gpus
from nightshift.executors.slurm import SlurmExecutor, job_left
from nightshift.experiment.estimate import LEVEL, Estimate, estimate, level_of_access, verdicts
from nightshift.experiment.experiment import Controller
from nightshift.experiment.integrity import IntegrityError, changed_files, require_unchanged
from nightshift.files import Document, read_json, remove_tree, write_json

SIDES = ("baseline", "incumbent")
DEFAULT_SEEDS, MAX_SEEDS = 3, 100
FOLDER = "certify"
FIRST_SEED_INDEX = 100_000  # experiments count the seeds of a config from 0; no config gets so many runs
_NUM_BLOCKS = 10_000_000  # blocks of seeds; the last seed is below 2^32
_KEPT = (JOB_NAME, METRICS_NAME, RESULT_NAME)  # files of a run that stay, with its logs


@dataclass(frozen=True, slots=True)
class Plan:
    """What a comparison measures: `plan.json`. `configs`: hashes of train.toml. `names`: for people."""

    branch: str
    rules_hash: str
    split: Literal["test", "validation"]
    configs: dict[str, str]  # by side
    names: dict[str, str]  # by side: `experiment 0004`, or a commit
    num_seeds: int
    first_seed_index: int
    access: int | None = None  # number of the test-set access, counted over the checkout


@dataclass(frozen=True, slots=True)
class FreshRun:
    """One finished run: `run.json`. `proof`: what the engine proves of the weights that were scored."""

    side: str
    seed: int
    result: Result
    proof: str | None = None
    num_starts: int = 1  # of this side and seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Incumbent minus baseline by fresh runs of both: `comparison.json`. Scores are fractions 0..1.

    `verdict` (better, worse, no significant difference) tests at `level`; the interval is of 95 % whatever the level.
    `access`: number of the access to the test split by this campaign, None on the validation split.
    `by_environment`: the difference on each of several environments, not corrected for their number.
    """

    plan: Plan
    created: str  # ISO 8601, UTC
    environments: tuple[str, ...]
    budget_seconds: float
    model: str
    verdict: str
    level: float
    access: int | None
    estimate: Estimate
    baseline_score: float
    incumbent_score: float
    num_seeds: dict[str, int]  # evaluated runs, by side
    num_examples: int
    strict_scores: tuple[float, float] | None
    by_environment: dict[str, Estimate]
    notes: tuple[str, ...]

    @property
    def estimator(self) -> str:
        return (
            "95 % interval from the variance between seeds (pooled over both configs) and of the paired difference "
            f"between examples; t with {self.estimate.df:.1f} degrees of freedom"
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One comparison to make. `first`: the campaign's first experiment. `settings`: by side. `unused_keys`: of the
    incumbent, where they change nothing."""

    controller: Controller
    first: Record | None
    plan: Plan
    folder: Path
    settings: Mapping[str, Mapping[str, Any]]
    unused_keys: tuple[str, ...] = ()

    @property
    def runs(self) -> dict[str, tuple[str, int]]:
        """Side and seed of each run, by its folder's name."""
        runs = dict[str, tuple[str, int]]()
        for index in range(2 * self.plan.num_seeds):
            side = "incumbent" if index % 4 in (1, 2) else "baseline"
            seed = self.controller.bench.rules.seed(self.plan.first_seed_index + index)
            runs[f"{side}-{seed}"] = side, seed
        return runs

    def done(self) -> dict[str, FreshRun]:
        """Return the finished runs, by their folder's name."""
        runs = dict[str, FreshRun]()
        for path in (self.folder / name / RUN_NAME for name in self.runs):
            run = read_json(path, FreshRun, f"Make it again: rm -r {path.parent}")
            runs |= {path.parent.name: run} if run else {}
        return runs

    def describe(self) -> list[str]:
        """Return the plan in lines for people."""
        rules, plan = self.controller.bench.rules, self.plan
        num_examples = sum(environment.num_validation for environment in rules.environments)
        num_runs, num_done = 2 * plan.num_seeds, len(self.done())
        done = f", {num_done} of {num_runs} runs are done" if num_done else ""
        lines = [
            f"certify:  {plan.names['incumbent']} (incumbent) against {plan.names['baseline']} (baseline)",
            f"where:    {'+'.join(rules.environment_names)}, {rules.budget_text} of training, {rules.model}",
            f"runs:     {plan.num_seeds} new seeds each, {num_examples} examples of the {plan.split} split",
            f"time:     at least {num_runs * rules.budget_seconds / 60:.0f} min{done}",
        ]
        if plan.access is not None:
            number = _access_of_campaign(self.controller, plan)
            resumed = " (resumed)" if plan.access <= max(_uses(self.controller.ledger), default=0) else ""
            level = f"better or worse is said at level {level_of_access(number):.3g}"
            lines.append(f"access:   {number} to the test split by this campaign{resumed}; {level}")
        return lines


def tasks(
    controller: Controller,
    num_seeds: int | None = None,
    environments: Sequence[str] = (),
    budget_seconds: float | None = None,
    revisions: Mapping[str, str | None] | None = None,
) -> list[Task]:
    """Return the comparisons to make. Nothing is run, and nothing of the test split is read.

    `environments`: names, several joined by +. With one, or a budget, their validation split is used. `revisions`: a
    commit by side. Raises UsageError if there is nothing to compare, or a config is invalid there.
    """
    configs, names, first = _contenders(controller, revisions or {})
    if not environments and budget_seconds is None:
        return [_task(controller, first, "test", configs, names, num_seeds)]
    wanted = dict.fromkeys(environments or ["+".join(controller.bench.rules.environment_names)])
    setups = [_elsewhere(controller, name, budget_seconds) for name in wanted]
    return [_task(other, first, "validation", configs, names, num_seeds) for other in setups]


def _contenders(
    controller: Controller, revisions: Mapping[str, str | None]
) -> tuple[dict[str, Config], dict[str, str], Record | None]:
    """Return the two configs and their names, by side, and the campaign's first experiment."""
    configs, head, records = dict[str, Config](), controller.repo.head(), controller.ledger.records()
    first = baseline_of(records, head.branch)
    names = {side: revision for side, revision in revisions.items() if revision is not None}
    for side, revision in names.items():
        source = controller.repo.config_at(revision)
        if source is None:
            raise UsageError(f"--{side} {revision}: no train.toml there", "git fetch, then name a commit.")
        configs[side] = parse(source, f"train.toml of {revision}")
    if first is not None:
        require_unchanged(
            controller.repo, controller.bench.rules, first.rules_hash, first.commit, controller.bench.rules_hash
        )
        require_same_setup(
            first,
            controller.bench.engine.name,
            controller.bench.rules_hash,
            controller.bench.hardware(first),
            controller.bench.variables,
        )
    elif configs and head.commit and (changed := changed_files(controller.repo, head.commit, controller.bench.rules)):
        raise UsageError(f"{listed(changed)} differ from the commit checked out", "Commit or restore them.")
    if len(configs) == len(SIDES):
        if configs["baseline"].hash == configs["incumbent"].hash:
            raise UsageError("both commits have the same train.toml", "Name two that differ.")
        return configs, names, first
    if first is None:
        branch, _ = last_campaign(records)
        fix = f"Switch to the campaign: git switch {shlex.quote(branch)}" if branch else "Run one first: uv run run.py"
        raise UsageError(f"{head} has no measured campaign", fix)
    campaign = controller.campaign()
    if not campaign.kept and not configs:
        raise UsageError("nothing was kept: the incumbent is the baseline", "Come back when an experiment was kept.")
    baseline = controller.ledger.stored_config(first)
    configs.setdefault("baseline", baseline)
    names.setdefault("baseline", f"experiment {first.number:04d}")
    configs.setdefault("incumbent", incumbent_config(baseline, campaign.kept))
    names.setdefault("incumbent", f"incumbent after experiment {campaign.decided[-1].number:04d}")
    return configs, names, first


def _elsewhere(controller: Controller, names: str, budget_seconds: float | None) -> Controller:
    """Return the set-up of other environments, or of another budget. UsageError if it is not possible here."""
    bench = controller.bench
    rules = rules_elsewhere(bench.root, bench.rules, names.split("+"), num_gpus(os.environ))
    rules = rules.with_budget(rules.budget_seconds if budget_seconds is None else budget_seconds)
    rules = on_cards(rules, bench.root, os.environ, bench.request.gpus)
    if rules == bench.rules:
        raise UsageError(
            f"{names} with this budget is what the campaign itself measured",
            "Without options certify uses the test split.",
        )
    if problem := data_problem(bench.root, rules):
        raise UsageError(f"--environment {names}: {problem.cause}", problem.fix)
    bench = replace(
        bench,
        rules=rules,
        rules_hash=rules.hash(bench.root),
        engine=open_engine(rules, bench.root, dict(os.environ), bench.request.gpus),
        request=replace(bench.request, budget_seconds=budget_seconds),
    )
    return replace(controller, bench=bench)


def _task(
    controller: Controller,
    first: Record | None,
    split: Literal["test", "validation"],
    configs: Mapping[str, Config],
    names: Mapping[str, str],
    num_seeds: int | None,
) -> Task:
    """Return the unfinished comparison of the same question, or a new one."""
    validated = dict[str, Effective]()
    for side, config in configs.items():
        try:
            validated[side] = controller.bench.engine.validate(config)
        except ConfigError as error:
            raise UsageError(
                f"{names[side]} is invalid under {controller.bench.rules.name}: {error.cause}", error.fix
            ) from None
    ledger = controller.ledger
    last = max(_uses(ledger), default=0) if split == "test" else 0
    plan = Plan(
        branch=controller.repo.head().branch,
        rules_hash=controller.bench.rules_hash,
        split=split,
        configs={side: configs[side].hash for side in SIDES},
        names=dict(names),
        num_seeds=num_seeds or DEFAULT_SEEDS,
        first_seed_index=FIRST_SEED_INDEX + 2 * MAX_SEEDS * secrets.randbelow(_NUM_BLOCKS),
        access=last + 1 if split == "test" else None,
    )
    folders = sorted(path for path in (ledger.runs_dir / FOLDER).glob("[0-9]*") if path.name.isdecimal())
    folder = ledger.runs_dir / FOLDER / f"{max((int(path.name) for path in folders), default=0) + 1:04d}"
    for begun in reversed(folders):
        if split == "test" and (begun / COMPARISON_NAME).exists():
            continue
        old = read_json(begun / PLAN_NAME, Plan, f"Give it up: rm -r {begun}")
        if old is None or old.split != split or _question(old) != _question(plan):
            continue
        # An access can be used again only if it is the last one, or was not counted yet.
        same = [access for access in ledger.journal.accesses()[-1:] if access.number == old.access]
        can_resume = old.access in (None, last + 1) if not same else _question(same[0]) == _question(plan)
        if can_resume:
            # On the validation split a finished comparison is shown again: nobody repeats it until it looks better.
            if num_seeds not in (None, old.num_seeds):
                cause = f"{begun} began with {old.num_seeds} seeds"
                fix = f"Resume with --seeds {old.num_seeds}, or give it up (an access stays counted): rm -r {begun}"
                raise UsageError(cause, fix)
            plan, folder = old, begun
            break
    settings = {side: effective.settings for side, effective in validated.items()}
    return Task(controller, first, plan, folder, settings, validated["incumbent"].unused)


def _question(asked: Plan | Access) -> tuple[str, str, dict[str, str]]:
    """Return what a comparison is about: branch, rules hash and the hashes of both configs."""
    return asked.branch, asked.rules_hash, asked.configs


def _uses(ledger: Ledger) -> dict[int, tuple[str, str]]:
    """Return the campaign (branch, rules hash) of each use of the test split, by the use's number in this checkout.

    Uses are read from the journal and from the finished certificates, so deleting one of them forgets no certificate.
    """
    plans = [comparison.plan for comparison in read_comparisons(ledger)]
    uses = {plan.access: (plan.branch, plan.rules_hash) for plan in plans if plan.access is not None}
    return uses | {access.number: (access.branch, access.rules_hash) for access in ledger.journal.accesses()}


def certify(questions: Sequence[Task]) -> list[Comparison]:
    """Make the missing runs, compare, and return the comparisons. Call as the controller.

    A run whose training fails leaves one seed less. Raises EngineError if no run of a side could be evaluated, and
    Interrupted: finished runs are kept.
    """
    controller = questions[0].controller
    for task in questions:
        for line in task.describe():
            controller.reporter.note(line)
    measured = [_make_runs(task) for task in questions]
    sides = [_evaluations(task, runs) for task, runs in zip(questions, measured, strict=True)]
    estimates = [_estimate(task, evaluations) for task, evaluations in zip(questions, sides, strict=True)]
    # One question on the test split, or several elsewhere that are corrected together.
    plan = questions[0].plan
    access = None if plan.access is None else _access_of_campaign(controller, plan)
    level = LEVEL if access is None else level_of_access(access)
    comparisons = []
    answers = zip(questions, measured, sides, estimates, verdicts(estimates, level), strict=True)
    for task, runs, evaluations, result, verdict in answers:
        rules, path = task.controller.bench.rules, task.folder / COMPARISON_NAME
        strict = [[e.strict_score for e in side if e.strict_score is not None] for side in evaluations]
        is_strict = [*map(len, strict)] == [*map(len, evaluations)]
        baseline, incumbent = (fmean(e.eval_score for e in side) for side in evaluations)
        parts = enumerate(evaluations[0][0].parts)
        comparison = Comparison(
            plan=task.plan,
            created=controller.now().isoformat(timespec="milliseconds"),
            environments=rules.environment_names,
            budget_seconds=rules.budget_seconds,
            model=rules.model,
            verdict=verdict,
            level=level,
            access=access,
            estimate=result,
            baseline_score=baseline,
            incumbent_score=incumbent,
            num_seeds={side: len(each) for side, each in zip(SIDES, evaluations, strict=True)},
            num_examples=len(evaluations[0][0].example_scores),
            strict_scores=(fmean(strict[0]), fmean(strict[1])) if is_strict else None,
            by_environment={part.environment: _estimate(task, evaluations, index) for index, part in parts},
            notes=tuple(_notes(task, runs, result)),
        )
        write_json(path, comparison)
        controller.ledger.log("decided", path)
        comparisons.append(comparison)
    return comparisons


def _access_of_campaign(controller: Controller, plan: Plan) -> int:
    """Return the number of a plan's access to the test split within its campaign, from 1."""
    campaign = (plan.branch, plan.rules_hash)
    uses = _uses(controller.ledger).items()
    return sum(used_by == campaign and number < (plan.access or 0) for number, used_by in uses) + 1


def _make_runs(task: Task) -> list[FreshRun]:
    """Make the missing runs. Return all finished runs."""
    controller, path = task.controller, task.folder / PLAN_NAME
    controller.bench.engine.prepare_at_start(controller.reporter.note)
    controller.bench.require_ready()
    task.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_json(path, task.plan)
        controller.ledger.log("begun", path)
    order, done = task.runs, task.done()
    for name, (side, seed) in 2 * [*order.items()]:  # a run that the infrastructure lost is tried once more at the end
        if name not in done:
            if controller.is_stopping():
                raise Interrupted("stopped between two runs of the certificate")
            controller.reporter.note(f"{side}, seed {seed}: run {len(done) + 1} of {len(order)}")
            if (run := _make_run(task, side, seed, task.folder / name)) is not None:
                done[name] = run
    return list(done.values())


def _make_run(task: Task, side: str, seed: int, folder: Path) -> FreshRun | None:
    """Make and store one run. Return it, evaluated or with failed training; None if the infrastructure failed."""
    controller, plan, ledger = task.controller, task.plan, task.controller.ledger
    job, job_path = job_left(folder), folder / JOB_NAME
    try:
        if isinstance(controller.bench.executor, SlurmExecutor) and job is not None:
            controller.bench.executor.take_over(folder, job)  # an earlier start of this command submitted it
        else:
            remove_tree(folder)  # of an interrupted run
            folder.mkdir()
            job = controller.bench.job(
                task.settings[side], seed, controller.bench.hardware(task.first), split=plan.split
            )
            access = None
            if plan.access is not None:
                branch, rules_hash, configs = _question(plan)
                access = Access(
                    number=plan.access, branch=branch, rules_hash=rules_hash, configs=configs, token=job.token
                )
            controller.submit(folder, job, access)
        while not controller.bench.executor.is_over(folder):
            controller.wait()
        require_unchanged(
            controller.repo,
            controller.bench.rules,
            controller.bench.rules_hash,
            controller.repo.head().commit,
            controller.bench.rules_hash,
        )
        result = controller.bench.executor.result(folder)
        if result.training.failure is Failure.MACHINERY:
            raise EngineError(result.training.cause or "no cause known")
        evaluation = result.evaluation
        proof = (
            controller.bench.engine.prove(folder, evaluation.weights, controller.reporter.note) if evaluation else None
        )
    except (Interrupted, IntegrityError):
        controller.bench.executor.cancel([folder])
        job_path.unlink(missing_ok=True)  # no later command waits for it
        raise
    except EngineError as error:
        job_path.unlink(missing_ok=True)
        controller.reporter.note(f"{side}, seed {seed}: failed, not the config's fault: {error}")
        return None
    finally:
        for path in folder.iterdir():  # weights are large, and what trained may hold examples
            if path.is_dir() or (path.name not in _KEPT and path.suffix != ".log"):
                remove_tree(path)
    job_name = job_path.relative_to(ledger.runs_dir).as_posix()
    num_starts = [line.file for line in ledger.journal.lines()[0]].count(job_name)
    run = FreshRun(side, seed, result, proof, max(num_starts, 1))
    write_json(folder / RUN_NAME, run)
    text = f"crashed: {result.training.cause}" if evaluation is None else f"{evaluation.eval_score:.4f}"
    controller.reporter.note(f"{side}, seed {seed}: {text}")
    return run


def _evaluations(task: Task, runs: Sequence[FreshRun]) -> list[list[Evaluation]]:
    """Return the evaluations of each side. EngineError if a side has no run, UsageError for other examples."""
    sides = [[e for run in runs if run.side == side and (e := run.result.evaluation) is not None] for side in SIDES]
    for side, evaluations in zip(SIDES, sides, strict=True):
        if not evaluations:
            causes = [run.result.training.cause for run in runs if run.side == side]
            cause = [*causes, "all runs were lost to infrastructure failures"][0]
            raise EngineError(f"no run of the {side} was evaluated: {cause}", "Fix that, then repeat the command.")
    if len({evaluation.examples_sha256 for evaluations in sides for evaluation in evaluations}) > 1:
        fix = f"Give it up and begin another: rm -r {task.folder}"
        raise UsageError("the examples changed since this comparison began", fix)
    return sides


def _estimate(task: Task, sides: Sequence[Sequence[Evaluation]], index: int | None = None) -> Estimate:
    """Return the difference over all environments, or on the environment with this index."""
    baseline, incumbent = (
        [
            weighted(e.example_scores, e.parts) if index is None else split(e.example_scores, e.parts)[index]
            for e in side
        ]
        for side in sides
    )
    return estimate(baseline, incumbent, task.controller.bench.rules.decision)


def _notes(task: Task, runs: Sequence[FreshRun], result: Estimate) -> list[str]:
    """Return lines on what limits the comparison."""
    notes = [result.note] if result.note else []
    for run in runs:
        name = f"{run.side}, seed {run.seed}"
        notes += [f"{name}: crashed: {run.result.training.cause}"] if run.result.evaluation is None else []
        notes += [f"{name}: {run.proof}"] if run.proof else []
        notes += [f"{name}: was started {run.num_starts} times"] if run.num_starts > 1 else []
    if num_lost := 2 * task.plan.num_seeds - len(runs):
        notes.append(f"{num_lost} run{'s' if num_lost > 1 else ''} lost to infrastructure failures")
    if task.unused_keys:
        notes.append(f"keys of the incumbent that change nothing there: {', '.join(task.unused_keys)}")
    records = task.controller.ledger.records()
    campaign = (task.plan.branch, task.plan.rules_hash)
    ours = [record for record in records if (record.branch, record.rules_hash) == campaign]
    notes += [] if all(record.proposal.is_isolated for record in ours) else [f"agent: {NOT_ISOLATED}"]
    first = task.first
    if (
        task.plan.split == "validation"
        and first
        and {*first.environments} & {*task.controller.bench.rules.environment_names}
    ):
        notes.append("scored on the validation split, on which the incumbent was chosen: the gain may be flattered")
    if task.plan.access is not None:
        num_damaged = task.controller.ledger.journal.lines()[1]
        skipped = f"{JOURNAL_NAME} has damaged lines ({num_damaged}): uses of the test split in them are not counted"
        notes += [skipped] if num_damaged else []
    return notes


class Certified(Document, frozen=True, kw_only=True, tag="certify"):
    """The output of `nightshift certify`: comparisons, none with --dry-run, and the plan in lines for people."""

    plan: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    def __str__(self) -> str:
        """The blocks that the command prints: `key: value` lines, scores as fractions."""
        blocks = ("\n".join(f"{key + ':':18}{value}" for key, value in _lines(c)) for c in self.comparisons)
        return "\n".join(f"---\n{block}" for block in blocks)


def read_comparisons(ledger: Ledger) -> list[Comparison]:
    """Return the finished comparisons, the latest last."""
    paths = sorted(ledger.runs_dir.glob(f"{FOLDER}/*/{COMPARISON_NAME}"))
    comparisons = [read_json(path, Comparison, f"Give it up: rm -r {path.parent}") for path in paths]
    return sorted(filter(None, comparisons), key=lambda comparison: comparison.created)


def _lines(c: Comparison) -> list[tuple[str, str]]:
    parts = [(f"{name}_difference", f"{e.difference:+.6f} ({_interval(e)})") for name, e in c.by_environment.items()]
    access = "" if c.access is None else f"; access {c.access} to the test split by this campaign"
    return [
        ("difference", f"{c.estimate.difference:+.6f}"),
        ("interval_95", _interval(c.estimate)),
        ("verdict", f"{c.verdict} (p = {c.estimate.p_value:.2g}, tested at level {c.level:.3g}{access})"),
        ("baseline_score", f"{c.baseline_score:.6f}"),
        ("incumbent_score", f"{c.incumbent_score:.6f}"),
        ("strict_scores", " ".join(f"{value:.6f}" for value in c.strict_scores or ())),
        *parts,
        ("baseline", c.plan.names["baseline"]),
        ("incumbent", c.plan.names["incumbent"]),
        ("where", f"{'+'.join(c.environments)}, {c.plan.split} split, {c.budget_seconds:g} s of training, {c.model}"),
        ("num_seeds", " ".join(f"{side} {number}" for side, number in c.num_seeds.items())),
        ("num_examples", str(c.num_examples)),
        ("estimator", c.estimator),
        *(("note", note) for note in c.notes),
    ]


def _interval(result: Estimate) -> str:
    return f"{result.interval[0]:+.6f} {result.interval[1]:+.6f}"

"""`nightshift certify`: train two configs with fresh seeds, and compare them.

Runs start in the order baseline, incumbent, incumbent, baseline, ..., in all slots of the campaign, so that a machine
that becomes slower affects both configs. runs/certify/NNNN/ contains the plan and the finished runs.

m0 runs of the baseline and m1 runs of the incumbent have a score, each with its own seed, on the same n examples:
score[c, r, i] = mean[c] + example[c, i] + seed[c, r] + rest[c, r, i] for config c, run r, example i.

    difference = mean of the incumbent's runs - mean of the baseline's runs
    variance   = V / n + k * (S - E / n),  S = max(R, E / n),  k = 1 / m0 + 1 / m1

V is the sample variance, over examples, of the difference between the configs' mean scores of an example. R is the
variance of run scores within a config, E the residual mean square of a two-way analysis of variance (run x example);
both are pooled over the configs. The interval uses the t quantile at Satterthwaite's (1946) degrees of freedom,
U^2 / ((2 k S)^2 / df + (V / n)^2 / (n - 1)), df = m0 + m1 - 2, U = V / n + k (2 S - E / n). U has 2 S in place of S,
because S from few seeds is often too small; the interval then has its nominal coverage (benchmarks/certificates.py). If
R cannot be measured, S is `seed_sd` squared, E is 0 and df is SEED_DF; `Estimate.note` reports this.
"""

import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nightshift.campaign.campaign import split, weighted
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import METRICS_NAME
from nightshift.campaign.posterior import SEED_DF, t_probability, t_quantile
from nightshift.campaign.records import (
    CERTIFY_NAME,
    COMPARISON_NAME,
    NO_DIFFERENCE,
    NOT_ISOLATED,
    PLAN_NAME,
    RESULT_NAME,
    RUN_NAME,
    SIDES,
    ComparedRun,
    Comparison,
    Estimate,
    Evaluation,
    Plan,
    Result,
)
from nightshift.config.rules import RuleConstants
from nightshift.config.rules_toml import rules_elsewhere
from nightshift.config.train_toml import Config, parse
from nightshift.engines.base import on_cards
from nightshift.errors import EngineError, Failure, Interrupted, UsageError
from nightshift.executors.gpus import num_gpus
from nightshift.executors.slurm import job_left
from nightshift.experiment.checkout import require_unchanged
from nightshift.experiment.experiment import Controller
from nightshift.files import Document, read_json, remove_tree, write_json
from nightshift.text import counted
from nightshift.waiting import lasted

FIRST_SEED_INDEX = 100_000  # experiments use the indices from 0; a campaign has fewer than this
_NUM_BLOCKS = 10_000_000  # a plan's block of seeds is drawn at random from so many; the last seed is below 2^32
_MAX_TRIES = 2  # how often a run is started if infrastructure failures end it
_CAMPAIGN = attrgetter("branch", "rules_hash")
_COMPARED = attrgetter("branch", "rules_hash", "split", "configs")  # equal for two plans of the same comparison
LEVEL = 0.05  # probability that any test of a campaign finds a difference although its two configs are equal
MIN_SEED_DF = 2  # with one degree of freedom the t quantile is 12.7, so the interval is useless
_STORED_FILES = (METRICS_NAME, RESULT_NAME, RUN_NAME)  # files of a run that stay after its end, with its logs

Scores = Sequence[float] | NDArray[np.float64]  # one value per example, in the order of the split


class Task(NamedTuple):
    """A comparison that `certify` starts or resumes."""

    controller: Controller
    hardware: str  # of its runs, for records
    plan: Plan
    settings: Mapping[str, Mapping[str, Any]]  # by side, for the engine

    @property
    def folder(self) -> Path:
        return self.controller.ledger.runs_dir / CERTIFY_NAME / f"{self.plan.number:04d}"

    def run_dir(self, run: ComparedRun) -> Path:
        return self.folder / f"{run.side}-{run.seed}"

    def runs(self, is_finished: bool) -> list[ComparedRun]:
        """Return the finished or the missing runs in order."""
        runs = list[ComparedRun]()
        for index in range(2 * self.plan.num_seeds):
            side = "incumbent" if index % 4 in (1, 2) else "baseline"
            run = ComparedRun(side, self.controller.bench.rules.first_seed + self.plan.first_seed_index + index)
            folder = self.run_dir(run)
            finished = read_json(folder / RUN_NAME, ComparedRun, f"To repeat the run, delete it: rm -r {folder}")
            if bool(finished) == is_finished:
                runs.append(finished or run)
        return runs

    def num_waves(self) -> int:
        """Return the number of rounds in which the missing runs can be trained, with one run per slot in a round."""
        return -(-len(self.runs(False)) // self.controller.bench.executor.num_slots)

    def describe(self) -> list[str]:
        """Return the plan as lines of text."""
        rules, plan, access = self.controller.bench.rules, self.plan, _access(self.controller.ledger, self.plan)
        num_examples = sum(environment.num_validation for environment in rules.scored)
        seeds, level = counted(plan.num_seeds, "new seed"), f"p < {level_of_access(access):.3g} (less in later uses)"
        return [
            f"certify:  {plan.names['incumbent']} (incumbent), compared with {plan.names['baseline']} (baseline)",
            f"number:   comparison {plan.number:04d}; to resume: uv run nightshift certify --resume {plan.number:04d}",
            f"where:    {'+'.join(rules.environment_names)}, {rules.budget_text} of training, {rules.model}",
            f"runs:     {seeds} for each config, {num_examples} examples of the {plan.split} split",
            f"time:     {lasted(self.num_waves() * rules.budget_seconds)} of training, plus start-up and evaluation",
            *(
                [f"access:   use {access} of the test split by this campaign; 'better' or 'worse' needs {level}"]
                if access
                else ()
            ),
        ]


def open_task(
    controller: Controller,
    num_seeds: int | None = None,
    environment: str = "",
    budget_seconds: float | None = None,
    revisions: Mapping[str, str] | None = None,
    *,
    resume: int | None = None,
    night: str = "",
) -> Task:
    """Return a new comparison, or one to resume. Starts no run. `environment`: a name, or several joined by +; with it,
    or with `budget_seconds`, the validation split is used. `revisions`: the commit of a side's config; by default the
    campaign's config. `resume`: a number, whose comparison has its own options. `night`: the start of a night, which
    resumes its own comparison."""
    ledger, repo, revisions = controller.ledger, controller.repo, dict(revisions or {})
    plans, configs, names = ledger.plans(), dict[str, Config](), dict[str, str]()
    old_plan = next(
        (plan for plan in reversed(plans) if plan.number == resume or (night and plan.night == night)), None
    )
    if resume is not None and (num_seeds or environment or revisions or budget_seconds):
        raise UsageError("--resume uses the options with which the comparison began", "Leave out other options.")
    if old_plan is not None:
        environment, budget_seconds, revisions = old_plan.environment, old_plan.budget_seconds, old_plan.revisions
    for side, revision in revisions.items():
        source = repo.config_at(revision)
        if source is None:
            cause = f"--{side} {revision}: there is no such commit, or no train.toml in it"
            raise UsageError(cause, "Fetch it (git fetch), or name another commit.")
        configs[side] = parse(source, f"train.toml of {revision}")
    first = controller.first_to_compare()
    if len(configs) < len(SIDES):
        if first is None:
            fix = "Switch to a campaign (git switch), or train a baseline first: uv run run.py"
            raise UsageError(f"{repo.head()} has no campaign with a baseline", fix)
        campaign = controller.campaign()
        if not campaign.kept and not configs:
            fix = "Run more experiments (uv run run.py), or name a commit: --incumbent REV"
            raise UsageError("no change is kept, so the incumbent is the baseline", fix)
        configs = {"baseline": campaign.compose(()), "incumbent": campaign.compose(campaign.kept)} | configs
        names["baseline"] = f"experiment {first.number:04d}"
        names["incumbent"] = " + ".join([names["baseline"], *(change.name for change in campaign.kept)])
    elif configs["baseline"].hash == configs["incumbent"].hash:
        raise UsageError("both commits have the same train.toml", "Name two commits whose train.toml differs.")
    if environment or budget_seconds:
        controller = _with_other_rules(controller, environment, budget_seconds)
    bench = controller.bench
    plan = Plan(
        number=max([0, *(old.number for old in plans), *(access.number for access in ledger.accesses())]) + 1,
        branch=repo.head().branch,
        rules_hash=bench.rules_hash,
        split="validation" if environment or budget_seconds else "test",
        configs={side: configs[side].hash for side in SIDES},
        names=names | revisions,
        num_seeds=num_seeds or 3,
        first_seed_index=FIRST_SEED_INDEX + 200 * secrets.randbelow(_NUM_BLOCKS),  # --seeds is at most 100
        environment=environment,
        budget_seconds=budget_seconds,
        revisions=revisions,
        night=night,
    )
    if old_plan is not None and _COMPARED(old_plan) == _COMPARED(plan):
        plan = old_plan
    elif resume is not None:
        cause = f"--resume {resume:04d}: there is no such comparison, or its branch, its rules or a config changed"
        raise UsageError(cause, "Begin another: uv run nightshift certify")
    settings = {side: bench.engine.validate(configs[side]).settings for side in SIDES}
    return Task(controller, bench.hardware(first), plan, settings)


def _with_other_rules(controller: Controller, environment: str, budget_seconds: float | None) -> Controller:
    """Return a controller whose runs use other environments or another budget. UsageError if they cannot run here."""
    bench = controller.bench
    names = environment.split("+") if environment else bench.rules.environment_names
    rules = rules_elsewhere(bench.root, bench.rules, names, num_gpus(os.environ))
    if budget_seconds:
        rules = rules.with_budget(budget_seconds)
    rules = on_cards(rules, bench.root, os.environ, bench.request.gpus)
    bench = replace(
        bench,
        rules=rules,
        rules_hash=rules.hash(bench.root),
        engine=bench.engine.under(rules),
        engine_of={gpus: engine.under(rules) for gpus, engine in bench.engine_of.items()},
    )
    return replace(controller, bench=bench)


def _access(ledger: Ledger, plan: Plan) -> int | None:
    """Return k for the k-th use of the test split by the plan's campaign; None for the validation split."""
    # Two sources, because the user may delete either.
    uses: list[Any] = [*ledger.accesses(), *(c.plan for c in ledger.comparisons() if c.plan.split == "test")]
    numbers = {use.number for use in uses if _CAMPAIGN(use) == _CAMPAIGN(plan)}
    return 1 + sum(number < plan.number for number in numbers) if plan.split == "test" else None


def certify(task: Task) -> Comparison:
    """Train the missing runs. Write and return the comparison. EngineError if no run of a side was evaluated,
    UsageError if the examples differ."""
    controller, plan = task.controller, task.plan
    path = task.folder / COMPARISON_NAME
    for line in task.describe():
        controller.reporter.note(line)
    if not path.exists():
        _make_runs(task)
    runs, by_side = tuple(task.runs(True)), {side: list[Evaluation]() for side in SIDES}
    for run in runs:
        result = read_json(task.run_dir(run) / RESULT_NAME, Result, "Begin another comparison.")
        if result and result.evaluation:
            by_side[run.side].append(result.evaluation)
    for side, evaluations in by_side.items():
        if not evaluations:
            fix = f"Remove the cause, then: uv run nightshift certify --resume {plan.number:04d}"
            why = next((run.note for run in runs if run.side == side), f"see the logs in {task.folder}")
            raise EngineError(f"no run of the {side} was evaluated: {why}", fix)
    sides = [*by_side.values()]
    if len({evaluation.examples_sha256 for side in sides for evaluation in side}) > 1:
        cause = f"the examples changed since comparison {plan.number:04d} began"
        raise UsageError(cause, "Begin another: uv run nightshift certify")
    sample, access = sides[0][0], _access(controller.ledger, plan)

    def over(part: int | None = None) -> Estimate:
        """Return the difference over all environments, or for the environment with this index."""
        old, new = (
            [
                weighted(e.example_scores, e.parts) if part is None else split(e.example_scores, e.parts)[part]
                for e in side
            ]
            for side in sides
        )
        return estimate(old, new, controller.bench.rules.decision)

    strict = [[e.strict_score for e in side if e.strict_score is not None] for side in sides]
    difference, level = over(), level_of_access(access)
    comparison = Comparison(
        plan=plan,
        created=controller.now().isoformat(timespec="milliseconds"),
        verdict=verdict(difference, level),
        level=level,
        access=access,
        estimate=difference,
        runs=runs,
        num_examples=len(sample.example_scores),
        strict_scores=tuple(map(fmean, strict)) if all(strict) else None,
        by_environment={part.environment: over(i) for i, part in enumerate(sample.parts)},
        guards={
            guard.environment: tuple(fmean(e.guards[i].score for e in side) for side in sides)
            for i, guard in enumerate(sample.guards)
        },
        notes=tuple(filter(None, _notes(task, difference, runs))),
    )
    write_json(path, comparison)
    return comparison


def _notes(task: Task, result: Estimate, runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield what limits the conclusions from the comparison, one line each. A line may be empty."""
    plan = task.plan
    yield result.note
    yield from (f"{run.side}, seed {run.seed}: {run.note}" for run in runs if run.note)
    numbers = {sum(run.side == side and run.score is not None for run in runs) for side in SIDES}
    if len(numbers) > 1:
        yield "unequal numbers of scored runs: the 95 % interval then covered 82 to 88 % in simulated certificates"
    if num_lost := 2 * plan.num_seeds - len(runs):
        yield f"{counted(num_lost, 'run')} lost to infrastructure failures"
    if not all(r.proposal.is_isolated for r in task.controller.ledger.records() if _CAMPAIGN(r) == _CAMPAIGN(plan)):
        yield f"agent: {NOT_ISOLATED}"
    if plan.split == "validation":
        yield "scored on the validation split: the gain may be too high if the incumbent was chosen on these examples"


def _make_runs(task: Task) -> None:
    """Train the missing runs, one at a time per slot. A run that infrastructure failures end is started once more."""
    controller, bench, plan = task.controller, task.controller.bench, task.plan
    executor, note, path = bench.executor, controller.reporter.note, task.folder / PLAN_NAME
    executor.avoided = ()  # use every slot and node, even if a night has avoided some
    bench.engine.prepare_at_start(note)
    executor.require_ready()
    bench.require_ready(executor.free_slots)
    controller.require_disk(controller.folded())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, plan)
    access = {name: getattr(plan, name) for name in ("number", "branch", "rules_hash") if plan.split == "test"}
    for _ in range(_MAX_TRIES):
        missing = task.runs(False)
        while missing:
            if controller.is_stopping():
                raise Interrupted("stopped before all runs of the certificate were trained")
            wave, missing = missing[: executor.num_slots], missing[executor.num_slots :]
            folders = list[Path]()
            try:
                for run in wave:
                    folders.append(folder := task.run_dir(run))
                    number = run.seed - bench.rules.first_seed - plan.first_seed_index + 1
                    note(f"{run.side}, seed {run.seed}: run {number} of {2 * plan.num_seeds}")
                    job = job_left(folder)
                    if job is None or not executor.take_over(folder, job):
                        remove_tree(folder)  # files of an interrupted run
                        folder.mkdir()
                        job = bench.job(task.settings[run.side], run.seed, task.hardware, split=plan.split)
                        controller.submit(folder, job, **access)
                while not all(map(executor.is_over, folders)):
                    controller.wait()
                for run in wave:
                    note(f"{run.side}, seed {run.seed}: {_finish(task, run)}")
            except Interrupted as error:
                fix = f"To finish the comparison: uv run nightshift certify --resume {plan.number:04d}"
                raise Interrupted(error.cause, "" if plan.night else fix) from None  # a night resumes its own
            finally:
                executor.cancel(folders)
                # Delete weights, files with examples (agents could read them) and jobs (a later command would wait).
                for path in chain.from_iterable(folder.glob("*") for folder in folders):
                    if path.name not in _STORED_FILES and path.suffix != ".log":
                        remove_tree(path)


def _finish(task: Task, run: ComparedRun) -> str:
    """Read the result of a run that is over, prove its weights, and write run.json unless the infrastructure failed.
    Return a line on the run."""
    controller, bench, folder = task.controller, task.controller.bench, task.run_dir(run)
    commit = controller.repo.head().commit
    require_unchanged(controller.repo, bench.rules, task.plan.rules_hash, commit, bench.rules_hash)
    try:
        result = bench.executor.result(folder)
        training, score, note = result.training, None, f"crashed: {result.training.cause}"
        if training.failure is Failure.INFRASTRUCTURE:
            raise EngineError(training.cause or "no cause known")
        if result.evaluation:
            score, note = result.evaluation.eval_score, controller.prove(folder, result.evaluation) or ""
    except EngineError as error:
        return f"infrastructure failure: {error}"
    run = ComparedRun(run.side, run.seed, training.num_steps, score, note)
    write_json(folder / RUN_NAME, run)
    return note if score is None else "; ".join(filter(None, (str(run), note)))


def estimate(baseline: Sequence[Scores], incumbent: Sequence[Scores], rules: RuleConstants) -> Estimate:
    """Estimate incumbent minus baseline (module docstring) from runs on the same examples, at least one per side."""
    sides = [np.asarray(runs, float) for runs in (baseline, incumbent)]
    n = sides[0].shape[1]
    k = sum(1 / len(side) for side in sides)
    paired = sides[1].mean(axis=0) - sides[0].mean(axis=0)
    example_variance, note = float(paired.var(ddof=1)) / n, ""  # V / n
    squares, residuals, df = 0.0, 0.0, float(sum(len(side) - 1 for side in sides))
    for side in sides:
        means = side.mean(axis=1)
        squares += float(((means - means.mean()) ** 2).sum())
        residuals += float(((side - means[:, None] - side.mean(axis=0) + means.mean()) ** 2).sum())
    if df >= MIN_SEED_DF and squares > 0:
        rest_variance = residuals / (df * (n - 1)) / n  # E / n
        run_variance = max(squares / df, rest_variance)  # S
    else:
        note = f"{100 * rules.seed_sd:g} pp is assumed as the standard deviation between seeds (seed_sd of the "
        note += "environment), because these runs cannot show it; if it is larger, the interval is too narrow"
        run_variance, rest_variance, df = rules.seed_sd**2, 0.0, SEED_DF
    larger_variance = example_variance + k * (2 * run_variance - rest_variance)  # U
    df = larger_variance**2 / ((2 * k * run_variance) ** 2 / df + example_variance**2 / (n - 1))
    stderr, difference = math.sqrt(larger_variance - k * run_variance), float(paired.mean())
    half = t_quantile(0.975, df) * stderr
    return Estimate(difference, stderr, df, (difference - half, difference + half), note)


def p_value(result: Estimate) -> float:
    """Return the two-sided p-value of a difference. If its standard error is 0, this is 1 for no difference, else 0."""
    difference = result.difference
    return t_probability(difference / result.stderr, result.df) if result.stderr else float(difference == 0)


def level_of_access(k: int | None) -> float:
    """Return the level of the k-th use of the test split, LEVEL / (k (k + 1)): all levels sum to LEVEL. None: LEVEL."""
    return LEVEL / (k * (k + 1)) if k else LEVEL


def verdict(result: Estimate, level: float) -> str:
    """Return `better`, `worse` or NO_DIFFERENCE, by a test at `level`."""
    if p_value(result) > level:
        return NO_DIFFERENCE
    return "better" if result.difference > 0 else "worse"


class Certified(Document, frozen=True, kw_only=True, tag="certify"):
    """The output of `nightshift certify`: the plan as lines of text, and the comparison, which --dry-run omits. As
    text only the comparison, because the plan is printed when the runs begin."""

    plan: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    def __str__(self) -> str:
        lines = list[str]()
        for c in self.comparisons:
            low, high = c.estimate.interval
            tested = f"{c.verdict} (p = {p_value(c.estimate):.2g}, tested at level {c.level:.3g})"
            lines += [
                "---",
                f"compared:         {c.plan.names['incumbent']} with {c.plan.names['baseline']}",
                f"difference:       {c.estimate.difference:+.6f}",
                f"interval_95:      {low:+.6f} {high:+.6f}",
                f"verdict:          {'; '.join(filter(None, (tested, c.crashes)))}",
                *(f"{side + '_score:':18}{c.score(side):.6f}" for side in SIDES),
                f"strict_scores:    {' '.join(f'{value:.6f}' for value in c.strict_scores or ())}",
                *(
                    f"{name + '_difference:':18}{e.difference:+.6f} ± {e.stderr:.6f}"
                    for name, e in c.by_environment.items()
                ),
                *(
                    f"{name + '_guard:':18}baseline {old:.6f}, incumbent {new:.6f}"
                    for name, (old, new) in c.guards.items()
                ),
                f"scores:           {c.runs_text}; in %",
                f"num_examples:     {c.num_examples}",
                *(f"note:             {note}" for note in c.notes),
            ]
        return "\n".join(lines)

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

from __future__ import annotations

import math
import os
import secrets
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from nightshift.campaign.campaign import split, weighted
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import METRICS_NAME
from nightshift.campaign.posterior import SEED_DF, t_probability, t_quantile
from nightshift.campaign.records import (
    CERTIFY_NAME,
    COMPARISON_NAME,
    JOB_NAME,
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
    FreshRun,
    Plan,
    Record,
)
from nightshift.config.rules import RuleConstants
from nightshift.config.rules_toml import rules_elsewhere
from nightshift.config.train_toml import Config, parse
from nightshift.engines.base import Effective, on_cards
from nightshift.errors import EngineError, Failure, Interrupted, UsageError
from nightshift.executors.gpus import num_gpus
from nightshift.executors.slurm import job_left
from nightshift.experiment.checkout import require_unchanged
from nightshift.experiment.experiment import Bench, Controller
from nightshift.files import Document, read_json, remove_tree, write_json
from nightshift.text import counted
from nightshift.waiting import lasted

DEFAULT_SEEDS, MAX_SEEDS = 3, 100
FIRST_SEED_INDEX = 100_000  # experiments use the indices from 0; a campaign has fewer than this
_SEEDS_OF_PLAN = 2 * MAX_SEEDS
_NUM_BLOCKS = 10_000_000  # a plan's block of seeds is drawn at random from so many; the last seed is below 2^32
_MAX_TRIES = 2  # how often a run is started if infrastructure failures end it
_CAMPAIGN = attrgetter("branch", "rules_hash")
_COMPARED = attrgetter("branch", "rules_hash", "split", "configs")  # equal for two plans of the same comparison
LEVEL = 0.05  # probability that any test of a campaign finds a difference although its two configs are equal
MIN_SEED_DF = 2  # with one degree of freedom the t quantile is 12.7, so the interval is useless
_STORED_FILES = (JOB_NAME, METRICS_NAME, RESULT_NAME, RUN_NAME)  # files of a run that stay after its end, with its logs

Scores = Sequence[float] | NDArray[np.float64]  # one value per example, in the order of the split


class _Run(NamedTuple):
    """One run of a comparison: the config of a side, trained with one seed."""

    side: str
    seed: int
    folder: Path
    label: str  # `run 2 of 6`
    fresh: FreshRun | None  # the result; None until the run is finished


class Task(NamedTuple):
    """A comparison that `certify` starts or resumes."""

    controller: Controller
    first: Record | None  # the campaign's first experiment; None if the branch has no campaign
    plan: Plan
    effective: Mapping[str, Effective]  # by side

    @property
    def bench(self) -> Bench:
        return self.controller.bench

    @property
    def folder(self) -> Path:
        return self.controller.ledger.runs_dir / CERTIFY_NAME / f"{self.plan.number:04d}"

    def runs(self) -> list[_Run]:
        """Return all runs in order, with stored results."""
        runs, num_runs = list[_Run](), 2 * self.plan.num_seeds
        for index in range(num_runs):
            side = "incumbent" if index % 4 in (1, 2) else "baseline"
            seed = self.bench.rules.first_seed + self.plan.first_seed_index + index
            folder = self.folder / f"{side}-{seed}"
            fresh = read_json(folder / RUN_NAME, FreshRun, f"To repeat the run, delete it: rm -r {folder}")
            runs.append(_Run(side, seed, folder, f"run {index + 1} of {num_runs}", fresh))
        return runs

    def finished(self) -> list[FreshRun]:
        return [run.fresh for run in self.runs() if run.fresh]

    def num_waves(self) -> int:
        """Return the number of rounds in which the missing runs can be trained, with one run per slot in a round."""
        return math.ceil((2 * self.plan.num_seeds - len(self.finished())) / self.bench.executor.num_slots)

    def describe(self) -> list[str]:
        """Return the plan as lines of text."""
        rules, plan = self.bench.rules, self.plan
        num_examples = sum(environment.num_validation for environment in rules.scored)
        seeds = counted(plan.num_seeds, "new seed")
        lines = [
            f"certify:  {plan.names['incumbent']} (incumbent), compared with {plan.names['baseline']} (baseline)",
            f"number:   comparison {plan.number:04d}; to resume: uv run nightshift certify --resume {plan.number:04d}",
            f"where:    {'+'.join(rules.environment_names)}, {rules.budget_text} of training, {rules.model}",
            f"runs:     {seeds} for each config, {num_examples} examples of the {plan.split} split",
            f"time:     at least {lasted(self.num_waves() * rules.budget_seconds)}",
        ]
        if access := _access(self.controller.ledger, plan):
            level = f"the verdict 'better' or 'worse' needs p < {level_of_access(access):.3g}"
            lines.append(f"access:   use {access} of the test split by this campaign; {level}")
        return lines


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
    campaign's config. `resume`: a number. `night`: the start of a night, which resumes its own comparison."""
    ledger, revisions = controller.ledger, dict(revisions or {})
    plans = ledger.plans()
    old_plan = next(
        (plan for plan in reversed(plans) if plan.number == resume or (night and plan.night == night)), None
    )
    if resume is not None:
        if num_seeds or environment or revisions or budget_seconds is not None:
            raise UsageError("--resume uses the options with which the comparison began", "Leave out other options.")
        if old_plan is None:
            raise UsageError(f"runs/{CERTIFY_NAME} has no comparison {resume:04d}", "Leave out --resume.")
        environment, budget_seconds, revisions = old_plan.environment, old_plan.budget_seconds, old_plan.revisions
    first, configs, names = _configs(controller, revisions)
    has_other_rules = bool(environment) or budget_seconds is not None
    if has_other_rules:
        controller = _with_other_rules(controller, environment, budget_seconds)
    bench = controller.bench
    plan = Plan(
        number=1 + max([*(plan.number for plan in plans), *(access.number for access in ledger.accesses())], default=0),
        branch=controller.repo.head().branch,
        rules_hash=bench.rules_hash,
        split="validation" if has_other_rules else "test",
        configs={side: configs[side].hash for side in SIDES},
        names=names,
        num_seeds=num_seeds or DEFAULT_SEEDS,
        first_seed_index=FIRST_SEED_INDEX + _SEEDS_OF_PLAN * secrets.randbelow(_NUM_BLOCKS),
        environment=environment,
        budget_seconds=budget_seconds,
        revisions=revisions,
        night=night,
    )
    if old_plan is not None:
        if _COMPARED(old_plan) == _COMPARED(plan):
            plan = old_plan
        elif resume is not None:
            cause = f"comparison {resume:04d} cannot be resumed: its branch, its rules or a config changed"
            raise UsageError(cause, "Begin another: uv run nightshift certify")
    effective = {side: bench.engine.validate(configs[side]) for side in SIDES}
    return Task(controller, first, plan, effective)


def _configs(
    controller: Controller, revisions: Mapping[str, str]
) -> tuple[Record | None, dict[str, Config], dict[str, str]]:
    """Return the campaign's first experiment, and by side the configs and their names. UsageError if one is missing."""
    configs, names = dict[str, Config](), dict(revisions)
    for side, revision in revisions.items():
        source = controller.repo.config_at(revision)
        if source is None:
            cause = f"--{side} {revision}: there is no such commit, or no train.toml in it"
            raise UsageError(cause, "Fetch it (git fetch), or name another commit.")
        configs[side] = parse(source, f"train.toml of {revision}")
    first = controller.first_to_compare(controller.ledger.records())
    if len(configs) < len(SIDES):
        if first is None:
            fix = "Switch to a campaign (git switch), or train a baseline first: uv run run.py"
            raise UsageError(f"{controller.repo.head()} has no campaign with a baseline", fix)
        campaign = controller.campaign()
        if not campaign.kept and not configs:
            cause = "no change is kept, so the incumbent is the baseline"
            fix = "Run more experiments until a change is kept: uv run run.py"
            for row in campaign.rows(campaign.decided):
                if row.now == "reverted" and row.commit:
                    command = f"uv run nightshift certify --incumbent {row.commit}"
                    fix += f". To certify {row.change}, which was reverted: {command}"
            raise UsageError(cause, fix)
        configs = {"baseline": campaign.compose(()), "incumbent": campaign.compose(campaign.kept)} | configs
        incumbent = f"incumbent after experiment {campaign.decided[-1].number:04d}"
        names = {"baseline": f"experiment {first.number:04d}", "incumbent": incumbent} | names
    elif configs["baseline"].hash == configs["incumbent"].hash:
        raise UsageError("both commits have the same train.toml", "Name two commits whose train.toml differs.")
    return first, configs, names


def _with_other_rules(controller: Controller, environment: str, budget_seconds: float | None) -> Controller:
    """Return a controller whose runs use other environments or another budget. UsageError if they cannot run here."""
    bench = controller.bench
    names = environment.split("+") if environment else bench.rules.environment_names
    rules = rules_elsewhere(bench.root, bench.rules, names, num_gpus(os.environ))
    if budget_seconds is not None:
        rules = rules.with_budget(budget_seconds)
    rules = on_cards(rules, bench.root, os.environ, bench.request.gpus)
    engine_of = {gpus: engine.under(rules) for gpus, engine in bench.engine_of.items()}
    rules_hash, engine = rules.hash(bench.root), bench.engine.under(rules)
    bench = replace(bench, rules=rules, rules_hash=rules_hash, engine=engine, engine_of=engine_of)
    return replace(controller, bench=bench)


def _access(ledger: Ledger, plan: Plan) -> int | None:
    """Return k for the k-th use of the test split by the plan's campaign; None for the validation split."""
    if plan.split != "test":
        return None
    plans = [comparison.plan for comparison in ledger.comparisons()]
    # Two sources, because the user may delete either.
    uses = {plan.number: _CAMPAIGN(plan) for plan in plans if plan.split == "test"}
    uses |= {access.number: _CAMPAIGN(access) for access in ledger.accesses()}
    return 1 + sum(number < plan.number and campaign == _CAMPAIGN(plan) for number, campaign in uses.items())


def certify(task: Task) -> Comparison:
    """Train the missing runs. Write and return the comparison. EngineError if no run of a side was evaluated."""
    controller, rules, path = task.controller, task.bench.rules, task.folder / COMPARISON_NAME
    for line in task.describe():
        controller.reporter.note(line)
    if not path.exists():
        try:
            _make_runs(task)
        except Interrupted as error:
            raise Interrupted(error.cause, _resume_text(task)) from None
    sides = baseline, incumbent = _evaluations(task)
    sample, access = baseline[0], _access(controller.ledger, task.plan)

    def over(part: int | None = None) -> Estimate:
        """Return the difference over all environments, or for the environment with this index."""
        old, new = (
            [
                weighted(e.example_scores, e.parts) if part is None else split(e.example_scores, e.parts)[part]
                for e in side
            ]
            for side in sides
        )
        return estimate(old, new, rules.decision)

    strict = [[e.strict_score for e in side if e.strict_score is not None] for side in sides]
    result, level = over(), level_of_access(access)
    comparison = Comparison(
        plan=task.plan,
        created=controller.now().isoformat(timespec="milliseconds"),
        environments=rules.environment_names,
        budget_seconds=rules.budget_seconds,
        model=rules.model,
        verdict=verdict(result, level),
        level=level,
        access=access,
        estimate=result,
        runs=tuple(ComparedRun(r.side, r.seed, r.num_steps, r.score) for r in task.finished()),
        num_examples=len(sample.example_scores),
        strict_scores=(fmean(strict[0]), fmean(strict[1])) if all(strict) else None,
        by_environment={part.environment: over(i) for i, part in enumerate(sample.parts)},
        guards={
            guard.environment: (fmean(e.guards[i].score for e in baseline), fmean(e.guards[i].score for e in incumbent))
            for i, guard in enumerate(sample.guards)
        },
        notes=tuple(_notes(task, result)),
    )
    write_json(path, comparison)
    return comparison


def _resume_text(task: Task) -> str:
    """Return the command that finishes an interrupted comparison; empty for a night's, which resumes by itself."""
    plan, num_runs = task.plan, 2 * task.plan.num_seeds
    if plan.night or not (task.folder / PLAN_NAME).exists():
        return ""
    text = f"comparison {plan.number:04d} is unfinished ({len(task.finished())} of {num_runs} runs). Finish it: "
    text += f"uv run nightshift certify --resume {plan.number:04d}"
    if access := _access(task.controller.ledger, msgspec.structs.replace(plan, number=sys.maxsize)):
        text += f". A new certify is use {access} of the test split and needs p < {level_of_access(access):.3g}."
    return text


def _make_runs(task: Task) -> None:
    """Train the missing runs, one at a time per slot. A run that infrastructure failures end is started once more."""
    controller, executor, path = task.controller, task.bench.executor, task.folder / PLAN_NAME
    executor.avoided = ()  # use every slot and node, even if a night has avoided some
    task.bench.engine.prepare_at_start(controller.reporter.note)
    executor.require_ready()
    task.bench.require_ready(executor.free_slots)
    controller.require_disk(controller.folded())
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, task.plan)
    for _ in range(_MAX_TRIES):
        missing = [run for run in task.runs() if not run.fresh]
        while missing:
            if controller.is_stopping():
                raise Interrupted("stopped before all runs of the certificate were trained")
            wave, missing = missing[: executor.num_slots], missing[executor.num_slots :]
            folders = list[Path]()
            try:
                for run in wave:
                    folders.append(run.folder)
                    _start(task, run)
                while not all(map(executor.is_over, folders)):
                    controller.wait()
                for run in wave:
                    _finish(task, run)
            finally:
                executor.cancel(folders)
                for folder in folders:
                    _clean(folder)


def _start(task: Task, run: _Run) -> None:
    """Submit a run, or take over its job of an earlier controller."""
    controller, bench, plan = task.controller, task.bench, task.plan
    controller.reporter.note(f"{run.side}, seed {run.seed}: {run.label}")
    job = job_left(run.folder)
    if job is None or not bench.executor.take_over(run.folder, job):
        remove_tree(run.folder)  # files of an interrupted run
        run.folder.mkdir()
        job = bench.job(task.effective[run.side].settings, run.seed, bench.hardware(task.first), split=plan.split)
        access = {"number": plan.number, "branch": plan.branch, "rules_hash": plan.rules_hash}
        controller.submit(run.folder, job, **(access if plan.split == "test" else {}))


def _finish(task: Task, run: _Run) -> None:
    """Read the result of a run that is over, prove its weights, and write run.json unless the infrastructure failed."""
    controller, bench, proof_line = task.controller, task.bench, None
    commit = controller.repo.head().commit
    require_unchanged(controller.repo, bench.rules, task.plan.rules_hash, commit, bench.rules_hash)
    try:
        result = bench.executor.result(run.folder)
        evaluation, training = result.evaluation, result.training
        if training.failure is Failure.INFRASTRUCTURE:
            raise EngineError(training.cause or "no cause known")
        if evaluation:
            proof_line = controller.prove(run.folder, evaluation)
    except EngineError as error:
        controller.reporter.note(f"{run.side}, seed {run.seed}: infrastructure failure: {error}")
        return
    score = evaluation.eval_score if evaluation else None
    write_json(run.folder / RUN_NAME, FreshRun(run.side, run.seed, training.num_steps, score, result, proof_line))
    outcome = f"crashed: {training.cause}" if score is None else f"{score:.4f}"
    controller.reporter.note(f"{run.side}, seed {run.seed}: {outcome}, {training.num_steps} steps")


def _clean(folder: Path) -> None:
    """Delete weights, files with examples, which agents could read, and the job of a run without a result, for which a
    later command would wait."""
    stored = _STORED_FILES if (folder / RUN_NAME).exists() else _STORED_FILES[1:]
    for path in folder.glob("*"):
        if path.is_dir() or (path.name not in stored and path.suffix != ".log"):
            remove_tree(path)


def _evaluations(task: Task) -> list[list[Evaluation]]:
    """Return the evaluations of each side. EngineError if a side has none, UsageError if their examples differ."""
    sides = list[list[Evaluation]]()
    for side in SIDES:
        runs = [run.result for run in task.finished() if run.side == side]
        sides.append([run.evaluation for run in runs if run.evaluation is not None])
        if not sides[-1]:
            cause = runs[0].training.cause if runs else "all runs were lost to infrastructure failures"
            fix = f"Remove the cause, then: uv run nightshift certify --resume {task.plan.number:04d}"
            raise EngineError(f"no run of the {side} was evaluated: {cause}", fix)
    if len({evaluation.examples_sha256 for side in sides for evaluation in side}) > 1:
        cause = f"the examples changed since comparison {task.plan.number:04d} began"
        raise UsageError(cause, "Begin another: uv run nightshift certify")
    return sides


def estimate(baseline: Sequence[Scores], incumbent: Sequence[Scores], rules: RuleConstants) -> Estimate:
    """Estimate incumbent minus baseline (module docstring) from runs on the same examples, at least one per side."""
    sides = [np.asarray(runs, dtype=np.float64) for runs in (baseline, incumbent)]
    n = sides[0].shape[1]
    k = sum(1 / len(side) for side in sides)
    paired = sides[1].mean(axis=0) - sides[0].mean(axis=0)
    example_variance, note = float(paired.var(ddof=1)) / n, ""  # V / n
    means, df = [side.mean(axis=1) for side in sides], float(sum(len(side) - 1 for side in sides))
    squares = sum(float(((mean - mean.mean()) ** 2).sum()) for mean in means)
    if df >= MIN_SEED_DF and squares > 0:
        residuals = [s - m[:, None] - s.mean(axis=0) + m.mean() for s, m in zip(sides, means, strict=True)]
        rest_variance = sum(float((residual**2).sum()) for residual in residuals) / (df * (n - 1)) / n  # E / n
        run_variance = max(squares / df, rest_variance)  # S
    else:
        why = "too few runs to measure it" if df < MIN_SEED_DF else "all runs of each config have the same score"
        note = f"the standard deviation between seeds is assumed to be {100 * rules.seed_sd:g} pp: {why}"
        run_variance, rest_variance, df = rules.seed_sd**2, 0.0, SEED_DF
    larger_variance = example_variance + k * (2 * run_variance - rest_variance)  # U
    df = larger_variance**2 / ((2 * k * run_variance) ** 2 / df + example_variance**2 / (n - 1))
    stderr, difference = math.sqrt(larger_variance - k * run_variance), float(paired.mean())
    half = t_quantile(0.975, df) * stderr
    return Estimate(difference, stderr, df, (difference - half, difference + half), note)


def p_value(result: Estimate) -> float:
    """Return the two-sided p-value of a difference. If its standard error is 0, this is 1 for no difference, else 0."""
    difference, stderr = result.difference, result.stderr
    return t_probability(difference / stderr, result.df) if stderr else float(difference == 0)


def level_of_access(k: int | None) -> float:
    """Return the level of the k-th use of the test split, LEVEL / (k (k + 1)): all levels sum to LEVEL. None: LEVEL."""
    return LEVEL / (k * (k + 1)) if k else LEVEL


def verdict(result: Estimate, level: float) -> str:
    """Return `better`, `worse` or NO_DIFFERENCE, by a test at `level`."""
    if p_value(result) > level:
        return NO_DIFFERENCE
    return "better" if result.difference > 0 else "worse"


def _notes(task: Task, result: Estimate) -> list[str]:
    """Return what limits the conclusions from the comparison, one line each."""
    runs, plan, first = task.finished(), task.plan, task.first
    notes: list[tuple[object, str]] = [(result.note, result.note)]  # pairs (does the note apply?, note)
    for run in runs:
        name = f"{run.side}, seed {run.seed}"
        notes += [
            (run.score is None, f"{name}: crashed: {run.result.training.cause}"),
            (run.proof, f"{name}: {run.proof}"),
        ]
    num_scored = Counter(run.side for run in runs if run.score is not None)
    numbers = " and ".join(f"{number} runs of the {side}" for side, number in num_scored.items())
    unequal = "with unequal numbers the 95 % interval had a coverage of 82 to 88 % in simulated certificates"
    num_lost = 2 * plan.num_seeds - len(runs)
    are_isolated = [r.proposal.is_isolated for r in task.controller.ledger.records() if _CAMPAIGN(r) == _CAMPAIGN(plan)]
    shares_environment = first and {*first.environments} & {*task.bench.rules.environment_names}
    too_high = "scored on the validation split, on which the incumbent was chosen: the gain may be too high"
    notes += [
        (len({*num_scored.values()}) > 1, f"{numbers} have a score: {unequal}"),
        (num_lost, f"{counted(num_lost, 'run')} lost to infrastructure failures"),
        (not all(are_isolated), f"agent: {NOT_ISOLATED}"),
        (plan.split == "validation" and shares_environment, too_high),
    ]
    return [note for applies, note in notes if applies]


class Certified(Document, frozen=True, kw_only=True, tag="certify"):
    """The output of `nightshift certify`: the plan as lines of text, and the comparison, which --dry-run omits."""

    plan: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    def __str__(self) -> str:
        return "\n".join([*self.plan, *(line for comparison in self.comparisons for line in _lines(comparison))])


def _lines(c: Comparison) -> list[str]:
    """Return the results as lines of text."""
    low, high = c.estimate.interval
    tested = f"p = {p_value(c.estimate):.2g}, tested at level {c.level:.3g}"
    return [
        "---",
        f"difference:       {c.estimate.difference:+.6f}",
        f"interval_95:      {low:+.6f} {high:+.6f}",
        f"verdict:          {'; '.join(filter(None, (f'{c.verdict} ({tested})', c.crashes)))}",
        *(f"{side + '_score:':18}{c.score(side):.6f}" for side in SIDES),
        f"strict_scores:    {' '.join(f'{value:.6f}' for value in c.strict_scores or ())}",
        *(f"{name + '_difference:':18}{e.difference:+.6f} ± {e.stderr:.6f}" for name, e in c.by_environment.items()),
        *(f"{name + '_guard:':18}baseline {old:.6f}, incumbent {new:.6f}" for name, (old, new) in c.guards.items()),
        f"scores:           {c.runs_text}; in %",
        f"num_examples:     {c.num_examples}",
        *(f"note:             {note}" for note in c.notes),
    ]

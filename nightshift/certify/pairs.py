"""Fresh runs of two configs, the baseline's and the incumbent's, with seeds that no experiment had.

Runs alternate (baseline, incumbent, incumbent, baseline, ...), so that a machine that slows down slows both. Finished
runs are kept in the folder of the comparison as scores, curves and logs: who goes on after an interruption makes the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nightshift.campaign.agreed import baseline_of, require_same_setup
from nightshift.campaign.composite import split, weighted
from nightshift.certify import certificate
from nightshift.certify.certificate import Comparison, Difference
from nightshift.errors import EngineError, Interrupted, UsageError, listed
from nightshift.files import read_json, remove_tree, write_json
from nightshift.guard.freeze import require_clean_start
from nightshift.metrics import METRICS_NAME
from nightshift.records import ATTEMPT, Failure, Part, Record
from nightshift.rules import Rules
from nightshift.runs import job_of, submit_job
from nightshift.setup import Setup
from nightshift.worker import RESULT_NAME

SIDES = ("baseline", "incumbent")
DEFAULT_SEEDS = 3
MAX_SEEDS = 100
# Experiments count the seeds of a config from 0 up; no config gets so many runs.
FIRST_SEED_INDEX = 100_000
_RUN_NAME = "run.json"


@dataclass(frozen=True, slots=True)
class FreshRun:
    """One run: its scores, or the `cause` why its training failed."""

    side: str
    seed: int
    scores: tuple[float, ...] = ()
    examples_sha256: str = ""
    cause: str | None = None
    strict: float | None = None
    proof: str | None = None  # whether its score is of the weights of its file
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Pairs:
    """So many runs of each side in `folder`, with seeds from the `first` on; on the sealed set for a `look`.

    `settings`: by side, as the engine validated them.
    """

    folder: Path
    settings: Mapping[str, Mapping[str, Any]]
    num_seeds: int
    first: int
    look: int | None = None

    def order(self, rules: Rules) -> dict[str, tuple[str, int]]:
        """Side and seed of each run, by the name of its folder: baseline, incumbent, incumbent, baseline, ..."""
        sides = [side for index in range(self.num_seeds) for side in (SIDES if index % 2 == 0 else SIDES[::-1])]
        seeds = [(side, rules.seed(self.first + offset)) for offset, side in enumerate(sides)]
        return {f"{side}-{seed}": (side, seed) for side, seed in seeds}


def contenders(setup: Setup) -> dict[str, Record]:
    """By side, the experiments of the campaign that is checked out. UsageError where nothing was kept, or where the
    checkout is not the campaign's any more."""
    head = setup.repo.head()
    first = baseline_of(setup.ledger.records(), head)
    if first is None:
        where = f"branch {head.branch}" if head.branch else "a detached HEAD"
        raise UsageError(f"{where} holds no measured campaign", "Switch to its branch autoresearch/<tag>.")
    variables = setup.surroundings.variables
    require_same_setup(first, setup.engine.name, setup.rules_hash, setup.hardware, variables)
    require_clean_start(setup.repo, head, b"", first, setup.rules)
    incumbent = setup.campaign(head.branch).incumbent
    if incumbent is None or incumbent.number == first.number:
        raise UsageError("nothing was kept: the incumbent is the baseline", "Come back when an experiment was kept.")
    return dict(zip(SIDES, (first, incumbent), strict=True))


def done(pairs: Pairs, setup: Setup) -> dict[str, FreshRun]:
    """Finished runs, by the name of their folder: those that were entered into the chain, and that are asked for now;
    more seeds may have been before."""
    planned = pairs.order(setup.rules)
    found = [path for path in sorted(pairs.folder.glob(f"*/{_RUN_NAME}")) if path.parent.name in planned]
    paths = [path for path in found if setup.ledger.holds(path)]
    runs = {path.parent.name: read_json(path, FreshRun, f"Make it again: rm -r {path.parent}") for path in paths}
    return {name: run for name, run in runs.items() if run}


def _make_runs(pairs: Pairs, setup: Setup) -> list[FreshRun]:
    """All runs that could be made; machinery that broke is given a second chance at the end."""
    order, made = pairs.order(setup.rules), done(pairs, setup)  # alternating: a linear drift cancels
    for name, (side, seed) in 2 * [*order.items()]:
        if name in made:
            continue
        setup.reporter.note(f"{side}, seed {seed}: run {len(made) + 1} of {len(order)}")
        if run := _make_run(pairs, side, seed, pairs.folder / name, setup):
            made[name] = run
    return list(made.values())


def _make_run(pairs: Pairs, side: str, seed: int, folder: Path, setup: Setup) -> FreshRun | None:
    """One run; stored when it was evaluated or its training failed, None when the machinery broke."""
    remove_tree(folder)  # what an interrupted attempt left
    folder.mkdir()
    try:
        job = job_of(pairs.settings[side], seed, setup, setup.hardware, pairs.look)
        submit_job(folder, job, setup)
        while not setup.pool.is_over(folder):
            setup.wait()
        result = setup.pool.result(folder)
        if result.training.failure is Failure.MACHINERY:
            raise EngineError(result.training.cause or "no cause known")
        if changed := setup.surroundings.changed():
            raise EngineError(f"{listed(changed)} changed while it ran")
        told, note = result.evaluation, setup.reporter.note
        proof = setup.engine.prove(folder / ATTEMPT, told.weights, note) if told else None
    except Interrupted:
        setup.pool.cancel([folder])
        raise
    except EngineError as error:
        setup.reporter.note(f"{side}, seed {seed}: failed, not the config's fault: {error}")
        return None
    finally:
        _tidy(folder)
    if told:
        run = FreshRun(
            side, seed, told.example_scores, told.examples_sha256, None, told.strict_score, proof, told.parts
        )
    else:
        run = FreshRun(side, seed, cause=result.training.cause or "no cause known")
    with setup.ledger.lock():
        write_json(folder / _RUN_NAME, run)
        setup.ledger.enter(folder / _RUN_NAME)
    came_to = f"crashed: {run.cause}" if run.cause else f"{fmean(weighted(run.scores, run.parts)):.4f}"
    setup.reporter.note(f"{side}, seed {seed}: {came_to}")
    return run


def _tidy(folder: Path) -> None:
    """Leave curves, logs and scores; weights are large, and what trained may hold examples."""
    for path in folder.glob(f"{ATTEMPT}/*"):
        if path.is_dir() or (path.name not in (METRICS_NAME, RESULT_NAME) and path.suffix != ".log"):
            remove_tree(path)


def compare(pairs: Pairs, setup: Setup) -> Comparison:
    """Make the runs, and compare. EngineError where no run of a side came through: nothing was measured."""
    runs = _make_runs(pairs, setup)
    measured = {side: [run for run in runs if run.side == side and run.scores] for side in SIDES}
    scores = {side: [weighted(run.scores, run.parts) for run in measured[side]] for side in SIDES}
    notes = [f"{run.side}, seed {run.seed}: crashed: {run.cause}" for run in runs if run.cause]
    notes += [f"{run.side}, seed {run.seed}: {run.proof}" for run in runs if run.proof]
    if (missing := 2 * pairs.num_seeds - len(runs)) > 0:
        notes.append(f"{missing} run{'s' if missing > 1 else ''} lost to failures of machinery")
    for side in SIDES:
        if not scores[side]:
            cause = next((run.cause for run in runs if run.side == side), "the machinery broke")
            raise EngineError(f"no run of the {side} came through: {cause}", "Mend that, then repeat the command.")
    if len({run.examples_sha256 for each in measured.values() for run in each}) > 1:
        fix = f"Give it up and begin another: rm -r {pairs.folder}"
        raise UsageError("the examples changed since this comparison began", fix)
    strict = {side: [run.strict for run in measured[side]] for side in SIDES}
    means = [fmean(known) for each in strict.values() if (known := [s for s in each if s is not None]) == each]
    result = certificate.estimate(scores["baseline"], scores["incumbent"], setup.rules.decision)
    return Comparison(
        created=setup.now().isoformat(timespec="milliseconds"),
        branch=setup.repo.head().branch,
        rules_hash=setup.rules_hash,
        baseline_score=float(np.mean(scores["baseline"])),
        incumbent_score=float(np.mean(scores["incumbent"])),
        difference=result.difference,
        interval=result.interval,
        num_seeds={side: len(scores[side]) for side in SIDES},
        num_examples=len(scores["baseline"][0]),
        estimator=certificate.describe(result),
        notes=tuple(notes),
        strict_scores=(means[0], means[1]) if len(means) == len(SIDES) else None,
        environments=_differences(measured, setup),
        stderr=result.stderr,
        df=result.df,
    )


def _differences(measured: Mapping[str, list[FreshRun]], setup: Setup) -> tuple[Difference, ...]:
    """Environment by environment, where there are several."""
    found = []
    for index, part in enumerate(measured["baseline"][0].parts):
        scores = {side: [split(run.scores, run.parts)[index] for run in measured[side]] for side in SIDES}
        result = certificate.estimate(scores["baseline"], scores["incumbent"], setup.rules.decision)
        baseline, incumbent = (float(np.mean(scores[side])) for side in SIDES)
        found.append(Difference(part.environment, baseline, incumbent, result.difference, result.interval))
    return tuple(found)

"""Train baseline and incumbent afresh, evaluate them on the sealed set, and write the certificate.

Runs alternate (baseline, incumbent, incumbent, baseline, ...), so that a machine that slows down slows
both. Finished runs are kept in `runs/certify/NNNN/` (NNNN: the look at the sealed set) as scores, curves
and logs; the texts of the sealed problems are not: `runs/` is where agents read.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from nightshift import sealed
from nightshift.certify import certificate
from nightshift.certify.certificate import Certificate
from nightshift.certify.plan import MAX_SEEDS, SIDES, Plan, describe, make_plan
from nightshift.errors import EngineError, Interrupted, NightshiftError, UsageError
from nightshift.experiment import job_of, require_ready
from nightshift.files import read_json, write_json
from nightshift.metrics import METRICS_NAME
from nightshift.records import Failure, Result
from nightshift.setup import Setup
from nightshift.worker import KEY_BYTES, RESULT_NAME

# Experiments count the seeds of a config from 0 up; no config gets so many runs.
FIRST_SEED_INDEX = 100_000
_RUN_NAME = "run.json"


@dataclass(frozen=True, slots=True)
class SealedRun:
    """One run of a look: its scores, or the `cause` why its training failed."""

    side: str
    seed: int
    scores: tuple[float, ...] = ()
    examples_sha256: str = ""
    cause: str | None = None


def certify(setup: Setup, num_seeds: int | None = None, budget_hours: float | None = None) -> Certificate:
    """Make the runs of one look and write its certificate; goes on where an interrupted one stopped.

    Call as the head. A run whose training fails leaves one seed less; a failure of machinery is tried once more. Raises
    UsageError as make_plan does, EngineError when the machinery is missing or broke, NightshiftError when
    no run of a side could be evaluated, Interrupted on Ctrl-C or SIGTERM: finished runs are kept.
    """
    plan = make_plan(setup, num_seeds, budget_hours)
    for line in describe(plan, len(_done(plan, setup)), setup):
        setup.reporter.note(line)
    require_ready(setup.engine)
    key = secrets.token_bytes(KEY_BYTES)
    sealed.count(setup.ledger.runs_dir, plan.look, key)
    setup.pool.look_key = key
    result = _conclude(plan, _make_runs(plan, setup), setup)
    write_json(sealed.folder(setup.ledger.runs_dir, plan.look) / certificate.CERTIFICATE_NAME, result)
    write_json(setup.ledger.runs_dir / certificate.CERTIFICATE_NAME, result)
    return result


def _order(num_seeds: int) -> Iterator[tuple[str, int]]:
    """(side, offset of its seed): baseline, incumbent, incumbent, baseline, ...; a linear drift cancels."""
    for index in range(num_seeds):
        for offset, side in enumerate(SIDES if index % 2 == 0 else reversed(SIDES)):
            yield side, 2 * index + offset


def _make_runs(plan: Plan, setup: Setup) -> list[SealedRun]:
    """All runs that could be made; machinery that broke is given a second chance at the end."""
    for attempt in (1, 2):
        done = _done(plan, setup)
        for side, offset in _order(plan.look.num_seeds):
            seed = setup.rules.seed(FIRST_SEED_INDEX + 2 * MAX_SEEDS * (plan.look.number - 1) + offset)
            run_dir = sealed.folder(setup.ledger.runs_dir, plan.look) / f"{side}-{seed}"
            if run_dir.name in done:
                continue
            setup.reporter.note(f"{side}, seed {seed}: run {len(done) + 1} of {2 * plan.look.num_seeds}")
            run = _make_run(plan, SealedRun(side, seed), run_dir, setup)
            if run is not None:
                done[run_dir.name] = run
        if len(done) == 2 * plan.look.num_seeds or attempt == 2:
            break
    return list(done.values())


def _make_run(plan: Plan, run: SealedRun, run_dir: Path, setup: Setup) -> SealedRun | None:
    """One run; stored when it was evaluated or its training failed, None when the machinery broke."""
    try:
        result = _result(plan, run, run_dir, setup)
    except EngineError as error:
        setup.reporter.note(f"{run.side}, seed {run.seed}: failed, not the config's fault: {error}")
        return None
    finally:
        _tidy(run_dir)
    training, evaluation = result.training, result.evaluation
    if evaluation is not None:
        run = replace(run, scores=evaluation.scores, examples_sha256=evaluation.examples_sha256)
    elif training.failure is Failure.MACHINERY:
        setup.reporter.note(f"{run.side}, seed {run.seed}: failed, not the config's fault: {training.cause}")
        return None
    else:
        run = replace(run, cause=training.cause or "no cause known")
    write_json(run_dir / _RUN_NAME, run)
    came_to = f"crashed: {run.cause}" if run.cause else f"{fmean(run.scores):.4f}"
    setup.reporter.note(f"{run.side}, seed {run.seed}: {came_to}")
    return run


def _result(plan: Plan, run: SealedRun, run_dir: Path, setup: Setup) -> Result:
    """What the worker of one run brings back. EngineError where it brings nothing that counts."""
    shutil.rmtree(run_dir, ignore_errors=True)  # what an interrupted attempt left
    run_dir.mkdir()
    job = job_of(plan.settings[run.side], run.seed, setup, setup.engine.hardware(), plan.look.number)
    setup.pool.submit(run_dir, job)
    try:
        while not setup.pool.is_over(run_dir):
            setup.wait()
    except Interrupted:
        setup.pool.cancel(run_dir)
        raise
    return setup.pool.result(run_dir)


def _tidy(run_dir: Path) -> None:
    """Leave curves, logs and scores; weights are large, and what trained may hold examples."""
    for path in run_dir.glob("attempt-*/*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in (METRICS_NAME, RESULT_NAME) and path.suffix != ".log":
            path.unlink()


def _conclude(plan: Plan, runs: list[SealedRun], setup: Setup) -> Certificate:
    scores = {side: [run.scores for run in runs if run.side == side and run.scores] for side in SIDES}
    notes = [f"{run.side}, seed {run.seed}: crashed: {run.cause}" for run in runs if run.cause]
    missing = 2 * plan.look.num_seeds - len(runs)
    if missing:
        notes.append(f"{missing} run{'s' if missing > 1 else ''} lost to failures of machinery")
    for side in SIDES:
        if not scores[side]:
            cause = next((run.cause for run in runs if run.side == side), None)
            if cause is None:
                raise EngineError(f"no run of the {side} came through", "Mend the machinery, then certify again.")
            raise NightshiftError(f"every run of the {side} crashed: {cause}", "There is nothing to certify.")
    if len({run.examples_sha256 for run in runs if run.scores}) > 1:
        raise UsageError(
            "the sealed examples changed since this look began",
            f"Give it up and begin another: rm -r {sealed.folder(setup.ledger.runs_dir, plan.look)}",
        )
    result = certificate.estimate(scores["baseline"], scores["incumbent"], setup.rules.decision)
    baseline, incumbent = (float(np.mean(scores[side])) for side in SIDES)
    return Certificate(
        created=setup.now().isoformat(timespec="seconds"),
        branch=plan.look.branch,
        rules_hash=plan.look.rules_hash,
        baseline_score=baseline,
        incumbent_score=incumbent,
        difference=result.difference,
        interval=result.interval,
        num_seeds={side: len(scores[side]) for side in SIDES},
        num_examples=len(scores["baseline"][0]),
        estimator=certificate.describe(result),
        sealed_looks=plan.look.number,
        notes=tuple(notes),
    )


def _done(plan: Plan, setup: Setup) -> dict[str, SealedRun]:
    """Finished runs of the look, by the name of their folder."""
    runs = {}
    for path in sorted(sealed.folder(setup.ledger.runs_dir, plan.look).glob(f"*/{_RUN_NAME}")):
        run = read_json(path, SealedRun, f"Make that run again: rm -r {path.parent}")
        if run is not None:
            runs[path.parent.name] = run
    return runs

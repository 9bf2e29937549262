"""Train baseline and incumbent afresh, evaluate them on the sealed set, and write the certificate.

Runs alternate (baseline, incumbent, incumbent, baseline, ...), so that a machine that slows down slows
both. Finished runs are kept in `runs/certify/NNNN/` (NNNN: the look at the sealed set) as scores, curves
and logs; the texts of the sealed problems are not: `runs/` is where agents read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nightshift.certify import certificate, looks
from nightshift.certify.certificate import Certificate
from nightshift.certify.plan import MAX_SEEDS, SIDES, Plan, describe, make_plan
from nightshift.engines import ProgressCallback
from nightshift.errors import EngineError, NightshiftError, UsageError
from nightshift.evaluation import Posed
from nightshift.experiment import require_ready, train_and_evaluate
from nightshift.metrics import METRICS_NAME
from nightshift.records import Failure, Phase, Progress
from nightshift.setup import Lab

# Experiments count the seeds of a config from 0 up; no config gets so many runs.
FIRST_SEED_INDEX = 100_000
_NEWS_SECONDS = 60.0
_RUN_NAME = "run.json"


@dataclass(frozen=True, slots=True)
class SealedRun:
    """One run of a look: its scores, or the `cause` why its training failed."""

    side: str
    seed: int
    scores: tuple[float, ...] = ()
    examples_sha256: str = ""
    cause: str | None = None


def certify(lab: Lab, num_seeds: int | None = None, budget_hours: float | None = None) -> Certificate:
    """Make the runs of one look and write its certificate; goes on where an interrupted one stopped.

    A run whose training fails leaves one seed less; a failure of machinery is tried once more. Raises
    UsageError as make_plan does, EngineError when the machinery is missing or broke, NightshiftError when
    no run of a side could be evaluated, Interrupted on Ctrl-C or SIGTERM: finished runs are kept.
    """
    with lab.ledger.lock():
        plan = make_plan(lab, num_seeds, budget_hours)
        for line in describe(plan, len(_done(plan, lab)), lab):
            lab.reporter.note(line)
        require_ready(lab.engine)
        examples = looks.open_sealed(lab.rules, lab.root, lab.ledger.runs_dir, plan.look)
        runs = _make_runs(plan, examples, lab)
        result = _conclude(plan, runs, lab)
        certificate.write(looks.folder(lab.ledger.runs_dir, plan.look), result)
        certificate.write(lab.ledger.runs_dir, result)
        return result


def _order(num_seeds: int) -> Iterator[tuple[str, int]]:
    """(side, offset of its seed): baseline, incumbent, incumbent, baseline, ...; a linear drift cancels."""
    for index in range(num_seeds):
        for offset, side in enumerate(SIDES if index % 2 == 0 else reversed(SIDES)):
            yield side, 2 * index + offset


def _make_runs(plan: Plan, examples: list[Posed], lab: Lab) -> list[SealedRun]:
    """All runs that could be made; machinery that broke is given a second chance at the end."""
    for attempt in (1, 2):
        done = _done(plan, lab)
        for side, offset in _order(plan.look.num_seeds):
            seed = lab.rules.seed(FIRST_SEED_INDEX + 2 * MAX_SEEDS * (plan.look.number - 1) + offset)
            run_dir = looks.folder(lab.ledger.runs_dir, plan.look) / f"{side}-{seed}"
            if run_dir.name in done:
                continue
            lab.reporter.note(f"{side}, seed {seed}: run {len(done) + 1} of {2 * plan.look.num_seeds}")
            run = _train_and_evaluate(plan.settings[side], SealedRun(side, seed), run_dir, examples, lab)
            if run is not None:
                done[run_dir.name] = run
        if len(done) == 2 * plan.look.num_seeds or attempt == 2:
            break
    return list(done.values())


def _train_and_evaluate(
    settings: Mapping[str, Any], run: SealedRun, run_dir: Path, examples: list[Posed], lab: Lab
) -> SealedRun | None:
    """One run; stored when it was evaluated or its training failed, None when the machinery broke."""
    shutil.rmtree(run_dir, ignore_errors=True)  # what an interrupted attempt left
    run_dir.mkdir()
    # No evaluation.jsonl: it would hold the sealed problems' answers.
    nowhere = Path(os.devnull)
    try:
        training, evaluation, _ = train_and_evaluate(settings, run.seed, run_dir, examples, nowhere, _news(lab), lab)
    finally:
        _tidy(run_dir)
    if evaluation is not None:
        run = replace(run, scores=evaluation.scores, examples_sha256=evaluation.examples_sha256)
    elif training.failure is Failure.MACHINERY:
        lab.reporter.note(f"{run.side}, seed {run.seed}: failed, not the config's fault: {training.cause}")
        return None
    else:
        run = replace(run, cause=training.cause or "no cause known")
    certificate.store(run_dir / _RUN_NAME, asdict(run))
    came_to = f"crashed: {run.cause}" if run.cause else f"{fmean(run.scores):.4f}"
    lab.reporter.note(f"{run.side}, seed {run.seed}: {came_to}")
    return run


def _tidy(run_dir: Path) -> None:
    """Leave curves and logs: weights are large, and the rest may hold sealed problems."""
    for path in run_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != METRICS_NAME and path.suffix != ".log":
            path.unlink()


def _news(lab: Lab) -> ProgressCallback:
    """A line when a phase begins, and once a minute."""
    last: tuple[Phase | None, float] = (None, 0.0)

    def report(reading: Progress) -> None:
        nonlocal last
        if reading.phase is last[0] and lab.clock() - last[1] < _NEWS_SECONDS:
            return
        last = (reading.phase, lab.clock())
        left = "" if reading.seconds_left is None else f", {max(reading.seconds_left, 0):.0f} s left"
        lab.reporter.note(f"  {reading.phase}, step {reading.num_steps}{left}")

    return report


def _conclude(plan: Plan, runs: list[SealedRun], lab: Lab) -> Certificate:
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
            f"Give it up and begin another: rm -r {looks.folder(lab.ledger.runs_dir, plan.look)}",
        )
    result = certificate.estimate(scores["baseline"], scores["incumbent"], lab.rules.decision)
    baseline, incumbent = (float(np.mean(scores[side])) for side in SIDES)
    return Certificate(
        created=lab.now().isoformat(timespec="seconds"),
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


def _done(plan: Plan, lab: Lab) -> dict[str, SealedRun]:
    """Finished runs of the look, by the name of their folder."""
    runs = {}
    for path in sorted(looks.folder(lab.ledger.runs_dir, plan.look).glob(f"*/{_RUN_NAME}")):
        data = json.loads(path.read_bytes())
        runs[path.parent.name] = SealedRun(**{**data, "scores": tuple(data["scores"])})
    return runs

"""Train baseline and incumbent afresh, evaluate them on the sealed set, and write the certificate.

Runs alternate (baseline, incumbent, incumbent, baseline, ...), so that a machine that slows down slows
both. Finished runs are kept in `runs/certify/NNNN/` (NNNN: the look at the sealed set) as scores, curves
and logs; the texts of the sealed problems are not: `runs/` is where agents read.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nightshift import sealed
from nightshift.campaign.campaign import baseline_of, require_same_setup
from nightshift.campaign.chain import sha256
from nightshift.certify import certificate
from nightshift.certify.certificate import CERTIFICATE_NAME, Certificate
from nightshift.errors import EngineError, Interrupted, NightshiftError, UsageError, listed
from nightshift.experiment import job_of, require_packaged, require_ready, submit_job
from nightshift.files import read_file, read_json, remove_tree, write_json
from nightshift.guard.freeze import require_clean_start
from nightshift.metrics import METRICS_NAME
from nightshift.records import ATTEMPT, Failure, Record
from nightshift.sealed import Look, counted_looks
from nightshift.setup import Setup
from nightshift.worker import KEY_BYTES, RESULT_NAME

SIDES = ("baseline", "incumbent")
DEFAULT_SEEDS = 3
MAX_SEEDS = 100
# Experiments count the seeds of a config from 0 up; no config gets so many runs.
FIRST_SEED_INDEX = 100_000
_RUN_NAME = "run.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a certificate compares and costs, before anything sealed is read. `settings`: by side, as they were run.

    `pair_seconds`: what one run of each side takes.
    """

    look: Look
    folder: Path
    is_resumed: bool
    settings: Mapping[str, Mapping[str, Any]]
    pair_seconds: float


@dataclass(frozen=True, slots=True)
class SealedRun:
    """One run of a look: its scores, or the `cause` why its training failed."""

    side: str
    seed: int
    scores: tuple[float, ...] = ()
    examples_sha256: str = ""
    cause: str | None = None
    strict: float | None = None
    proof: str | None = None  # whether its score is of the weights of its file


def certify(setup: Setup, num_seeds: int | None = None) -> Certificate:
    """Make the runs of one look and write its certificate; goes on where an interrupted one stopped.

    Call as the head. A run whose training fails leaves one seed less; a failure of machinery is tried once more. Raises
    UsageError as make_plan does, EngineError when the machinery is missing, NightshiftError when no run of a side
    could be evaluated, Interrupted on Ctrl-C or SIGTERM: finished runs are kept.
    """
    plan = make_plan(setup, num_seeds)
    for line in describe(plan, setup):
        setup.reporter.note(line)
    require_ready(setup.engine)
    require_packaged(setup)
    setup.pool.look_key = secrets.token_bytes(KEY_BYTES)
    with setup.ledger.lock():
        sealed.count(setup.ledger.runs_dir, plan.look, setup.pool.look_key)
        setup.ledger.enter(setup.ledger.runs_dir / sealed.LOOKS_NAME)
    result = replace(_conclude(plan, _make_runs(plan, setup), setup), chain=setup.ledger.chain.head)
    with setup.ledger.lock():
        for folder in (setup.ledger.runs_dir, plan.folder):  # the second one says that the look is finished
            write_json(folder / CERTIFICATE_NAME, result)
            setup.ledger.enter(folder / CERTIFICATE_NAME)
    return result


def make_plan(setup: Setup, num_seeds: int | None = None) -> Plan:
    """Baseline and incumbent of the current campaign branch, and how many seeds; reads nothing sealed.

    `num_seeds` None: what an unfinished look began with, or DEFAULT_SEEDS. UsageError where there is nothing to
    certify, or where the checkout is not the campaign's any more.
    """
    sides = dict(zip(SIDES, _contenders(setup), strict=True))
    runs_dir, counted = setup.ledger.runs_dir, counted_looks(setup.ledger.runs_dir)
    look = Look(
        number=len(counted) + 1,
        time=setup.now().isoformat(timespec="seconds"),
        branch=sides["baseline"].branch,
        rules_hash=setup.rules_hash,
        baseline=sides["baseline"].number,
        incumbent=sides["incumbent"].number,
        num_seeds=num_seeds or DEFAULT_SEEDS,
    )
    is_resumed = bool(counted) and counted[-1].is_same(look) and _is_unfinished(sealed.folder(runs_dir, counted[-1]))
    if is_resumed:
        look = counted[-1]
    folder = sealed.folder(runs_dir, look)
    if num_seeds not in (None, look.num_seeds):
        cause = f"look {look.number} at the sealed set began with {look.num_seeds} seeds and is not finished"
        fix = f"Go on with --seeds {look.num_seeds}, or give it up (it stays counted): rm -r {folder}"
        raise UsageError(cause, fix)
    return Plan(
        look=look,
        folder=folder,
        is_resumed=is_resumed,
        settings={side: setup.engine.validate(setup.ledger.stored_config(r)).settings for side, r in sides.items()},
        pair_seconds=sum(fmean(run.total_seconds for run in r.runs if run.evaluation) for r in sides.values()),
    )


def _contenders(setup: Setup) -> tuple[Record, Record]:
    head = setup.repo.head()
    first = baseline_of(setup.ledger.records(), head)
    if first is None:
        where = f"branch {head.branch}" if head.branch else "a detached HEAD"
        raise UsageError(f"{where} holds no measured campaign", "Switch to the branch autoresearch/<tag> to certify.")
    hardware, variables = setup.engine.hardware(), setup.surroundings.variables
    require_same_setup(first, setup.engine.name, setup.rules_hash, hardware, variables)
    require_clean_start(setup.repo, head, b"", first, setup.rules)
    incumbent = setup.campaign(head.branch).incumbent
    if incumbent is None or incumbent.number == first.number:
        raise UsageError("nothing was kept: the incumbent is the baseline", "Certify when an experiment was kept.")
    return first, incumbent


def _is_unfinished(folder: Path) -> bool:
    """True if a look was begun and its folder, which `rm` gives up, holds no certificate yet."""
    return folder.is_dir() and certificate.read(folder) is None


def describe(plan: Plan, setup: Setup) -> list[str]:
    """The plan for people: what is compared, how long it takes, earlier looks."""
    look, counted = plan.look, counted_looks(setup.ledger.runs_dir)
    done = f", {len(_done(plan, setup))} runs are done" if plan.is_resumed else ""
    num_examples = sum(environment.num_selection for environment in setup.rules.environments)  # as many as decide
    return [
        f"certify:  experiment {look.incumbent:04d} (incumbent) against {look.baseline:04d} (baseline), "
        f"{look.num_seeds} new seeds each, {num_examples} sealed examples",
        f"time:     about {look.num_seeds * plan.pair_seconds / 60:.0f} min{done}",
        f"looks:    {len(counted)} at the sealed set so far" + (", this goes on" if plan.is_resumed else ""),
        *(
            f"{'':10}look {old.number}: {old.time[:10]} {old.branch}, experiment {old.baseline:04d} against "
            f"{old.incumbent:04d}, {old.num_seeds} seed{'s' if old.num_seeds != 1 else ''} each"
            for old in counted
        ),
    ]


def _done(plan: Plan, setup: Setup) -> dict[str, SealedRun]:
    """Finished runs of the look, by the name of their folder: those that a certify entered into the chain."""
    ledger = setup.ledger
    found = [(path, path.relative_to(ledger.runs_dir).as_posix()) for path in plan.folder.glob(f"*/{_RUN_NAME}")]
    paths = [path for path, name in sorted(found) if ledger.chain.holds(name, sha256(read_file(path)))]
    runs = {path.parent.name: read_json(path, SealedRun, f"Make it again: rm -r {path.parent}") for path in paths}
    return {name: run for name, run in runs.items() if run}


def _make_runs(plan: Plan, setup: Setup) -> list[SealedRun]:
    """All runs that could be made; machinery that broke is given a second chance at the end."""
    order = [  # baseline, incumbent, incumbent, baseline, ...: a linear drift cancels
        (side, 2 * index + offset)
        for index in range(plan.look.num_seeds)
        for offset, side in enumerate(SIDES if index % 2 == 0 else reversed(SIDES))
    ]
    done = _done(plan, setup)
    for side, offset in 2 * order:
        seed = setup.rules.seed(FIRST_SEED_INDEX + 2 * MAX_SEEDS * (plan.look.number - 1) + offset)
        folder = plan.folder / f"{side}-{seed}"
        if folder.name in done:
            continue
        setup.reporter.note(f"{side}, seed {seed}: run {len(done) + 1} of {len(order)}")
        if run := _make_run(plan, side, seed, folder, setup):
            done[folder.name] = run
    return list(done.values())


def _make_run(plan: Plan, side: str, seed: int, folder: Path, setup: Setup) -> SealedRun | None:
    """One run; stored when it was evaluated or its training failed, None when the machinery broke."""
    remove_tree(folder)  # what an interrupted attempt left
    folder.mkdir()
    try:
        job = job_of(plan.settings[side], seed, setup, setup.engine.hardware(), plan.look.number)
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
        setup.pool.cancel(folder)
        raise
    except EngineError as error:
        setup.reporter.note(f"{side}, seed {seed}: failed, not the config's fault: {error}")
        return None
    finally:
        _tidy(folder)
    if told:
        run = SealedRun(side, seed, told.example_scores, told.examples_sha256, None, told.strict_score, proof)
    else:
        run = SealedRun(side, seed, cause=result.training.cause or "no cause known")
    with setup.ledger.lock():
        write_json(folder / _RUN_NAME, run)
        setup.ledger.enter(folder / _RUN_NAME)
    came_to = f"crashed: {run.cause}" if run.cause else f"{fmean(run.scores):.4f}"
    setup.reporter.note(f"{side}, seed {seed}: {came_to}")
    return run


def _tidy(folder: Path) -> None:
    """Leave curves, logs and scores; weights are large, and what trained may hold examples."""
    for path in folder.glob(f"{ATTEMPT}/*"):
        if path.is_dir() or (path.name not in (METRICS_NAME, RESULT_NAME) and path.suffix != ".log"):
            remove_tree(path)


def _conclude(plan: Plan, runs: list[SealedRun], setup: Setup) -> Certificate:
    scores = {side: [run.scores for run in runs if run.side == side and run.scores] for side in SIDES}
    notes = [f"{run.side}, seed {run.seed}: crashed: {run.cause}" for run in runs if run.cause]
    notes += [f"{run.side}, seed {run.seed}: {run.proof}" for run in runs if run.proof]
    if missing := 2 * plan.look.num_seeds - len(runs):
        notes.append(f"{missing} run{'s' if missing > 1 else ''} lost to failures of machinery")
    for side in SIDES:
        if not scores[side]:
            cause = next((run.cause for run in runs if run.side == side), "the machinery broke")
            raise NightshiftError(f"no run of the {side} came through: {cause}", "Mend that, then certify again.")
    if len({run.examples_sha256 for run in runs if run.scores}) > 1:
        fix = f"Give it up and begin another: rm -r {plan.folder}"
        raise UsageError("the sealed examples changed since this look began", fix)
    result = certificate.estimate(scores["baseline"], scores["incumbent"], setup.rules.decision)
    baseline, incumbent = (float(np.mean(scores[side])) for side in SIDES)
    strict = {side: [run.strict for run in runs if run.side == side and run.scores] for side in SIDES}
    means = [fmean(known) for each in strict.values() if (known := [s for s in each if s is not None]) == each]
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
        strict_scores=(means[0], means[1]) if len(means) == len(SIDES) else None,
    )

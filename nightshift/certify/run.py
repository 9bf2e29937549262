"""Train baseline and incumbent afresh, evaluate them on the sealed set, and write the certificate.

Finished runs are kept in `runs/certify/NNNN/` (NNNN: the look at the sealed set); the texts of the sealed problems are
not: `runs/` is where agents read.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from statistics import fmean

from nightshift import sealed
from nightshift.baseline import require_packaged
from nightshift.certify import certificate
from nightshift.certify.certificate import CERTIFICATE_NAME, Certificate
from nightshift.certify.pairs import DEFAULT_SEEDS, FIRST_SEED_INDEX, MAX_SEEDS, Pairs, compare, contenders, done
from nightshift.errors import UsageError
from nightshift.experiment import require_ready
from nightshift.files import write_json
from nightshift.sealed import Look, counted_looks
from nightshift.setup import Setup
from nightshift.worker import KEY_BYTES


@dataclass(frozen=True, slots=True)
class Plan:
    """What a certificate compares and costs, before anything sealed is read.

    `pair_seconds`: what one run of each side takes.
    """

    look: Look
    pairs: Pairs
    is_resumed: bool
    pair_seconds: float


def certify(setup: Setup, num_seeds: int | None = None) -> Certificate:
    """Make the runs of one look and write its certificate; goes on where an interrupted one stopped.

    Call as the head. A run whose training fails leaves one seed less; a failure of machinery is tried once more. Raises
    UsageError as make_plan does, EngineError when the machinery is missing or no run of a side could be evaluated,
    Interrupted on Ctrl-C or SIGTERM: finished runs are kept.
    """
    plan = make_plan(setup, num_seeds)
    for line in describe(plan, setup):
        setup.reporter.note(line)
    setup.engine.prepare_at_start(setup.reporter.note)
    require_ready(setup)
    require_packaged(setup)
    setup.pool.look_key = secrets.token_bytes(KEY_BYTES)
    with setup.ledger.lock():
        sealed.count(setup.ledger.runs_dir, plan.look, setup.pool.look_key)
        setup.ledger.enter(setup.ledger.runs_dir / sealed.LOOKS_NAME)
    found = compare(plan.pairs, setup)
    measured = {field.name: getattr(found, field.name) for field in fields(found)}
    result = Certificate(**measured, sealed_looks=plan.look.number, chain=setup.ledger.chain.head)
    with setup.ledger.lock():
        for folder in (setup.ledger.runs_dir, plan.pairs.folder):  # the second one says that the look is finished
            write_json(folder / CERTIFICATE_NAME, result)
            setup.ledger.enter(folder / CERTIFICATE_NAME)
    return result


def make_plan(setup: Setup, num_seeds: int | None = None) -> Plan:
    """Baseline and incumbent of the current campaign branch, and how many seeds; reads nothing sealed.

    `num_seeds` None: what an unfinished look began with, or DEFAULT_SEEDS. UsageError where there is nothing to
    certify, or where the checkout is not the campaign's any more.
    """
    sides = contenders(setup)
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
    # A look is unfinished while its folder, which `rm` gives up, holds no certificate.
    is_begun = bool(counted) and counted[-1].is_same(look) and sealed.folder(runs_dir, counted[-1]).is_dir()
    if is_resumed := is_begun and certificate.read(sealed.folder(runs_dir, counted[-1])) is None:
        look = counted[-1]
    folder = sealed.folder(runs_dir, look)
    if num_seeds not in (None, look.num_seeds):
        cause = f"look {look.number} at the sealed set began with {look.num_seeds} seeds and is not finished"
        fix = f"Go on with --seeds {look.num_seeds}, or give it up (it stays counted): rm -r {folder}"
        raise UsageError(cause, fix)
    settings = {side: setup.engine.validate(setup.ledger.stored_config(r)).settings for side, r in sides.items()}
    first = FIRST_SEED_INDEX + 2 * MAX_SEEDS * (look.number - 1)
    return Plan(
        look=look,
        pairs=Pairs(folder, settings, look.num_seeds, first, look.number),
        is_resumed=is_resumed,
        pair_seconds=sum(fmean(run.total_seconds for run in r.runs if run.evaluation) for r in sides.values()),
    )


def describe(plan: Plan, setup: Setup) -> list[str]:
    """The plan for people: what is compared, how long it takes, earlier looks."""
    look, counted = plan.look, counted_looks(setup.ledger.runs_dir)
    so_far = f", {len(done(plan.pairs, setup))} runs are done" if plan.is_resumed else ""
    num_examples = sum(environment.num_selection for environment in setup.rules.environments)  # as many as decide
    return [
        f"certify:  experiment {look.incumbent:04d} (incumbent) against {look.baseline:04d} (baseline), "
        f"{look.num_seeds} new seeds each, {num_examples} sealed examples",
        f"time:     about {look.num_seeds * plan.pair_seconds / 60:.0f} min{so_far}",
        f"looks:    {len(counted)} at the sealed set so far" + (", this goes on" if plan.is_resumed else ""),
        *(
            f"{'':10}look {old.number}: {old.time[:10]} {old.branch}, experiment {old.baseline:04d} against "
            f"{old.incumbent:04d}, {old.num_seeds} seed{'s' if old.num_seeds != 1 else ''} each"
            for old in counted
        ),
    ]

"""What a certificate would compare, how long it takes and what it can find, before anything sealed is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from nightshift import sealed
from nightshift.campaign.campaign import Campaign, baseline_of, mean_scores, require_same_setup
from nightshift.campaign.version_1 import FINISH
from nightshift.certify import certificate
from nightshift.errors import UsageError
from nightshift.guard.freeze import require_clean_start
from nightshift.records import Record
from nightshift.sealed import Look, counted_looks
from nightshift.setup import Setup

SIDES = ("baseline", "incumbent")
DEFAULT_SEEDS = 3
MAX_SEEDS = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """What a certificate compares, costs and can show. `seconds` of one run and `settings`, by side."""

    look: Look
    is_resumed: bool
    settings: Mapping[str, Mapping[str, Any]]
    seconds: Mapping[str, float]
    run_variance: float
    example_variance: float


def make_plan(setup: Setup, num_seeds: int | None = None, budget_hours: float | None = None) -> Plan:
    """Baseline and incumbent of the current campaign branch, and how many seeds; reads nothing sealed.

    `num_seeds` None: what an unfinished look began with, what fits into `budget_hours`, or DEFAULT_SEEDS.
    UsageError where there is nothing to certify, or where the checkout is not the campaign's any more.
    """
    first, incumbent, campaign = _contenders(setup)
    belief = campaign.belief
    assert belief is not None
    sides = dict(zip(SIDES, (first, incumbent), strict=True))
    seconds = {side: _run_seconds(record) for side, record in sides.items()}
    if budget_hours is not None:
        num_seeds = _seeds_within(budget_hours, sum(seconds.values()))
    counted = counted_looks(setup.ledger.runs_dir)
    look = Look(
        number=len(counted) + 1,
        time=setup.now().isoformat(timespec="seconds"),
        branch=first.branch,
        rules_hash=setup.rules_hash,
        baseline=first.number,
        incumbent=incumbent.number,
        num_seeds=num_seeds or DEFAULT_SEEDS,
    )
    begun = counted[-1] if counted and _is_unfinished(setup, counted[-1]) else None
    if begun is not None and not begun.key_sha256:
        fix = f"{FINISH}, or give it up: rm -r {sealed.folder(setup.ledger.runs_dir, begun)}"
        raise UsageError(f"look {begun.number} at the sealed set was begun by Nightshift 0.1.0", fix)
    is_resumed = begun is not None and begun.is_same(replace(look, num_seeds=begun.num_seeds))
    if begun is not None and is_resumed:
        if num_seeds not in (None, begun.num_seeds):
            folder = sealed.folder(setup.ledger.runs_dir, begun)
            raise UsageError(
                f"look {begun.number} at the sealed set began with {begun.num_seeds} seeds and is not finished",
                f"Go on with --seeds {begun.num_seeds}, or give it up (it stays counted): rm -r {folder}",
            )
        look = begun
    return Plan(
        look=look,
        is_resumed=is_resumed,
        settings={
            # As run, whatever lies in runs/ now.
            side: setup.engine.validate(setup.ledger.stored_config(record, is_campaign=True)).settings
            for side, record in sides.items()
        },
        seconds=seconds,
        run_variance=float(belief.run_variance(setup.rules.decision)),
        example_variance=_example_variance(first, incumbent, float(belief.pairing_variance)),
    )


def describe(plan: Plan, num_done: int, setup: Setup) -> list[str]:
    """The plan for people: what is compared, how long it takes, what it can find, earlier looks."""
    look, pair_seconds = plan.look, sum(plan.seconds.values())
    lines = [
        f"certify:  experiment {look.incumbent:04d} (incumbent) against {look.baseline:04d} (baseline), "
        f"{look.num_seeds} new seeds each, {sealed.num_examples(setup.rules)} sealed examples",
        f"time:     about {_duration(look.num_seeds * pair_seconds)}"
        + (f", {num_done} runs are done" if num_done else ""),
        f"finds:    in {certificate.POWER:.0%} of cases a true difference of at least",
    ]
    for seeds in sorted({1, 2, 3, 5, 8, look.num_seeds}):
        least = certificate.detectable(seeds, plan.run_variance, plan.example_variance, setup.rules.decision)
        lines.append(
            f"{100 * least:14.1f} pp with {seeds} seed{'s' if seeds != 1 else ''} ({_duration(seeds * pair_seconds)})"
            + (", if the rules' seed_sd is right: one seed cannot measure it" if seeds == 1 else "")
            + ("  <-" if seeds == look.num_seeds else "")
        )
    counted = counted_looks(setup.ledger.runs_dir)
    lines.append(f"looks:    {len(counted)} at the sealed set so far" + (", this goes on" if plan.is_resumed else ""))
    return [*lines, *(f"{'':10}{line}" for line in sealed.describe(counted))]


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _contenders(setup: Setup) -> tuple[Record, Record, Campaign]:
    head, records = setup.repo.head(), setup.ledger.records()
    first = baseline_of(records, head.branch) if head.is_campaign else None
    if first is None:
        where = f"branch {head.branch}" if head.branch else "a detached HEAD"
        raise UsageError(f"{where} holds no measured campaign", "Switch to the branch autoresearch/<tag> to certify.")
    require_same_setup(first, setup.engine.name, setup.rules_hash, setup.engine.hardware())
    require_clean_start(setup.repo, head, b"", first.commit or head.commit, setup.rules)
    campaign = setup.campaign(head.branch)
    incumbent = campaign.incumbent
    if incumbent is None or incumbent.number == first.number:
        raise UsageError("nothing was kept: the incumbent is the baseline", "Certify when an experiment was kept.")
    return first, incumbent, campaign


def _seeds_within(budget_hours: float, pair_seconds: float) -> int:
    num_seeds = min(int(budget_hours * 3600 / pair_seconds), MAX_SEEDS)
    if num_seeds < 1:
        raise UsageError(
            f"--budget-hours {budget_hours:g} is too short: one seed each takes {pair_seconds / 3600:.2f} h",
            f"Give {pair_seconds / 3600:.2f} or more.",
        )
    return num_seeds


def _run_seconds(record: Record) -> float:
    """Mean wall-clock seconds of an evaluated run of the record's config."""
    return fmean(run.total_seconds for run in record.runs if run.evaluation)


def _example_variance(first: Record, incumbent: Record, rest_variance: float) -> float:
    """Variance of the difference that no further seeds lower, from the campaign's own runs."""
    noise = sum(rest_variance / len(record.evaluations) for record in (first, incumbent))
    paired = mean_scores(incumbent) - mean_scores(first)
    return max(float(paired.var(ddof=1)) / len(paired) - noise, 0.0)


def _is_unfinished(setup: Setup, look: Look) -> bool:
    """True if the look was begun and its folder, which `rm` gives up, holds no certificate yet."""
    folder = sealed.folder(setup.ledger.runs_dir, look)
    return folder.is_dir() and certificate.read(folder) is None

"""What a certificate would compare, how long it takes and what it can find, before anything sealed is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from nightshift.campaign import campaign as campaigns
from nightshift.certify import certificate, looks
from nightshift.certify.looks import Look
from nightshift.errors import UsageError
from nightshift.git.settlement import stored_config
from nightshift.guard import freeze
from nightshift.records import Record, Side
from nightshift.setup import Lab

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


def make_plan(lab: Lab, num_seeds: int | None = None, budget_hours: float | None = None) -> Plan:
    """Baseline and incumbent of the current campaign branch, and how many seeds; reads nothing sealed.

    `num_seeds` None: what an unfinished look began with, what fits into `budget_hours`, or DEFAULT_SEEDS.
    UsageError where there is nothing to certify, or where the checkout is not the campaign's any more.
    """
    first, incumbent, campaign = _contenders(lab)
    belief = campaign.belief
    assert belief is not None
    sides = dict(zip(SIDES, (first, incumbent), strict=True))
    seconds = {side: _run_seconds(record) for side, record in sides.items()}
    if budget_hours is not None:
        num_seeds = _seeds_within(budget_hours, sum(seconds.values()))
    counted = looks.counted_looks(lab.ledger.runs_dir)
    look = Look(
        number=len(counted) + 1,
        time=lab.now().isoformat(timespec="seconds"),
        branch=first.branch,
        rules_hash=lab.rules_hash,
        baseline=first.number,
        incumbent=incumbent.number,
        num_seeds=num_seeds or DEFAULT_SEEDS,
    )
    begun = counted[-1] if counted and _is_unfinished(lab, counted[-1]) else None
    is_resumed = begun is not None and begun.is_same(replace(look, num_seeds=begun.num_seeds))
    if begun is not None and is_resumed:
        if num_seeds not in (None, begun.num_seeds):
            folder = looks.folder(lab.ledger.runs_dir, begun)
            raise UsageError(
                f"look {begun.number} at the sealed set began with {begun.num_seeds} seeds and is not finished",
                f"Go on with --seeds {begun.num_seeds}, or give it up (it stays counted): rm -r {folder}",
            )
        look = begun
    return Plan(
        look=look,
        is_resumed=is_resumed,
        settings={
            side: lab.engine.validate(stored_config(record, lab)).settings  # as run, whatever lies in runs/ now
            for side, record in sides.items()
        },
        seconds=seconds,
        run_variance=belief.noise.variance(lab.rules.decision),
        example_variance=_example_variance(first, incumbent, belief.noise.pairing_variance or 0.0),
    )


def describe(plan: Plan, num_done: int, lab: Lab) -> list[str]:
    """The plan for people: what is compared, how long it takes, what it can find, earlier looks."""
    look, pair_seconds = plan.look, sum(plan.seconds.values())
    lines = [
        f"certify:  experiment {look.incumbent:04d} (incumbent) against {look.baseline:04d} (baseline), "
        f"{look.num_seeds} new seeds each, {looks.num_examples(lab.rules)} sealed examples",
        f"time:     about {_duration(look.num_seeds * pair_seconds)}"
        + (f", {num_done} runs are done" if num_done else ""),
        f"finds:    in {certificate.POWER:.0%} of cases a true difference of at least",
    ]
    for seeds in sorted({1, 2, 3, 5, 8, look.num_seeds}):
        least = certificate.detectable(seeds, plan.run_variance, plan.example_variance, lab.rules.decision)
        lines.append(
            f"{100 * least:14.1f} pp with {seeds} seed{'s' if seeds != 1 else ''} ({_duration(seeds * pair_seconds)})"
            + (", if the rules' seed_sd is right: one seed cannot measure it" if seeds == 1 else "")
            + ("  <-" if seeds == look.num_seeds else "")
        )
    counted = looks.counted_looks(lab.ledger.runs_dir)
    lines.append(f"looks:    {len(counted)} at the sealed set so far" + (", this goes on" if plan.is_resumed else ""))
    return [*lines, *(f"{'':10}{line}" for line in looks.describe(counted))]


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _contenders(lab: Lab) -> tuple[Record, Record, campaigns.Campaign]:
    head, records = lab.repo.head(), lab.ledger.records()
    first = campaigns.fixed_by(records, head)
    if first is None:
        where = f"branch {head.branch}" if head.branch else "a detached HEAD"
        raise UsageError(f"{where} holds no measured campaign", "Switch to the branch autoresearch/<tag> to certify.")
    campaigns.require_same_setup(first, lab.engine.name, lab.rules_hash, lab.engine.hardware())
    freeze.require_clean_start(lab.repo, head, b"", first.commit or head.commit, lab.rules)
    ours = [r for r in records if r.branch == head.branch and r.rules_hash == lab.rules_hash]
    campaign = campaigns.replay(ours, lab.rules)
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
    return fmean(run.total_seconds for run in record.runs if run.side is Side.CANDIDATE and run.evaluation)


def _example_variance(first: Record, incumbent: Record, rest_variance: float) -> float:
    """Variance of the difference that no further seeds lower, from the campaign's own runs."""
    means, noise = [], 0.0
    for record in (first, incumbent):
        runs = [run.evaluation.scores for run in record.runs if run.side is Side.CANDIDATE and run.evaluation]
        means.append(np.mean(runs, axis=0))
        noise += rest_variance / len(runs)
    paired = means[1] - means[0]
    return max(float(paired.var(ddof=1)) / len(paired) - noise, 0.0)


def _is_unfinished(lab: Lab, look: Look) -> bool:
    """True if the look was begun and its folder, which `rm` gives up, holds no certificate yet."""
    folder = looks.folder(lab.ledger.runs_dir, look)
    return folder.is_dir() and certificate.read(folder) is None

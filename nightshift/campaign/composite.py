"""The score over several environments: a weighted mean of theirs, whatever the sizes of their sets.

The decision and the certificate take one value an example. `weighted` makes it, so that the mean over all
examples is the weighted mean of the environments, and the spread over examples that of the weighted mean, each by
itself: within 1 % of the formula for strata, and within 15 % of the truth over 200 pairs of sets; of 1,319 and 100
examples the spread over all alike is less than 85 % of it (tests/unit/test_composite.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from nightshift.campaign.belief import Array
from nightshift.campaign.expected import Expected
from nightshift.errors import UsageError
from nightshift.records import Part, Record

FALL = 2.0  # standard errors
MOST = 2 / 3  # of two environments one always gives half


def weighted(scores: Sequence[float], parts: Sequence[Part]) -> Array:
    """One value an example, (n,): how far its score is from its environment's mean, times (w_e / sum of w) (n / n_e),
    around the weighted mean. ValueError for parts of other sizes."""
    values, sizes = np.array(scores, dtype=np.float64), [part.num_examples for part in parts]
    if not parts:
        return values
    if sum(sizes) != len(values):
        raise ValueError(f"{len(values)} scores of environments with {sum(sizes)} examples")
    means = np.array([fmean(each) for each in split(scores, parts)])
    shares = np.array([part.weight for part in parts]) / sum(part.weight for part in parts)
    found: Array = (values - np.repeat(means, sizes)) * np.repeat(shares * len(values) / sizes, sizes) + shares @ means
    return found


def split(scores: Sequence[float], parts: Sequence[Part]) -> list[Sequence[float]]:
    """The scores of each environment."""
    ends = np.cumsum([part.num_examples for part in parts])
    return [scores[end - part.num_examples : end] for part, end in zip(parts, ends, strict=True)]


def remarks(candidate: Record, parent: Record | None) -> list[str]:
    """What the mean hides: answers that could not be scored; an environment that falls by more than FALL standard
    errors, over examples and seeds; of a baseline, one that gives most of the variance. Nothing is decided by them."""
    runs, before = ([e for e in one.evaluations if e.parts] if one else [] for one in (candidate, parent))
    sets = {tuple((part.environment, part.num_examples) for part in e.parts) for e in (*runs, *before)}
    found = [line for evaluation in candidate.evaluations for line in evaluation.unscored]
    if not runs or len(sets) > 1:
        return found
    if not before:
        spread = [(part.weight * part.stderr) ** 2 for part in runs[0].parts]
        most = max(range(len(spread)), key=spread.__getitem__)
        share, name = spread[most] / (sum(spread) or 1.0), runs[0].parts[most].environment
        text = f"{name} gives {share:.0%} of the score's variance: a larger set of it, or a smaller weight, shows more"
        return found + [text] * (share > MOST)
    for index, part in enumerate(runs[0].parts):
        after, old = (np.array([split(e.example_scores, e.parts)[index] for e in each]) for each in (runs, before))
        change = after.mean(axis=0) - old.mean(axis=0)
        seeds = candidate.decision.seed_sd**2 * (1 / len(after) + 1 / len(old))
        gain, stderr = float(change.mean()), math.sqrt(float(change.var()) / len(change) + seeds)
        if gain < -FALL * stderr:
            scores = f"{old.mean():.3f} -> {after.mean():.3f}"
            found.append(f"{part.environment} falls: {scores}, {Expected(gain, stderr)}")
    return found


def run_scores(record: Record) -> Array:
    """The scores of its evaluated runs as they are decided by, (r, n). UsageError where they are not
    0..1, or not of one set of examples."""
    try:
        runs = [weighted(evaluation.example_scores, evaluation.parts) for evaluation in record.evaluations]
    except ValueError as error:
        raise UsageError(f"runs/{record.number:04d}/record.json is damaged: {error}", without(record)) from None
    scores = np.array(runs if len({len(run) for run in runs}) == 1 else [], dtype=np.float64)
    if not scores.size:
        raise UsageError(f"experiment {record.number:04d} has no scores of one set of examples", without(record))
    return scores


def without(record: Record) -> str:
    """How a campaign goes on when one of its records cannot be used."""
    return f"Move runs/{record.number:04d} out of runs/ to go on without it."


def paired(candidate: Array, parent_runs: Array) -> dict[str, float]:
    """Differences of the same examples, for the reader only: nothing is decided by them. Shapes (n,) and (r, n)."""
    apart = candidate - parent_runs.mean(axis=0)
    stderr = float(apart.std(ddof=1)) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
    values = {"paired_delta": float(apart.mean())}
    if stderr > 0:
        values["paired_z"] = float(apart.mean()) / stderr
    return values

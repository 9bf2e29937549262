"""The score over several environments: a weighted mean of theirs, whatever the sizes of their sets.

The decision and the certificate take one value an example. `weighted` makes it, so that the mean over all
examples is the weighted mean of the environments, and the spread over examples that of the weighted mean, each by
itself: within 1 % of the formula for strata, and within 15 % of the truth over 200 pairs of sets; of 1,319 and 100
examples the spread over all alike is less than 85 % of it (tests/unit/test_composite.py).
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nightshift.campaign.records import Effect, Part, Record
from nightshift.errors import UsageError

Array = NDArray[np.float64]
BUSY = 0.25  # what others took, from which a run is called busy: half a core of two


def taken(record: Record) -> float:
    """The largest share that others took of what its run needed, 0..1."""
    return record.result.contention.taken if record.result and record.result.contention else 0.0


def remark(record: Record) -> str | None:
    load = record.result.contention if record.result else None
    if load is None or load.taken < BUSY:
        return None
    shares = {
        "of the processors' time went to other processes": load.others_share,
        "of it was stolen by other virtual machines": load.stolen_share,
        "of the looks at its GPUs found somebody else there": load.gpu_shared,
        "of them found their clocks held down": load.throttled,
    }
    told = ", ".join(f"{share:.0%} {what}" for what, share in shares.items() if share and share >= 0.005)
    return f"busy machine: {told}; the run counts for less"


SURE = 3.0  # standard errors for "more are formatted", as in health.py


class Form(NamedTuple):
    """Surely more answers than the parent's are written as asked.

    `gain`: of the score. `by_form`: what the form alone is worth; may exceed the gain. `conclusion`: in a few words;
    None where more than the form was learnt. `line`: all of it. `strict_scores`: before and after.
    """

    gain: float
    by_form: float
    conclusion: str | None
    line: str
    strict_scores: tuple[float, float]


def compare(candidate: Record, parent: Record) -> Form | None:
    """What the candidate learnt of the form; None where it did not surely, or where it was not measured.

    The form is worth the change of the formatted share, times how much more often formatted answers are right than
    others, on the mean of both sides (Kitagawa 1955, JASA 50, 1168).
    """
    before, after = parent.evaluation, candidate.evaluation
    if before is None or before.strict_score is None or before.format_rate is None:
        return None
    if after is None or after.strict_score is None or after.format_rate is None:
        return None
    n, m = len(before.example_scores), len(after.example_scores)
    more = after.format_rate - before.format_rate
    if more <= SURE * _stderr(before.format_rate, n, after.format_rate, m):
        return None
    right, others = list[float](), list[float]()  # shares of right answers among the formatted ones, and all others
    for score, strict, share, num in (
        (before.eval_score, before.strict_score, before.format_rate, n),
        (after.eval_score, after.strict_score, after.format_rate, m),
    ):
        right += [strict / share] if share * num > 0.5 else []
        others += [(score - strict) / (1 - share)] if (1 - share) * num > 0.5 else []
    gain, by_form = after.eval_score - before.eval_score, more * (fmean(right) - fmean(others))
    noise = _stderr(before.eval_score, n, after.eval_score, m)
    conclusion = "a gain in form only" if gain - by_form <= min(noise, by_form) else None
    if gain <= noise:
        conclusion = "written better, not right more often"
    line = (
        f"form: {after.format_rate:.0%} of the answers end as asked, {before.format_rate:.0%} before: strict_score "
        f"{100 * (after.strict_score - before.strict_score):+.1f} pp, eval_score {100 * gain:+.1f} pp, "
        f"the form alone is worth {100 * by_form:+.1f} pp: {conclusion or 'more than form'}"
    )
    return Form(gain, by_form, conclusion, line, (before.strict_score, after.strict_score))


def _stderr(p: float, n: int, q: float, m: int) -> float:
    """Of the difference of two shares, binomial; at least that of one answer in all of them."""
    return max(math.sqrt(p * (1 - p) / max(n, 1) + q * (1 - q) / max(m, 1)), 1 / max(n + m, 1))


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
    ends = np.cumsum([part.num_examples for part in parts])
    return [scores[end - part.num_examples : end] for part, end in zip(parts, ends, strict=True)]


def remarks(candidate: Record, parent: Record | None) -> list[str]:
    """What the mean hides: answers that could not be scored; an environment that falls by more than FALL standard
    errors, over examples and seeds; of a baseline, one that gives most of the variance. Nothing is decided by them."""
    now, before = candidate.evaluation, parent.evaluation if parent else None
    found = [*now.unscored] if now else []
    if now is None or not now.parts:
        return found
    if before is None or not before.parts:
        spread = [(part.weight * part.stderr) ** 2 for part in now.parts]
        most = max(range(len(spread)), key=spread.__getitem__)
        share, name = spread[most] / (sum(spread) or 1.0), now.parts[most].environment
        text = f"{name} gives {share:.0%} of the score's variance: a larger set of it, or a smaller weight, shows more"
        return found + [text] * (share > MOST)
    sizes = [[(part.environment, part.num_examples) for part in each.parts] for each in (now, before)]
    if sizes[0] != sizes[1]:
        return found
    for index, part in enumerate(now.parts):
        after, old = (np.array(split(e.example_scores, e.parts)[index]) for e in (now, before))
        change = after - old
        seeds = candidate.decision_rules.seed_sd**2 * 2
        gain, stderr = float(change.mean()), math.sqrt(float(change.var()) / len(change) + seeds)
        if gain < -FALL * stderr:
            scores = f"{old.mean():.3f} -> {after.mean():.3f}"
            found.append(f"{part.environment} falls: {scores}, {Effect(gain, stderr)}")
    return found


def run_scores(record: Record) -> Array:
    """The scores of its run as they are decided by, (n,). UsageError where they are not 0..1, or there are none."""
    evaluation = record.evaluation
    try:
        scores = weighted(evaluation.example_scores, evaluation.parts) if evaluation else np.array([])
    except ValueError as error:
        raise UsageError(f"runs/{record.number:04d}/record.json is damaged: {error}", without(record)) from None
    if not scores.size:
        raise UsageError(f"experiment {record.number:04d} has no scores", without(record))
    return scores


def without(record: Record) -> str:
    """How a campaign goes on when one of its records cannot be used."""
    return f"Move runs/{record.number:04d} out of runs/ to go on without it."

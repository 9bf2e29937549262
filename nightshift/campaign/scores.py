"""The scores of a run, one value an example. The mean of the values of `weighted` is the weighted mean of the
environments, and their spread over examples is that of the weighted mean (tests/unit/test_composite.py)."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nightshift.campaign.records import Effect, Part, Record
from nightshift.errors import UsageError

Array = NDArray[np.float64]
SURE = 3.0  # standard errors from which more answers are formatted for sure, as in health.py
FALL = 2.0  # standard errors


def run_scores(record: Record) -> Array:
    """Return the values by which a run is judged, (n,). UsageError if the record has none, or if they are damaged."""
    try:
        if (evaluation := record.evaluation) and evaluation.example_scores:
            return weighted(evaluation.example_scores, evaluation.parts)
    except ValueError as error:
        raise UsageError(f"runs/{record.number:04d}/record.json is damaged: {error}", without(record)) from None
    raise UsageError(f"experiment {record.number:04d} has no scores", without(record))


def without(record: Record) -> str:
    """Return the fix for a record that cannot be used."""
    return f"Move runs/{record.number:04d} out of runs/ to go on without it."


def weighted(scores: Sequence[float], parts: Sequence[Part]) -> Array:
    """Return (n,): each score's distance from its environment's mean, times (w_e / sum of w) (n / n_e), plus the
    weighted mean. ValueError if sizes do not fit."""
    values, sizes = np.array(scores, dtype=np.float64), [part.num_examples for part in parts]
    if not parts:
        return values
    if sum(sizes) != len(values):
        raise ValueError(f"{len(values)} scores of environments with {sum(sizes)} examples")
    means = np.array([fmean(part_scores) for part_scores in split(scores, parts)])
    shares = np.array([part.weight for part in parts]) / sum(part.weight for part in parts)
    factors = np.repeat(shares * len(values) / sizes, sizes)
    result: Array = (values - np.repeat(means, sizes)) * factors + shares @ means
    return result


def split(scores: Sequence[float], parts: Sequence[Part]) -> list[Sequence[float]]:
    """Return the scores of each environment."""
    ends = np.cumsum([part.num_examples for part in parts])
    return [scores[end - part.num_examples : end] for part, end in zip(parts, ends, strict=True)]


class Form(NamedTuple):
    """A surely higher format rate than the parent's."""

    gain: float  # of the score
    by_form: float  # what the format alone is worth; may exceed the gain
    conclusion: str | None  # a few words; None if more than the format was learnt
    line: str
    strict_scores: tuple[float, float]  # before and after


def compare(candidate: Record, parent: Record | None) -> Form | None:
    """Return what the candidate learnt of the answer format; None if that is nothing for sure, or was not measured.

    The format is worth the change of the format rate, times how much more often formatted answers are right than other
    answers, on the mean of both sides (Kitagawa 1955, JASA 50, 1168).
    """
    sides = [
        (e.eval_score, e.strict_score, e.format_rate, len(e.example_scores))
        for record in (parent, candidate)
        if record and (e := record.evaluation) and e.strict_score is not None and e.format_rate is not None
    ]
    if len(sides) < 2:
        return None
    (score, strict, rate, n), (new_score, new_strict, new_rate, m) = sides
    if (more := new_rate - rate) <= SURE * _stderr(rate, n, new_rate, m):
        return None
    # Shares of right answers among the formatted ones, and among the others.
    right = [strict / rate for _, strict, rate, num in sides if rate * num > 0.5]
    others = [(score - strict) / (1 - rate) for score, strict, rate, num in sides if (1 - rate) * num > 0.5]
    gain, by_form, noise = new_score - score, more * (fmean(right) - fmean(others)), _stderr(score, n, new_score, m)
    conclusion = "a gain in form only" if gain - by_form <= min(noise, by_form) else None
    if gain <= noise:
        conclusion = "written better, not right more often"
    line = (
        f"form: {new_rate:.0%} of the answers end as asked, {rate:.0%} before: strict_score "
        f"{100 * (new_strict - strict):+.1f} pp, eval_score {100 * gain:+.1f} pp, "
        f"the form alone is worth {100 * by_form:+.1f} pp: {conclusion or 'more than form'}"
    )
    return Form(gain, by_form, conclusion, line, (strict, new_strict))


def _stderr(p: float, n: int, q: float, m: int) -> float:
    """Return the standard error of the difference of two shares, binomial; at least that of one answer in all."""
    return max(math.sqrt(p * (1 - p) / max(n, 1) + q * (1 - q) / max(m, 1)), 1 / max(n + m, 1))


def remarks(candidate: Record, parent: Record | None) -> list[str]:
    """Return what the mean score hides: a gain in format only, answers without a score, an environment that falls."""
    form, evaluation = compare(candidate, parent), candidate.evaluation
    lines = [form.line] if form and form.conclusion else []
    if evaluation is None:
        return lines
    lines += evaluation.unscored
    before = parent.evaluation if parent else None
    sizes = [(part.environment, part.num_examples) for part in evaluation.parts]
    if before is None or sizes != [(part.environment, part.num_examples) for part in before.parts]:
        return lines
    sides = (split(side.example_scores, side.parts) for side in (evaluation, before))
    for (name, num), *scores in zip(sizes, *sides, strict=True):
        after, old = map(np.array, scores)
        change, gain = after - old, float((after - old).mean())
        stderr = math.sqrt(float(change.var()) / num + 2 * candidate.decision_rules.seed_sd**2)
        if gain < -FALL * stderr:
            lines.append(f"{name} falls: {old.mean():.3f} -> {after.mean():.3f}, {Effect(gain, stderr)}")
    return lines

"""The scores of a run: their mean over several environments, and the answer format.

The decision and the certificate take one value an example. `weighted` makes the values so that their mean is the
weighted mean of the environments, and their spread over examples is that of the weighted mean: within 1 % of the
formula for strata, and within 15 % of the truth over 200 pairs of sets. With 1,319 and 100 examples the spread over all
examples alike would be less than 85 % of it (tests/unit/test_composite.py).
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
SURE = 3.0  # standard errors from which more answers are formatted for sure, as in health.py
FALL = 2.0  # standard errors
MOST = 2 / 3  # of two environments one always gives half of the variance


def run_scores(record: Record) -> Array:
    """Return the values by which a run is judged, (n,). UsageError if the record has none, or if they are damaged."""
    evaluation = record.evaluation
    try:
        scores = weighted(evaluation.example_scores, evaluation.parts) if evaluation else np.array([])
    except ValueError as error:
        raise UsageError(f"runs/{record.number:04d}/record.json is damaged: {error}", without(record)) from None
    if not scores.size:
        raise UsageError(f"experiment {record.number:04d} has no scores", without(record))
    return scores


def without(record: Record) -> str:
    """Return the fix for a record that cannot be used."""
    return f"Move runs/{record.number:04d} out of runs/ to go on without it."


def weighted(scores: Sequence[float], parts: Sequence[Part]) -> Array:
    """Return one value an example, (n,): the distance of its score from its environment's mean, times
    (w_e / sum of w) (n / n_e), around the weighted mean. ValueError if the sizes of the parts do not fit."""
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
    """A surely higher format rate than the parent's.

    `gain`: of the score. `by_form`: what the format alone is worth; may exceed the gain. `conclusion`: a few words,
    None if more than the format was learnt. `line`: all of it. `strict_scores`: before and after.
    """

    gain: float
    by_form: float
    conclusion: str | None
    line: str
    strict_scores: tuple[float, float]


def compare(candidate: Record, parent: Record | None) -> Form | None:
    """Return what the candidate learnt of the answer format; None if that is nothing for sure, or was not measured.

    The format is worth the change of the format rate, times how much more often formatted answers are right than other
    answers, on the mean of both sides (Kitagawa 1955, JASA 50, 1168).
    """
    before, after = parent.evaluation if parent else None, candidate.evaluation
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
    """Return the standard error of the difference of two shares, binomial; at least that of one answer in all."""
    return max(math.sqrt(p * (1 - p) / max(n, 1) + q * (1 - q) / max(m, 1)), 1 / max(n + m, 1))


def remarks(candidate: Record, parent: Record | None) -> list[str]:
    """Return what the mean score hides, a line each: a gain in format only, answers that could not be scored, and an
    environment that falls by more than FALL standard errors over examples and seeds; of a baseline, an environment that
    gives most of the variance. The remarks decide nothing."""
    form = compare(candidate, parent)
    lines = [form.line] if form and form.conclusion else []
    now, before = candidate.evaluation, parent.evaluation if parent else None
    lines += now.unscored if now else ()
    if now is None or not now.parts:
        return lines
    if before is None or not before.parts:
        variances = [(part.weight * part.stderr) ** 2 for part in now.parts]
        most = max(range(len(variances)), key=variances.__getitem__)
        share, name = variances[most] / (sum(variances) or 1.0), now.parts[most].environment
        text = f"{name} gives {share:.0%} of the score's variance: a larger set of it, or a smaller weight, shows more"
        return lines + [text] * (share > MOST)
    sizes = [[(part.environment, part.num_examples) for part in side.parts] for side in (now, before)]
    if sizes[0] != sizes[1]:
        return lines
    for index, part in enumerate(now.parts):
        after, old = (np.array(split(e.example_scores, e.parts)[index]) for e in (now, before))
        change = after - old
        seeds = candidate.decision_rules.seed_sd**2 * 2
        gain, stderr = float(change.mean()), math.sqrt(float(change.var()) / len(change) + seeds)
        if gain < -FALL * stderr:
            scores = f"{old.mean():.3f} -> {after.mean():.3f}"
            lines.append(f"{part.environment} falls: {scores}, {Effect(gain, stderr)}")
    return lines

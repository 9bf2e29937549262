"""The score over several environments: a weighted mean of theirs, whatever the sizes of their sets.

The decision and the certificate take one value an example. `weighted` makes it, so that the mean over all
examples is the weighted mean of the environments, and the spread over examples that of the weighted mean, each by
itself: within 1 % of the formula for strata, and within 15 % of the truth over 200 pairs of sets; of 1,319 and 100
examples the spread over all alike is less than 85 % of it (tests/unit/test_composite.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

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


@dataclass(frozen=True, slots=True)
class Answers:
    """Those of an experiment's run: shares as fractions, and how many answers there are."""

    score: float
    strict: float
    formatted: float
    count: int

    def right_share(self, formatted: bool) -> float | None:
        """Right answers among the formatted ones, or among all others; None where there are none."""
        share, right = (self.formatted, self.strict) if formatted else (1 - self.formatted, self.score - self.strict)
        return right / share if share * self.count > 0.5 else None


@dataclass(frozen=True, slots=True)
class Form:
    """A parent and its candidate, of which surely more answers are written as asked."""

    before: Answers
    after: Answers

    @property
    def gain(self) -> float:
        return self.after.score - self.before.score

    @property
    def by_form(self) -> float:
        """What the form alone is worth: the change of the formatted share, times how much more often formatted answers
        are right than others, on the mean of both sides (Kitagawa 1955, JASA 50, 1168). May exceed the gain."""
        known = [
            [share for side in (self.before, self.after) if (share := side.right_share(formatted)) is not None]
            for formatted in (True, False)
        ]
        return (self.after.formatted - self.before.formatted) * (fmean(known[0]) - fmean(known[1]))

    @property
    def conclusion(self) -> str | None:
        """In a few words; None where more than the form was learnt."""
        noise = _stderr(self.before.score, self.before.count, self.after.score, self.after.count)
        if self.gain <= noise:
            return "written better, not right more often"
        return "a gain in form only" if self.gain - self.by_form <= min(noise, self.by_form) else None

    def __str__(self) -> str:
        before, after = self.before, self.after
        return (
            f"form: {after.formatted:.0%} of the answers end as asked, {before.formatted:.0%} before: strict_score "
            f"{100 * (after.strict - before.strict):+.1f} pp, eval_score {100 * self.gain:+.1f} pp, "
            f"the form alone is worth {100 * self.by_form:+.1f} pp: {self.conclusion or 'more than form'}"
        )


def compare(candidate: Record, parent: Record) -> Form | None:
    """What the candidate learnt of the form; None where it did not surely, or where it was not measured."""
    before, after = _answers(parent), _answers(candidate)
    if before is None or after is None:
        return None
    noise = _stderr(before.formatted, before.count, after.formatted, after.count)
    return Form(before, after) if after.formatted - before.formatted > SURE * noise else None


def _answers(record: Record) -> Answers | None:
    found = record.evaluation
    if found is None or found.strict_score is None or found.format_rate is None:
        return None
    return Answers(found.eval_score, found.strict_score, found.format_rate, len(found.example_scores))


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

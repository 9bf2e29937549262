"""How much of a gain is form: answers that are written as asked, rather than right more often.

eval_score reads an answer in whatever form it is written, and decides. Some forms are misread more often than others,
so a policy that only learns the form can gain a little there, too, and much in strict_score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from nightshift.records import Record

SURE = 3.0  # standard errors for "more are formatted", as in health/checks.py


@dataclass(frozen=True, slots=True)
class Answers:
    """Those of an experiment's runs: means over the runs, as fractions, and how many there are in all."""

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
        """Of eval_score."""
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
    found = [(e.eval_score, e.strict_score, e.formatted_share, len(e.example_scores)) for e in record.evaluations]
    known = [(score, strict, share) for score, strict, share, _ in found if strict is not None and share is not None]
    if not found or len(known) < len(found):
        return None
    score, strict, formatted = (fmean(column) for column in zip(*known, strict=True))
    return Answers(score, strict, formatted, sum(count for *_, count in found))


def _stderr(p: float, n: int, q: float, m: int) -> float:
    """Of the difference of two shares, binomial; at least that of one answer in all of them."""
    return max(math.sqrt(p * (1 - p) / max(n, 1) + q * (1 - q) / max(m, 1)), 1 / max(n + m, 1))

"""What a campaign believes of its baseline and its incumbent after each experiment: the decision rule's own
joint belief (decision.py), read from the records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nightshift.campaign import decision
from nightshift.campaign.decision import Belief
from nightshift.records import Record, Verdict
from nightshift.rules import DecisionRules

# Recorded and recomputed beliefs of one experiment differ by rounding only, or the rule is another one.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Standing:
    """The belief after one experiment. Scores are fractions 0..1; the `_sd` are posterior standard
    deviations, None where the records cannot be recomputed with the constants of this version.

    `run_sd` is that of one run's score around its config's true score: seeds and examples.
    """

    incumbent: float
    baseline: float
    incumbent_sd: float | None = None
    difference_sd: float | None = None
    run_sd: float | None = None

    @property
    def difference(self) -> float:
        """Incumbent minus baseline, both posterior means."""
        return self.incumbent - self.baseline


def follow(records: Sequence[Record], rules: DecisionRules | None) -> dict[int, Standing]:
    """The standing after each measured experiment of one campaign, by its number.

    The records are recomputed with `rules`; where that does not give what they say (constants of another
    version, damaged scores), the standings hold the recorded means only.
    """
    measured = [r for r in records if r.judgement is not None and r.judgement.verdict is not Verdict.CRASH]
    recorded = _as_recorded(measured)
    if rules is None:
        return recorded
    try:
        computed = _recomputed(measured, rules)
    except (ValueError, TypeError, ArithmeticError, IndexError):  # scores that fit no belief: see _as_recorded
        return recorded
    same = all(abs(computed[n].incumbent - recorded[n].incumbent) < _TOLERANCE for n in recorded if n in computed)
    return computed if same and computed.keys() == recorded.keys() else recorded


def _as_recorded(measured: Sequence[Record]) -> dict[int, Standing]:
    standings: dict[int, Standing] = {}
    baseline: float | None = None
    for record in measured:
        judgement = record.judgement
        if judgement is None or judgement.incumbent_score is None:
            continue
        is_keep = judgement.verdict is Verdict.KEEP
        incumbent = judgement.incumbent_score + (judgement.delta or 0.0 if is_keep else 0.0)
        if judgement.taken_back_score is not None:
            incumbent = judgement.taken_back_score
        baseline = incumbent if baseline is None else baseline
        standings[record.number] = Standing(incumbent, baseline)
    return standings


def _recomputed(measured: Sequence[Record], rules: DecisionRules) -> dict[int, Standing]:
    standings: dict[int, Standing] = {}
    belief: Belief | None = None
    for record in measured:
        scores = [(run.side, run.evaluation.scores) for run in record.runs if run.evaluation is not None]
        if belief is None:
            belief = decision.baseline([run_scores for _, run_scores in scores], rules)
        else:
            comparison = decision.compare(belief, rules)
            for side, run_scores in scores:
                comparison = decision.observe(comparison, side, run_scores, rules)
            is_keep = record.judgement is not None and record.judgement.verdict is Verdict.KEEP
            belief = decision.settle(comparison, is_keep, rules)
        covariance, best = belief.covariance, belief.incumbent
        difference_variance = covariance[best, best] + covariance[0, 0] - 2 * covariance[0, best]
        standings[record.number] = Standing(
            incumbent=belief.mean,
            baseline=float(belief.means[0]),
            incumbent_sd=math.sqrt(belief.variance),
            difference_sd=math.sqrt(max(float(difference_variance), 0.0)),
            run_sd=math.sqrt(belief.noise.variance(rules)),
        )
    return standings

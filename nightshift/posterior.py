"""What a campaign believes of its baseline and its incumbent after each experiment: the decision rule's own
belief (decision.py), with the baseline kept in it as a third variable.

`decision.settle` forgets the baseline at the first keep. The report needs the difference between incumbent
and baseline with its uncertainty, and the two are correlated: every run that informs one informs the other.
The third variable changes nothing of what the rule believes of incumbent and candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nightshift import decision
from nightshift.decision import Belief, Comparison
from nightshift.records import Record, Side, Verdict
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


@dataclass(frozen=True, slots=True)
class _Baseline:
    """The third variable: its mean and variance, and its covariance with incumbent and candidate."""

    mean: float
    variance: float
    with_incumbent: float
    with_candidate: float = 0.0


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
        baseline = incumbent if baseline is None else baseline
        standings[record.number] = Standing(incumbent, baseline)
    return standings


def _recomputed(measured: Sequence[Record], rules: DecisionRules) -> dict[int, Standing]:
    standings: dict[int, Standing] = {}
    belief: Belief | None = None
    base = _Baseline(0.0, 0.0, 0.0)
    for record in measured:
        scores = [(run.side, run.evaluation.scores) for run in record.runs if run.evaluation is not None]
        is_keep = record.judgement is not None and record.judgement.verdict is Verdict.KEEP
        if belief is None:
            belief = decision.baseline([run_scores for _, run_scores in scores], rules)
            base = _Baseline(belief.mean, belief.variance, belief.variance)
        else:
            comparison = decision.compare(belief, rules)
            base = _Baseline(base.mean, base.variance, base.with_incumbent, base.with_incumbent)
            for side, run_scores in scores:
                after = decision.observe(comparison, side, run_scores, rules)
                base = _inform(base, comparison, after, side, math.fsum(run_scores) / len(run_scores), rules)
                comparison = after
            belief = decision.settle(comparison, is_keep)
            with_incumbent = base.with_candidate if is_keep else base.with_incumbent
            base = _Baseline(base.mean, base.variance, with_incumbent)
        difference_variance = belief.variance + base.variance - 2 * base.with_incumbent
        standings[record.number] = Standing(
            incumbent=belief.mean,
            baseline=base.mean,
            incumbent_sd=math.sqrt(belief.variance),
            difference_sd=math.sqrt(max(difference_variance, 0.0)),
            run_sd=math.sqrt(belief.noise.variance(rules)),
        )
    return standings


def _inform(
    base: _Baseline, before: Comparison, after: Comparison, side: Side, score: float, rules: DecisionRules
) -> _Baseline:
    """The baseline after the run that took the rule from `before` to `after`: the same Kalman step."""
    s2 = after.noise.variance(rules)
    if side is Side.INCUMBENT:
        if len(after.incumbent_runs) == len(before.incumbent_runs):
            return base  # set aside
        gain = base.with_incumbent / (before.va + s2)
        return _Baseline(
            mean=base.mean + gain * (score - before.a),
            variance=base.variance - gain * base.with_incumbent,
            with_incumbent=base.with_incumbent - gain * before.va,
            with_candidate=base.with_candidate - gain * before.cov,
        )
    candidate_gain = 1 - after.cov / before.cov  # kb; a leap changes vb first, so it is read off, not recomputed
    innovation = s2 / (1 - candidate_gain)
    is_collapse = after.va == before.va  # the rule's ka is 0: the run informs the candidate alone
    gain = 0.0 if is_collapse else base.with_candidate / innovation
    return _Baseline(
        mean=base.mean + gain * (score - before.b),
        variance=base.variance - gain * base.with_candidate,
        with_incumbent=base.with_incumbent - gain * before.cov,
        with_candidate=base.with_candidate * (1 - candidate_gain),
    )

"""Keep, discard, or run once more: a two-variable Kalman belief over (incumbent, candidate).

The best score so far is lucky by selection, so it is never the bar. The incumbent's score is a
posterior mean that every run informs, also the runs of discarded candidates. One more run is bought
only when it is expected to gain more than `run_value`. The rule, its simulation against
keep-if-above-best and its edge cases: docs/decision-rule.md, sections 7 and 9. Everything here is a
pure function: the state of a campaign is a fold over its ledger.

Notation of the source: a, b = posterior means of incumbent and candidate; va, vb, cov; s2 =
variance of one run's score around its config's true score; e2 = its part from the finite example set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nightshift.records import Judgement, Side, Verdict
from nightshift.rules import DecisionRules

Scores = Sequence[float]  # one score an example, in the order of the selection set
_NORMAL = NormalDist()
_INITIAL_CORRELATION_LOSS = 0.4  # 1 - 0.60: start of e2 before any pair was seen (section 7 step 1)
_SMOOTHING = 0.9


@dataclass(frozen=True, slots=True)
class RunNoise:
    """What the campaign has learnt about the spread of runs: pooled over all configs."""

    squares: float = 0.0  # SS: within-config squared deviations of run scores
    df: int = 0
    pairing_variance: float | None = None  # e2, None before the first scores

    def variance(self, rules: DecisionRules) -> float:
        """s2: prior of `seed_df` degrees of freedom, never below what the example set alone gives."""
        e2 = self.pairing_variance or 0.0
        prior = rules.seed_df * (rules.seed_sd**2 + e2)
        return max((prior + self.squares) / (rules.seed_df + self.df), e2)

    def with_replicate(self, score: float, earlier: Sequence[float]) -> RunNoise:
        """One more run of a config whose earlier runs scored `earlier` (Welford's update)."""
        if not earlier:
            return self
        deviation = score - sum(earlier) / len(earlier)
        return replace(self, squares=self.squares + deviation**2 * len(earlier) / (len(earlier) + 1), df=self.df + 1)


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of the incumbent between two experiments. `mean` is its true score, 0..1."""

    mean: float
    variance: float
    noise: RunNoise
    runs: tuple[Scores, ...]  # the incumbent's accepted runs
    num_collapses: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate under test against the incumbent: belief after zero or more runs."""

    belief: Belief  # before this experiment
    a: float
    b: float
    va: float
    vb: float
    cov: float
    noise: RunNoise
    incumbent_runs: tuple[Scores, ...]
    candidate_runs: tuple[Scores, ...] = ()
    num_collapses: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def delta(self) -> float:
        """Posterior mean of candidate minus incumbent."""
        return self.b - self.a

    @property
    def delta_stderr(self) -> float:
        """Posterior standard deviation of the difference."""
        return math.sqrt(max(self.va + self.vb - 2 * self.cov, 0.0))

    @property
    def p_better(self) -> float:
        """Posterior probability that the candidate is better; ranks well, is not calibrated (section 8)."""
        return _NORMAL.cdf(self.delta / self.delta_stderr) if self.delta_stderr > 0 else float(self.delta > 0)


@dataclass(frozen=True, slots=True)
class Decision:
    """Either a run to make (`replicate`) or a final `keep`."""

    keep: bool
    replicate: Side | None
    run_value: float  # expected gain in score of the most useful further run


def baseline(runs: Sequence[Scores], rules: DecisionRules) -> Belief:
    """The first belief: the mean of the baseline's runs (section 7 step 2)."""
    if not runs:
        raise ValueError("a baseline needs at least one run")
    noise = RunNoise()
    scores: list[float] = []
    for run in runs:
        score = _mean(run)
        noise = noise.with_replicate(score, scores)
        scores.append(score)
    mean = sum(scores) / len(scores)
    e2 = _INITIAL_CORRELATION_LOSS * mean * (1 - mean) / len(runs[0])
    noise = replace(noise, pairing_variance=e2)
    return Belief(mean=mean, variance=noise.variance(rules) / len(runs), noise=noise, runs=tuple(runs))


def compare(belief: Belief, rules: DecisionRules) -> Comparison:
    """A new candidate before its first run: a child of the incumbent, a little worse on average."""
    return Comparison(
        belief=belief,
        a=belief.mean,
        b=belief.mean + rules.prior_mean,
        va=belief.variance,
        vb=belief.variance + rules.prior_sd**2,
        cov=belief.variance,
        noise=belief.noise,
        incumbent_runs=belief.runs,
        num_collapses=belief.num_collapses,
    )


def observe(comparison: Comparison, side: Side, scores: Scores, rules: DecisionRules) -> Comparison:
    """The comparison after one more run of `side`. Raises ValueError for another number of examples."""
    if len(scores) != len(comparison.incumbent_runs[0]):
        raise ValueError(f"{len(scores)} scores against {len(comparison.incumbent_runs[0])}: not the same examples")
    if side is Side.CANDIDATE:
        return _observe_candidate(comparison, scores, rules)
    return _observe_incumbent(comparison, scores, rules)


def _observe_candidate(c: Comparison, scores: Scores, rules: DecisionRules) -> Comparison:
    y = _mean(scores)
    noise = _with_pair(c.noise, scores, c.incumbent_runs)
    noise = noise.with_replicate(y, [_mean(run) for run in c.candidate_runs])
    s2 = noise.variance(rules)
    vb, notes = c.vb, c.notes
    r = y - c.b
    if not c.candidate_runs and r > rules.leap * math.sqrt(vb + s2):
        # Section 9, heavy tail: tau under-credits a real leap; without this the belief stops half-way.
        vb = c.va + r**2
        notes = (*notes, f"leap: first run {100 * r:+.1f} pp above expectation")
    innovation = vb + s2
    kb = vb / innovation
    ka = 0.0 if r < -rules.gate * math.sqrt(innovation) else c.cov / innovation
    if ka == 0.0:
        # A collapsed candidate says nothing about the incumbent.
        notes = (*notes, f"collapse: run {100 * r:+.1f} pp below expectation does not inform the incumbent")
    return replace(
        c,
        a=c.a + ka * r,
        b=c.b + kb * r,
        va=c.va - ka * c.cov,
        vb=vb - kb * vb,
        cov=c.cov - kb * c.cov,
        noise=noise,
        candidate_runs=(*c.candidate_runs, scores),
        notes=notes,
    )


def _observe_incumbent(c: Comparison, scores: Scores, rules: DecisionRules) -> Comparison:
    y = _mean(scores)
    noise = c.noise.with_replicate(y, [_mean(run) for run in c.incumbent_runs])
    s2 = noise.variance(rules)
    r = y - c.a
    innovation = c.va + s2
    if r < -rules.gate * math.sqrt(c.va + c.noise.variance(rules)) and c.num_collapses == 0:
        # One bad incumbent run may be an accident; a second one counts as real (section 7, edge cases).
        note = f"incumbent run {100 * r:+.1f} pp below expectation set aside once"
        return replace(c, num_collapses=1, notes=(*c.notes, note))
    ka, kb = c.va / innovation, c.cov / innovation
    return replace(
        c,
        a=c.a + ka * r,
        b=c.b + kb * r,
        va=c.va - ka * c.va,
        vb=c.vb - kb * c.cov,
        cov=c.cov - ka * c.cov,
        noise=noise,
        incumbent_runs=(*c.incumbent_runs, scores),
    )


def decide(comparison: Comparison, rules: DecisionRules, can_replicate: bool) -> Decision:
    """Keep iff the expected difference exceeds the threshold, after the runs that are worth their price.

    `can_replicate`: the caller has runs and time left. Each side is capped at `max_runs_per_config`.
    """
    c = comparison
    s2 = c.noise.variance(rules)
    values = {
        Side.CANDIDATE: _expected_gain(abs(c.vb - c.cov) / math.sqrt(c.vb + s2), c.delta - rules.threshold),
        Side.INCUMBENT: _expected_gain(abs(c.va - c.cov) / math.sqrt(c.va + s2), c.delta - rules.threshold),
    }
    num_runs = {Side.CANDIDATE: len(c.candidate_runs), Side.INCUMBENT: len(c.incumbent_runs)}
    open_sides = [side for side in values if num_runs[side] < rules.max_runs_per_config]
    best = max(open_sides, key=lambda side: values[side], default=None)  # first of equals: the candidate
    value = values[best] if best else 0.0
    replicate = best if can_replicate and value > rules.run_value else None
    return Decision(keep=c.delta > rules.threshold, replicate=replicate, run_value=value)


def settle(comparison: Comparison, keep: bool) -> Belief:
    """The belief that the next experiment starts from. A discard informs it too (section 7 step 7)."""
    c = comparison
    if keep:
        return Belief(mean=c.b, variance=c.vb, noise=c.noise, runs=c.candidate_runs)
    return Belief(c.a, c.va, c.noise, c.incumbent_runs, c.num_collapses)


def judge(comparison: Comparison, decision: Decision) -> Judgement:
    """The verdict with its numbers. Diagnostics are for the reader only; nothing is decided by them."""
    c = comparison
    num_runs = len(c.candidate_runs) + len(c.incumbent_runs) - len(c.belief.runs)
    runs = f"{num_runs} run{'s' if num_runs != 1 else ''}"
    why = f"expected {100 * c.delta:+.1f} pp over the incumbent after {runs}"
    return Judgement(
        verdict=Verdict.KEEP if decision.keep else Verdict.DISCARD,
        why="; ".join((why, *c.notes)),
        delta=c.delta,
        delta_stderr=c.delta_stderr,
        p_better=c.p_better,
        incumbent_score=c.a,
        diagnostics=_diagnostics(c),
    )


def _diagnostics(c: Comparison) -> dict[str, float]:
    candidate, incumbent = _mean_vector(c.candidate_runs), _mean_vector(c.incumbent_runs)
    paired = candidate - incumbent
    stderr = float(paired.std(ddof=1)) / math.sqrt(len(paired)) if len(paired) > 1 else 0.0
    values = {"paired_delta": float(paired.mean())}
    if stderr > 0:
        values["paired_z"] = float(paired.mean()) / stderr
    first, last = np.asarray(c.incumbent_runs[0]), np.asarray(c.candidate_runs[0])
    wins, losses = int(((last > 0.5) & (first <= 0.5)).sum()), int(((last <= 0.5) & (first > 0.5)).sum())
    if wins + losses:
        values["mcnemar_z"] = (wins - losses) / math.sqrt(wins + losses)
    return values


def _expected_gain(g: float, distance: float) -> float:
    """K(g) = g (phi(u) - u Phi(-u)), u = |distance| / g: value of information of one more run."""
    if g <= 0:
        return 0.0
    u = abs(distance) / g
    return g * (_NORMAL.pdf(u) - u * _NORMAL.cdf(-u))


def _with_pair(noise: RunNoise, scores: Scores, incumbent_runs: Sequence[Scores]) -> RunNoise:
    """e2 from the spread of per-example differences, smoothed (section 7 step 1)."""
    k = len(incumbent_runs)
    difference = np.asarray(scores) - _mean_vector(incumbent_runs)
    n = len(difference)
    observed = float(difference.var(ddof=1)) / (n * (1 + 1 / k)) if n > 1 else 0.0
    if noise.pairing_variance is None:
        return replace(noise, pairing_variance=observed)
    return replace(noise, pairing_variance=_SMOOTHING * noise.pairing_variance + (1 - _SMOOTHING) * observed)


def _mean(scores: Scores) -> float:
    return float(np.mean(scores))


def _mean_vector(runs: Sequence[Scores]) -> NDArray[np.float64]:
    vector: NDArray[np.float64] = np.asarray(runs, dtype=np.float64).mean(axis=0)
    return vector

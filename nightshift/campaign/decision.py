"""Keep, discard, take back: a joint Gaussian belief over every config that was ever the incumbent.

The best score so far is lucky by selection, so it is never the bar. A candidate is its parent plus the effect
of an idea, so each run informs what is believed of the whole chain: a doubtful keep is tested by the children
that are tried on it, and when an earlier config is believed better again, it is the incumbent again. That
makes running anything twice a bad bargain (`run_value`). The prior of an effect is a mixture of kinds of
ideas, which needs no special case for leaps and collapses. Why, against which other rules, in which simulated
worlds: benchmarks/decision_rules.py and docs/decision-rule.md, section 10. Everything here is a pure
function: the state of a campaign is a fold over its ledger.

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

from nightshift.campaign.noise import INITIAL_CORRELATION_LOSS, RunNoise, Scores, mean_score, mean_vector
from nightshift.records import Judgement, Side, Verdict
from nightshift.rules import DecisionRules

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
_NORMAL = NormalDist()
_CALIBRATION = 0.9


@dataclass(frozen=True, slots=True, eq=False)
class Belief:
    """What is believed between two experiments of all configs that were kept, the baseline first.

    `incumbent` is the index of the one that is believed best; scores are fractions 0..1.
    """

    means: Vector
    covariance: Matrix
    incumbent: int
    noise: RunNoise
    runs_of: tuple[tuple[Scores, ...], ...]  # the accepted runs of each
    num_collapses: int = 0

    @property
    def mean(self) -> float:
        """Expected true score of the incumbent."""
        return float(self.means[self.incumbent])

    @property
    def variance(self) -> float:
        """Of the incumbent's true score."""
        return float(self.covariance[self.incumbent, self.incumbent])

    @property
    def runs(self) -> tuple[Scores, ...]:
        """The incumbent's accepted runs."""
        return self.runs_of[self.incumbent]


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A candidate under test against the incumbent: belief after zero or more runs. The candidate stands last."""

    belief: Belief  # before this experiment
    means: Vector
    covariance: Matrix
    noise: RunNoise
    incumbent_runs: tuple[Scores, ...]
    p_better: float  # that the candidate is better than the incumbent; how well calibrated: benchmarks/results
    candidate_runs: tuple[Scores, ...] = ()
    num_collapses: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def a(self) -> float:
        """Expected true score of the incumbent."""
        return float(self.means[self.belief.incumbent])

    @property
    def b(self) -> float:
        """Expected true score of the candidate."""
        return float(self.means[-1])

    @property
    def va(self) -> float:
        """Variance of the incumbent's."""
        return float(self.covariance[self.belief.incumbent, self.belief.incumbent])

    @property
    def vb(self) -> float:
        """Variance of the candidate's."""
        return float(self.covariance[-1, -1])

    @property
    def cov(self) -> float:
        """Covariance of the two."""
        return float(self.covariance[self.belief.incumbent, -1])

    @property
    def delta(self) -> float:
        """Posterior mean of candidate minus incumbent."""
        return self.b - self.a

    @property
    def delta_stderr(self) -> float:
        """Posterior standard deviation of the difference."""
        return math.sqrt(max(self.va + self.vb - 2 * self.cov, 0.0))


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
        score = mean_score(run)
        noise = noise.with_replicate(score, scores)
        scores.append(score)
    mean = sum(scores) / len(scores)
    e2 = INITIAL_CORRELATION_LOSS * mean * (1 - mean) / len(runs[0])
    noise = replace(noise, pairing_variance=e2)
    variance = noise.variance(rules) / len(runs)
    return Belief(np.array([mean]), np.array([[variance]]), 0, noise, (tuple(runs),))


def compare(belief: Belief, rules: DecisionRules) -> Comparison:
    """A new candidate before its first run: a child of the incumbent, which an idea changes."""
    share, effect, variance = _ideas(rules)
    mean = float(share @ effect)
    parent = belief.covariance[belief.incumbent]
    covariance = np.block([[belief.covariance, parent[:, None]], [parent[None, :], np.zeros((1, 1))]])
    covariance[-1, -1] = belief.variance + float(share @ (variance + effect**2)) - mean**2
    return Comparison(
        belief=belief,
        means=np.append(belief.means, belief.mean + mean),
        covariance=covariance,
        noise=belief.noise,
        incumbent_runs=belief.runs,
        p_better=_p_better(share, effect, variance),
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
    y = mean_score(scores)
    noise = c.noise.with_pair(scores, c.incumbent_runs)
    noise = noise.with_replicate(y, [mean_score(run) for run in c.candidate_runs])
    update = _update if c.candidate_runs else _first_run
    c = replace(c, noise=noise)
    return replace(update(c, len(c.means) - 1, y, rules), candidate_runs=(*c.candidate_runs, scores))


def _first_run(c: Comparison, index: int, y: float, rules: DecisionRules) -> Comparison:
    """Condition each kind of idea on the run, weigh the kinds by how well they foretold it, match two moments.

    A run of the candidate sees its parent plus the effect: each kind alone is a Kalman update, in which every
    config moves by its covariance with the parent.
    """
    share, prior, spread = _ideas(rules)
    with_parent = c.covariance[:-1, c.belief.incumbent]
    innovation = c.va + spread + c.noise.variance(rules)
    pull = (y - c.a - prior) / innovation
    log = np.log(share) - 0.5 * (np.log(innovation) + pull**2 * innovation)
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    effect, variance = prior + spread * pull, spread - spread**2 / innovation
    mean_pull, mean_effect = float(weight @ pull), float(weight @ effect)
    curvature = float(weight @ (pull**2 - 1 / innovation)) - mean_pull**2
    joint = float(weight @ (pull * effect - spread / innovation)) - mean_pull * mean_effect
    means, covariance = c.means.copy(), c.covariance.copy()
    means[:-1] += with_parent * mean_pull
    means[-1] = means[c.belief.incumbent] + mean_effect
    covariance[:-1, :-1] += np.outer(with_parent, with_parent) * curvature
    parent = covariance[:-1, c.belief.incumbent]
    covariance[:-1, -1] = covariance[-1, :-1] = parent + with_parent * joint
    covariance[-1, -1] = float(parent[c.belief.incumbent]) + 2 * c.va * joint
    covariance[-1, -1] += float(weight @ (variance + effect**2)) - mean_effect**2
    return replace(c, means=means, covariance=covariance, p_better=_p_better(weight, effect, variance))


def _update(c: Comparison, index: int, y: float, rules: DecisionRules) -> Comparison:
    """One more run of config `index`: the Kalman update of all."""
    column = c.covariance[:, index]
    gain = column / (column[index] + c.noise.variance(rules))
    means, covariance = c.means + gain * (y - c.means[index]), c.covariance - np.outer(gain, column)
    c = replace(c, means=means, covariance=covariance)
    p_better = _NORMAL.cdf(c.delta / c.delta_stderr) if c.delta_stderr > 0 else float(c.delta > 0)
    return replace(c, p_better=_calibrated(p_better))


def _observe_incumbent(c: Comparison, scores: Scores, rules: DecisionRules) -> Comparison:
    y = mean_score(scores)
    r = y - c.a
    if r < -rules.gate * math.sqrt(c.va + c.noise.variance(rules)) and c.num_collapses == 0:
        # One bad incumbent run may be an accident; a second one counts as real (section 7, edge cases).
        note = f"incumbent run {100 * r:+.1f} pp below expectation set aside once"
        return replace(c, num_collapses=1, notes=(*c.notes, note))
    c = replace(c, noise=c.noise.with_replicate(y, [mean_score(run) for run in c.incumbent_runs]))
    return replace(_update(c, c.belief.incumbent, y, rules), incumbent_runs=(*c.incumbent_runs, scores))


def decide(comparison: Comparison, rules: DecisionRules, can_replicate: bool) -> Decision:
    """Keep iff the candidate is expected to be the best of all, after the runs that are worth their price.

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
    keep = c.delta > rules.threshold and c.b >= float(c.means.max())
    return Decision(keep=keep, replicate=replicate, run_value=value)


def settle(comparison: Comparison, keep: bool, rules: DecisionRules) -> Belief:
    """The belief that the next experiment starts from. A discard informs it too, and may take a keep back.

    An earlier config replaces the incumbent when it is expected to be better by more than `rules.take_back`.
    """
    c = comparison
    runs_of = list(c.belief.runs_of)
    runs_of[c.belief.incumbent] = c.incumbent_runs
    if keep:
        return Belief(c.means, c.covariance, len(runs_of), c.noise, (*runs_of, c.candidate_runs))
    best = int(np.argmax(c.means[:-1]))
    if c.means[best] - c.a <= rules.take_back:
        best = c.belief.incumbent
    num_collapses = c.num_collapses if best == c.belief.incumbent else 0
    return Belief(c.means[:-1], c.covariance[:-1, :-1], best, c.noise, tuple(runs_of), num_collapses)


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


def taken_back(judgement: Judgement, comparison: Comparison, rules: DecisionRules, numbers: Sequence[int]) -> Judgement:
    """The judgement, with the earlier experiment that a discard makes the incumbent again, if it does.

    `numbers`: the experiments of the belief's configs, the baseline first.
    """
    belief, parent = settle(comparison, judgement.verdict is Verdict.KEEP, rules), comparison.belief.incumbent
    if judgement.verdict is Verdict.KEEP or belief.incumbent == parent:
        return judgement
    best, gain = numbers[belief.incumbent], 100 * (belief.mean - comparison.a)
    why = f"{judgement.why}; {numbers[parent]:04d} is taken back: {best:04d} is expected {gain:+.2f} pp over it"
    return replace(judgement, why=why, taken_back_to=best, taken_back_score=belief.mean)


def _diagnostics(c: Comparison) -> dict[str, float]:
    candidate, incumbent = mean_vector(c.candidate_runs), mean_vector(c.incumbent_runs)
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


def _ideas(rules: DecisionRules) -> tuple[Vector, Vector, Vector]:
    """(share, mean effect, variance of the effect) of each kind of idea."""
    share, mean, sd = (np.array(column) for column in zip(*rules.ideas, strict=True))
    return share / share.sum(), mean * rules.prior_sd, (sd * rules.prior_sd) ** 2


def _p_better(share: Vector, effect: Vector, variance: Vector) -> float:
    terms = zip(share, effect, variance, strict=True)
    return _calibrated(sum(w * _NORMAL.cdf(e / math.sqrt(v)) for w, e, v in terms))


def _calibrated(probability: float) -> float:
    """Nearer to a half by a factor that benchmarks/decision_rules.py measures: luck on the example set stays."""
    return _NORMAL.cdf(_CALIBRATION * _NORMAL.inv_cdf(min(max(probability, 1e-15), 1 - 1e-15)))


def _expected_gain(g: float, distance: float) -> float:
    """K(g) = g (phi(u) - u Phi(-u)), u = |distance| / g: value of information of one more run."""
    if g <= 0:
        return 0.0
    u = abs(distance) / g
    return g * (_NORMAL.pdf(u) - u * _NORMAL.cdf(-u))

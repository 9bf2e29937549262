"""Keep, discard, take back: a joint Gaussian belief over every config that was ever kept.

The best score so far is lucky by selection, so it is never the bar. A candidate is its parent plus the effect
of an idea, so its one run informs what is believed of the whole chain: a doubtful keep is tested by the
children that are tried on it, and when an earlier config is believed better again, it is the incumbent again.
An idea is of one of a few kinds (`rules.ideas`), which needs no special case for leaps and collapses.
Why, against which other rules, in which simulated worlds: benchmarks/decision_rules.py, docs/decision-rule.md.

Pure functions on arrays: one campaign, or many at once in leading batch axes, written `(...)`. Scores are
fractions 0..1. e2 is the part of a run's variance that comes from the finite example set, s2 all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nightshift.records import DecisionRules, Judgement, Verdict

Array = NDArray[np.float64]
Floats = Array | float  # one a campaign, (...)
Index = NDArray[np.int_] | int  # as well
Bools = NDArray[np.bool_] | bool  # as well
_INITIAL_E2 = 0.4  # of a binomial variance, before any pair was seen: 1 - the correlation of two configs' answers
_SMOOTHING = 0.9  # of e2, an experiment
_CALIBRATION = 0.9
_erfc = np.vectorize(math.erfc, otypes=[np.float64])
_quantile = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])


@dataclass(frozen=True, slots=True, eq=False)
class Belief:
    """What is believed of the k configs that were kept, in that order, the baseline first.

    In a batch the shorter campaigns' last slots are not in use: mean -inf, covariance 0.
    """

    means: Array  # (..., k)
    covariance: Array  # (..., k, k)
    incumbent: Index  # (...) index of the config that is believed best
    squares: Floats  # (...) of the baseline's runs around their mean
    num_baseline_runs: int
    pairing_variance: Floats  # (...) e2

    @property
    def mean(self) -> Array:
        """Expected true score of the incumbent, (...)."""
        return _at(self.means, self.incumbent)

    @property
    def variance(self) -> Array:
        """Of the incumbent's true score, (...)."""
        return _at(_column(self.covariance, self.incumbent), self.incumbent)

    def run_variance(self, rules: DecisionRules) -> Array:
        """s2 of one run's score around its config's true score, (...): `seed_df` degrees of freedom are prior."""
        e2 = self.pairing_variance
        total = rules.seed_df * (rules.seed_sd**2 + e2) + self.squares
        pooled: Array = np.maximum(total / (rules.seed_df + self.num_baseline_runs - 1), e2)
        return pooled


@dataclass(frozen=True, slots=True, eq=False)
class Tested:
    """A candidate after its run."""

    belief: Belief  # with the candidate as its last config
    parent: Index  # (...) index of the config that the candidate was made from
    p_better: Array  # (...) that it is better than its parent; how well calibrated: benchmarks/results

    @property
    def delta(self) -> Array:
        """Posterior mean of candidate minus parent, (...)."""
        return self.belief.means[..., -1] - _at(self.belief.means, self.parent)

    @property
    def delta_stderr(self) -> Array:
        """Posterior standard deviation of that difference, (...)."""
        with_parent = _column(self.belief.covariance, self.parent)
        variance = self.belief.covariance[..., -1, -1] + _at(with_parent, self.parent) - 2 * with_parent[..., -1]
        stderr: Array = np.sqrt(np.maximum(variance, 0.0))
        return stderr

    @property
    def keep(self) -> Bools:
        """Whether the candidate is expected to be better than its parent and the best of all, (...)."""
        best: Bools = self.belief.means[..., -1] >= self.belief.means.max(axis=-1)
        return best & (self.delta > 0)


def baseline(scores: ArrayLike, num_examples: float, rules: DecisionRules) -> Belief:
    """The first belief, from the mean score of each of the baseline's runs, (..., r), one at least."""
    runs = np.asarray(scores, dtype=np.float64)
    mean = runs.mean(axis=-1, keepdims=True)
    squares, e2 = ((runs - mean) ** 2).sum(axis=-1), _INITIAL_E2 * (mean * (1 - mean))[..., 0] / num_examples
    belief = Belief(mean, mean[..., None], np.zeros(e2.shape, int)[()], squares, runs.shape[-1], e2)
    return replace(belief, covariance=belief.run_variance(rules)[..., None, None] / runs.shape[-1])


def pairing(scores: ArrayLike, parent_scores: ArrayLike, num_parent_runs: Index) -> Array:
    """e2 as seen in one pair, (...): the spread of per-example differences.

    `scores` (..., n) of the candidate's run, `parent_scores` (..., n) averaged over the parent's `num_parent_runs`.
    """
    run, parent = np.asarray(scores, dtype=np.float64), np.asarray(parent_scores, dtype=np.float64)
    n = run.shape[-1]
    spread: Array = (run - parent).var(axis=-1, ddof=min(n - 1, 1)) / (n * (1 + 1 / num_parent_runs))
    return spread


def observe(belief: Belief, parent: Index, score: Floats, observed_pairing: Floats, rules: DecisionRules) -> Tested:
    """The belief after the one run of a child of config `parent`, which scored `score`; all three are (...).

    Condition each kind of idea on the run, weigh the kinds by how likely it was under each, match two moments.
    Each kind alone is a Kalman update: the run sees parent plus effect, and every config moves by its covariance
    with the parent.
    """
    e2 = _SMOOTHING * belief.pairing_variance + (1 - _SMOOTHING) * observed_pairing
    belief = replace(belief, pairing_variance=e2)
    share, prior, sd = np.array(rules.ideas).T
    prior, spread = prior * rules.prior_sd, (sd * rules.prior_sd) ** 2  # mean and variance of the effect, by kind
    mean, column = _at(belief.means, parent), _column(belief.covariance, parent)
    variance = _at(column, parent)
    innovation = (variance + belief.run_variance(rules))[..., None] + spread  # (..., kinds), as the next six
    pull = ((score - mean)[..., None] - prior) / innovation
    log = np.log(share) - 0.5 * (np.log(innovation) + pull**2 * innovation)
    weight = np.exp(log - log.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    effect, rest = prior + spread * pull, spread - spread**2 / innovation
    mean_pull, mean_effect = (weight * pull).sum(axis=-1), (weight * effect).sum(axis=-1)
    curvature = (weight * (pull**2 - 1 / innovation)).sum(axis=-1) - mean_pull**2
    joint = (weight * (pull * effect - spread / innovation)).sum(axis=-1) - mean_pull * mean_effect
    # The candidate joins as a copy of its parent; then all move with the run, and the candidate by the effect too.
    column = np.concatenate([column, variance[..., None]], axis=-1)  # (..., k + 1)
    means = np.concatenate([belief.means, mean[..., None]], axis=-1) + column * mean_pull[..., None]
    means[..., -1] += mean_effect
    covariance = column[..., :, None] * column[..., None, :] * curvature[..., None, None]
    covariance[..., :-1, :-1] += belief.covariance
    with_candidate = column * (1 + joint)[..., None]
    covariance[..., -1, :] += with_candidate
    covariance[..., :-1, -1] = covariance[..., -1, :-1]
    covariance[..., -1, -1] += variance * joint + (weight * (rest + effect**2)).sum(axis=-1) - mean_effect**2
    # Nearer to a half by a factor that benchmarks/decision_rules.py measures: luck on the example set stays.
    p_better = np.clip((weight * _cdf(effect / np.sqrt(rest))).sum(axis=-1), 1e-15, 1 - 1e-15)
    return Tested(replace(belief, means=means, covariance=covariance), parent, _cdf(_CALIBRATION * _quantile(p_better)))


def settle(tested: Tested, keep: Bools, rules: DecisionRules) -> Belief:
    """The belief that the next experiment starts from, where the candidate is kept if `keep`, (...).

    A discard informs it too, and may take a keep back: an earlier config replaces the incumbent when it is expected
    to be better by more than `rules.take_back`.
    """
    belief, means, covariance = tested.belief, tested.belief.means, tested.belief.covariance
    count = np.isfinite(means[..., :-1]).sum(axis=-1)  # slots in use come first; a kept candidate joins them
    used = count + keep
    slot = np.arange(used.max())
    here, live = slot == count[..., None], slot < used[..., None]
    means = np.where(live, np.where(here, means[..., -1:], means[..., : len(slot)]), -np.inf)
    covariance = np.where(here[..., None, :], covariance[..., -1:], covariance[..., : len(slot)])
    covariance = np.where(here[..., :, None], covariance[..., -1:, :], covariance[..., : len(slot), :])
    best = means.argmax(axis=-1)
    best = np.where(_at(means, best) - belief.mean > rules.take_back, best, belief.incumbent)
    return replace(
        belief,
        means=means,
        covariance=np.where(live[..., :, None] & live[..., None, :], covariance, 0.0),
        incumbent=np.where(keep, count, best)[()],
    )


def judge(
    tested: Tested,
    candidate_scores: ArrayLike,
    parent_scores: ArrayLike,
    kept_numbers: Sequence[int],
    rules: DecisionRules,
) -> Judgement:
    """The verdict on one campaign's candidate with its numbers, and the earlier config that a discard goes back to.

    `candidate_scores` (n,); `parent_scores` (n,) or those of the parent's runs, (r, n); `kept_numbers`: the
    experiments of the belief's configs, the baseline first.
    """
    before, parent, delta = int(tested.belief.incumbent), int(tested.parent), tested.delta
    over = "the incumbent" if parent == before else f"{kept_numbers[parent]:04d}"
    judgement = Judgement(
        verdict=Verdict.KEEP if tested.keep else Verdict.DISCARD,
        why=f"expected {100 * delta:+.1f} pp over {over} after 1 run",
        delta=float(delta),
        delta_stderr=float(tested.delta_stderr),
        p_better=float(tested.p_better),
        incumbent_score=float(tested.belief.means[parent]),
        diagnostics=_diagnostics(np.asarray(candidate_scores), np.atleast_2d(np.asarray(parent_scores))),
    )
    belief = settle(tested, tested.keep, rules)
    after = int(belief.incumbent)
    if tested.keep or after == before:
        return judgement
    best, gain = kept_numbers[after], 100 * (belief.mean - tested.belief.mean)
    why = f"{judgement.why}; {kept_numbers[before]:04d} is taken back: {best:04d} is expected {gain:+.2f} pp over it"
    return replace(judgement, why=why, taken_back_to=best, taken_back_score=float(belief.mean))


def _diagnostics(candidate: Array, parent_runs: Array) -> dict[str, float]:
    """For the reader only; nothing is decided by them. Shapes (n,) and (r, n)."""
    paired = candidate - parent_runs.mean(axis=0)
    stderr = float(paired.std(ddof=1)) / math.sqrt(len(paired)) if len(paired) > 1 else 0.0
    values = {"paired_delta": float(paired.mean())}
    if stderr > 0:
        values["paired_z"] = float(paired.mean()) / stderr
    return values


def _cdf(x: Array) -> Array:
    """The standard normal distribution function."""
    below: Array = 0.5 * _erfc(-x / math.sqrt(2))
    return below


def _at(values: Array, index: Index) -> Array:
    """Element `index`, (...), of the last axis of `values`, (..., k)."""
    found: Array = np.take_along_axis(values, np.asarray(index)[..., None], axis=-1)[..., 0][()]
    return found


def _column(covariance: Array, index: Index) -> Array:
    """Covariance of all configs with config `index`, (..., k)."""
    return _at(covariance, np.asarray(index)[..., None])

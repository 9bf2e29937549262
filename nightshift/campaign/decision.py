"""Keep, discard, take back: a joint belief over the effects of ideas, held in several worlds at once.

The best score so far is lucky by selection, so it is never the bar. A candidate is a set of ideas and a new one, so its
one run informs what is believed of all of them: a doubtful keep is tested by what is tried on it or without it, and
when another config that was kept is believed better, it is the incumbent. Which set the next idea is tried on is drawn
from the belief (recombine.py), so that ideas meet each other, and discarded ones come back while they are doubtful.
An idea is of one of a few kinds, which needs no special case for leaps and collapses. How frequent each kind is, and
how noisy runs are, nobody knows: each guess at both is a world, in which the belief is Gaussian, and every run weighs
the worlds by how well they foretold it.
Why, against which other rules, in which simulated worlds: benchmarks/decision_rules.py, docs/decision-rule.md.

Pure functions on arrays: one campaign, or many at once in leading batch axes, written `(...)`. Scores are
fractions 0..1. e2 is the part of a run's variance that comes from the finite example set, s2 all of it. h worlds:
every prior of the rules with every noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from msgspec import structs
from numpy.typing import ArrayLike, NDArray

from nightshift.campaign.records import Judgement
from nightshift.campaign.scores import paired
from nightshift.campaign.worlds import UNUSED, Array, Floats, Index, Posterior, at, padded
from nightshift.config.decision_rules import DecisionRules

Bools = NDArray[np.bool_] | bool  # as well
_SMOOTHING = 0.9  # of e2, an experiment
MAX_DISCARDED = 12  # ideas; 24 gain no more
_NONE = 1e-9  # the share of a kind that has none, and the least weight of a world: none is ever ruled out
_erfc = np.vectorize(math.erfc, otypes=[np.float64])
_quantile = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])


@dataclass(frozen=True, slots=True, eq=False)
class Tested:
    """A candidate after its run."""

    belief: Posterior  # with its idea in the last slot, and without the candidate
    candidate: Array  # (..., k) what it is made of
    parent: Index  # (...) index of the config that it is compared with
    p_better: Array  # (...) that it is better than its parent; how well calibrated: benchmarks/results

    @property
    def expected(self) -> Array:
        """Posterior mean of the candidate's true score, (...)."""
        return self.belief.of(self.candidate)[0]

    @property
    def delta(self) -> Array:
        """Posterior mean of candidate minus parent, (...)."""
        return self._difference[0]

    @property
    def delta_stderr(self) -> Array:
        """Posterior standard deviation of that difference, (...)."""
        return self._difference[1]

    @property
    def keep(self) -> Bools:
        """Whether the candidate is expected to be better than its parent and the best of all, (...)."""
        best: Bools = self.expected >= self.belief.expected.max(axis=-1)
        return best & (self.delta > 0)

    @property
    def _difference(self) -> tuple[Array, Array]:
        return self.belief.of(self.candidate - self.belief.set_of(self.parent))


def baseline(score: ArrayLike, num_examples: float, rules: DecisionRules, extra_variance: Floats = 0.0) -> Posterior:
    """The first belief, from the score of the baseline's run, (...).

    `extra_variance`: noise of that run beside that of any other run.
    """
    mean = np.asarray(score, dtype=np.float64)[..., None]
    e2 = (1 - rules.agreement) * (mean * (1 - mean))[..., 0] / num_examples  # before any pair was seen
    shares = [prior * noise for prior, _ in rules.priors for noise, _ in rules.noises]
    weights = np.broadcast_to(np.array(shares) / sum(shares), (*mean.shape[:-1], len(shares)))
    means = np.broadcast_to(mean[..., None], (*weights.shape, 1))
    incumbent = np.zeros(e2.shape, int)[()]
    ideas, sets = np.zeros(mean.shape, int), np.ones((*mean.shape, 1))
    belief = Posterior(means, means[..., None], weights, ideas, sets, incumbent, e2)
    s2 = belief.run_variance(rules) + np.asarray(extra_variance)[..., None]
    return replace(belief, covariance=s2[..., None, None])


def pairing(scores: ArrayLike, parent_scores: ArrayLike) -> Array:
    """e2 as seen in one pair, (...): the spread of per-example differences. Both (..., n), of one run each."""
    run, parent = np.asarray(scores, dtype=np.float64), np.asarray(parent_scores, dtype=np.float64)
    n = run.shape[-1]
    spread: Array = (run - parent).var(axis=-1, ddof=min(n - 1, 1)) / (2 * n)
    return spread


def observe(
    belief: Posterior,
    parent: Index,
    score: Floats,
    observed_pairing: Floats,
    rules: DecisionRules,
    extra_variance: Floats = 0.0,
    *,
    made_from: Array | None = None,
    replaced: Array | None = None,
    number: Index = 0,
) -> Tested:
    """The belief after the one run of a candidate that is compared with config `parent` and scored `score`; all (...).

    `made_from`: the set that it was made from, the parent's for None; `replaced`: which of these its own idea replaces,
    both (..., k); `number`: of the experiment. `extra_variance`: noise that this run had beside that of any other.

    In every world: condition each kind of idea on the run, weigh the kinds by how likely it was under each, match two
    moments. Each kind alone is a Kalman update: the run sees a sum of effects, and every effect moves by its
    covariance with that sum. Then weigh the worlds by how likely the run was in each.
    """
    e2 = _SMOOTHING * belief.pairing_variance + (1 - _SMOOTHING) * observed_pairing
    belief = replace(belief, pairing_variance=e2)
    made_from = belief.set_of(parent) if made_from is None else made_from
    replaced = np.zeros_like(made_from) if replaced is None else replaced
    belief = belief.with_idea(replaced, number)
    made_from, between_sets = padded(made_from), padded(made_from) - belief.set_of(parent)
    prior, sd = np.array(rules.kinds).T * rules.prior_sd
    share = np.array([shares for _, shares in rules.priors for _ in rules.noises])  # (h, kinds)
    spread, column = sd**2, belief.column(made_from)
    mean, variance = (np.einsum("...hk,...k->...h", values, made_from) for values in (belief.means, column))
    s2 = belief.run_variance(rules) + np.asarray(extra_variance)[..., None]
    innovation = (variance + s2)[..., None] + spread  # (..., h, kinds), as the next six
    pull = ((np.asarray(score)[..., None] - mean)[..., None] - prior) / innovation
    log = np.log(np.maximum(share, _NONE)) - 0.5 * (np.log(innovation) + pull**2 * innovation)
    weight, evidence = _normalised(log)
    effect, rest = prior + spread * pull, spread - spread**2 / innovation
    mean_pull, mean_effect = (weight * pull).sum(axis=-1), (weight * effect).sum(axis=-1)
    curvature = (weight * (pull**2 - 1 / innovation)).sum(axis=-1) - mean_pull**2
    joint = (weight * (pull * effect - spread / innovation)).sum(axis=-1) - mean_pull * mean_effect
    # Under each kind, of candidate minus parent: what the sets differ by and the own effect, after the run.
    between, shared = belief.of_each(between_sets), np.einsum("...hk,...k->...h", column, between_sets)[..., None]
    gain = between[0][..., None] + shared * pull + effect
    doubt = between[1][..., None] - (shared**2 + 2 * shared * spread) / innovation + rest
    is_better = _cdf(gain / np.sqrt(np.maximum(doubt, _NONE**2)))
    # All move with the run, and the new idea by its own effect too.
    means = belief.means + column * mean_pull[..., None]
    means[..., -1] += mean_effect
    covariance = belief.covariance + column[..., :, None] * column[..., None, :] * curvature[..., None, None]
    covariance[..., -1, :] += column * joint[..., None]
    covariance[..., :, -1] += column * joint[..., None]
    covariance[..., -1, -1] += (weight * (rest + effect**2)).sum(axis=-1) - mean_effect**2
    worlds, _ = _normalised(np.log(belief.weights) + evidence)
    worlds = np.maximum(worlds, _NONE)
    worlds /= worlds.sum(axis=-1, keepdims=True)
    p_better = (worlds[..., None] * weight * is_better).sum(axis=(-2, -1))
    p_better = _cdf(rules.calibration * _quantile(np.clip(p_better, 1e-15, 1 - 1e-15)))
    candidate = made_from - padded(replaced)
    candidate[..., -1] = belief.ideas[..., -1] != UNUSED
    return Tested(replace(belief, means=means, covariance=covariance, weights=worlds), candidate, parent, p_better)


def settle(tested: Tested, keep: Bools, rules: DecisionRules) -> Posterior:
    """The belief that the next experiment starts from, where the candidate is kept if `keep`, (...).

    A discard informs it too, and may take a keep back: another config replaces the incumbent when it is expected
    to be better by more than `rules.take_back`. Of the ideas that are in no kept config the MAX_DISCARDED whose
    effects are likeliest above 0 are remembered; leaving one out changes nothing of what is believed of the others.
    """
    belief, added = tested.belief, tested.candidate * np.asarray(keep)[..., None]
    count = (belief.sets[..., 0] > 0).sum(axis=-1)  # sets in use come first; a kept candidate joins them
    sets = np.concatenate([belief.sets, np.zeros_like(added)[..., None, :]], axis=-2)[..., : (count + keep).max(), :]
    is_next = (np.arange(sets.shape[-2]) == count[..., None])[..., None]
    sets = np.where(is_next, added[..., None, :], sets)
    belief = replace(belief, sets=sets)
    discarded = (belief.ideas != UNUSED) & ~(sets > 0).any(axis=-2)
    z = np.where(discarded, belief.effect_z, np.inf)
    is_worst = (np.arange(z.shape[-1]) == z.argmin(axis=-1)[..., None]) & discarded
    ideas = np.where(is_worst & (discarded.sum(axis=-1) > MAX_DISCARDED)[..., None], UNUSED, belief.ideas)
    settled = replace(belief, ideas=ideas).compact()
    best = settled.expected.argmax(axis=-1)
    best = np.where(at(settled.expected, best) - belief.mean > rules.take_back, best, belief.incumbent)
    return replace(settled, incumbent=np.where(keep, count, best)[()])


def judge(
    tested: Tested,
    candidate_scores: ArrayLike,
    parent_scores: ArrayLike,
    kept_numbers: Sequence[int],
    rules: DecisionRules,
    is_repeat: bool = False,
) -> Judgement:
    """The numbers of the verdict on one campaign's candidate, and the earlier config that a discard goes back to.

    `candidate_scores` and `parent_scores` (n,); `kept_numbers`: the experiments of the belief's configs, the baseline
    first. `is_repeat`: of no idea, so that nothing is compared.
    """
    keep = bool(tested.keep)
    before, parent = int(tested.belief.incumbent), int(tested.parent)
    compared = tested.delta, tested.delta_stderr, tested.p_better
    delta, delta_stderr, p_better = (None if is_repeat else float(value) for value in compared)
    over = "the incumbent" if parent == before else f"{kept_numbers[parent]:04d}"
    why = f"the settings of {kept_numbers[parent]:04d}: one more run of it"
    judgement = Judgement(
        why=why if delta is None else f"expected {100 * delta:+.1f} pp over {over} after 1 run",
        delta=delta,
        delta_stderr=delta_stderr,
        p_better=p_better,
        incumbent_score=float(tested.belief.expected[parent]),
        diagnostics=paired(np.asarray(candidate_scores), np.asarray(parent_scores)),
        incumbent=None if parent == before else kept_numbers[before],
    )
    belief = settle(tested, keep, rules)
    after = int(belief.incumbent)
    if keep or after == before:
        return judgement
    best, gain = kept_numbers[after], 100 * (belief.mean - tested.belief.mean)
    why = f"{judgement.why}; {kept_numbers[before]:04d} is taken back: {best:04d} is expected {gain:+.2f} pp over it"
    return structs.replace(judgement, why=why, taken_back_to=best)


def _cdf(x: Array) -> Array:
    """The standard normal distribution function."""
    below: Array = 0.5 * _erfc(-x / math.sqrt(2))
    return below


def _normalised(log: Array) -> tuple[Array, Array]:
    """(weights that are 1 together, logarithm of what they were together) over the last axis."""
    top = log.max(axis=-1, keepdims=True)
    weights = np.exp(log - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total, (top + np.log(total))[..., 0]

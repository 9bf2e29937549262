"""What is believed of the configs that were kept, held in h worlds at once; see decision.py, which makes it.

Arrays are of one campaign, or of many at once in leading batch axes, written `(...)`. Scores are fractions 0..1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightshift.decision_rules import DecisionRules

Array = NDArray[np.float64]
Floats = Array | float  # one a campaign, (...)
Index = NDArray[np.int_] | int  # as well


@dataclass(frozen=True, slots=True, eq=False)
class Belief:
    """What is believed of the k configs that were kept, in that order, the baseline first.

    In a batch the shorter campaigns' last slots are not in use: mean -inf, covariance 0.
    """

    means: Array  # (..., h, k)
    covariance: Array  # (..., h, k, k)
    weights: Array  # (..., h) of the worlds, 1 together
    incumbent: Index  # (...) index of the config that is believed best
    squares: Floats  # (...) of the baseline's runs around their mean
    num_baseline_runs: int
    pairing_variance: Floats  # (...) e2

    @property
    def expected(self) -> Array:
        """True scores of the configs, over all worlds, (..., k)."""
        found: Array = (self.weights[..., None] * self.means).sum(axis=-2)
        return found

    @property
    def mean(self) -> Array:
        """Expected true score of the incumbent, (...)."""
        return at(self.expected, self.incumbent)

    @property
    def sd(self) -> Array:
        """Standard deviation of the incumbent's true score, (...)."""
        it = self.in_worlds(self.incumbent)
        return self._spread(at(self.means, it), at(column_of(self.covariance, it), it))

    def difference(self, one: Index, other: Index) -> tuple[Array, Array]:
        """Config `one` minus config `other`: posterior mean and standard deviation, (...) both."""
        a, b = self.in_worlds(one), self.in_worlds(other)
        of_a, of_b = column_of(self.covariance, a), column_of(self.covariance, b)
        apart = at(self.means, a) - at(self.means, b)
        spread = self._spread(apart, np.maximum(at(of_a, a) + at(of_b, b) - 2 * at(of_a, b), 0.0))
        return (self.weights * apart).sum(axis=-1), spread

    def in_worlds(self, config: Index) -> Index:
        """Which config it is in each world, (..., 1)."""
        found: Index = np.broadcast_to(config, np.shape(self.pairing_variance))[..., None]
        return found

    def _spread(self, means: Array, variances: Array) -> Array:
        """The standard deviation over all worlds of what has such moments in each, (..., h)."""
        mean = (self.weights * means).sum(axis=-1, keepdims=True)
        spread: Array = np.sqrt((self.weights * (variances + (means - mean) ** 2)).sum(axis=-1))
        return spread

    def run_variance(self, rules: DecisionRules) -> Array:
        """s2 of one run's score around its config's true score, (..., h): `seed_df` degrees of freedom are prior."""
        e2, squares = (np.asarray(value)[..., None] for value in (self.pairing_variance, self.squares))
        seeds = np.array([noise * rules.seed_sd for _ in rules.priors for _, noise in rules.noises])
        total = rules.seed_df * (seeds**2 + e2) + squares
        pooled: Array = np.maximum(total / (rules.seed_df + self.num_baseline_runs - 1), e2)
        return pooled


def at(values: Array, index: Index) -> Array:
    """Element `index`, (...), of the last axis of `values`, (..., k)."""
    found: Array = np.take_along_axis(values, np.asarray(index)[..., None], axis=-1)[..., 0][()]
    return found


def column_of(covariance: Array, index: Index) -> Array:
    """Covariance of all configs with config `index`, (..., k)."""
    return at(covariance, np.asarray(index)[..., None])

"""What is believed of ideas, and so of every config that was kept, held in h worlds at once; see decision.py.

A config is the baseline and a set of ideas; its score is the baseline's and the sum of their effects. Arrays are of one
campaign, or of many at once in leading batch axes, written `(...)`. Scores are fractions 0..1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nightshift.config.decision_rules import DecisionRules

Array = NDArray[np.float64]
Ints = NDArray[np.int_]
Floats = Array | float  # one a campaign, (...)
Index = Ints | int  # as well
UNUSED = -1  # as the number of an idea: the slot is empty
_LEAST = 1e-9  # standard deviation that is divided by
_JITTER = 1e-12  # what is known exactly has a root, too


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """A Gaussian of k numbers in every world: the baseline's score, then the effects of the ideas that are remembered.

    In a batch the shorter campaigns' last slots and sets are not in use: UNUSED and 0.
    """

    means: Array  # (..., h, k)
    covariance: Array  # (..., h, k, k)
    weights: Array  # (..., h) of the worlds, 1 together
    ideas: Ints  # (..., k) number of the experiment that each idea came with
    sets: Array  # (..., c, k) of the configs that were kept, the baseline first: 1 where the slot is part of it
    incumbent: Index  # (...) index of the config that is believed best
    pairing_variance: Floats  # (...) e2

    @property
    def effects(self) -> Array:
        """The baseline's score and the effects of the ideas as expected over all worlds, (..., k)."""
        found: Array = (self.weights[..., None] * self.means).sum(axis=-2)
        return found

    @property
    def expected(self) -> Array:
        """True scores of the configs, (..., c); -inf where there is none."""
        found: Array = np.where(self.sets[..., 0] > 0, (self.sets @ self.effects[..., None])[..., 0], -np.inf)
        return found

    @property
    def mean(self) -> Array:
        """Expected true score of the incumbent, (...)."""
        return at(self.expected, self.incumbent)

    @property
    def sd(self) -> Array:
        """Standard deviation of the incumbent's true score, (...)."""
        return self.of(self.set_of(self.incumbent))[1]

    def difference(self, one: Index, other: Index) -> tuple[Array, Array]:
        """Config `one` minus config `other`: posterior mean and standard deviation, (...) both."""
        return self.of(self.set_of(one) - self.set_of(other))

    def set_of(self, config: Index) -> Array:
        """What a config is made of, (..., k)."""
        config = np.broadcast_to(config, self.ideas.shape[:-1])
        found: Array = np.take_along_axis(self.sets, config[..., None, None], axis=-2)[..., 0, :]
        return found

    def of(self, factors: Array) -> tuple[Array, Array]:
        """Posterior mean and standard deviation over all worlds of a weighted sum, (...) both; `factors` (..., k)."""
        means, variances = self.of_each(factors)
        mean = (self.weights * means).sum(axis=-1)
        spread = self.weights * (variances + (means - mean[..., None]) ** 2)
        return mean[()], np.sqrt(spread.sum(axis=-1))[()]

    def of_each(self, factors: Array) -> tuple[Array, Array]:
        """Mean and variance in each world of a weighted sum, (..., h) both."""
        means = np.einsum("...hk,...k->...h", self.means, factors)
        variances = np.einsum("...hk,...k->...h", self.column(factors), factors)
        return means, np.maximum(variances, 0.0)

    def column(self, factors: Array) -> Array:
        """Covariance of everything with a weighted sum, (..., h, k)."""
        found: Array = np.einsum("...hij,...j->...hi", self.covariance, factors)
        return found

    def draw(self, rng: np.random.Generator) -> Array:
        """One world, and in it the baseline's score and all effects, as likely as they are believed to be, (..., k).

        In a slot that is not in use it is 0.
        """
        chance = rng.random(self.weights.shape[:-1])[..., None]
        world = (chance > self.weights.cumsum(axis=-1)).sum(axis=-1).clip(0, self.weights.shape[-1] - 1)
        means = np.take_along_axis(self.means, world[..., None, None], axis=-2)[..., 0, :]
        covariance = np.take_along_axis(self.covariance, world[..., None, None, None], axis=-3)[..., 0, :, :]
        root = np.linalg.cholesky(covariance + _JITTER * np.eye(means.shape[-1]))
        drawn: Array = (means + (root @ rng.standard_normal(means.shape)[..., None])[..., 0]) * (self.ideas != UNUSED)
        return drawn

    @property
    def effect_z(self) -> Array:
        """How many standard deviations each effect is expected to be above 0, (..., k)."""
        variances = np.diagonal(self.covariance, axis1=-2, axis2=-1) + (self.means - self.effects[..., None, :]) ** 2
        spread = np.sqrt((self.weights[..., None] * variances).sum(axis=-2))
        found: Array = self.effects / np.maximum(spread, _LEAST)
        return found

    def with_idea(self, replaced: Array, number: Index) -> Posterior:
        """With a slot for a new idea, which has no effect of its own yet: it stands for those that it replaces."""
        column = self.column(replaced)
        row = np.concatenate([column, np.einsum("...hk,...k->...h", column, replaced)[..., None]], axis=-1)
        covariance = np.concatenate([self.covariance, column[..., None, :]], axis=-2)
        mean = np.einsum("...hk,...k->...h", self.means, replaced)
        numbers = np.broadcast_to(number, self.ideas.shape[:-1])
        return replace(
            self,
            means=np.concatenate([self.means, mean[..., None]], axis=-1),
            covariance=np.concatenate([covariance, row[..., None]], axis=-1),
            ideas=np.concatenate([self.ideas, numbers[..., None]], axis=-1),
            sets=padded(self.sets),
        )

    def compact(self) -> Posterior:
        """With the slots in use first, and no more of them than the campaign with most has."""
        order = np.argsort(self.ideas == UNUSED, axis=-1, kind="stable")
        order = order[..., : (self.ideas != UNUSED).sum(axis=-1).max()]
        ideas = np.take_along_axis(self.ideas, order, axis=-1)
        used = (ideas != UNUSED).astype(float)
        if order.ndim == 1:  # of one campaign all that are left are in use, and this is ten times as fast
            covariance = self.covariance[..., order[:, None], order]
        else:
            covariance = np.take_along_axis(self.covariance, order[..., None, :, None], axis=-2)
            covariance = np.take_along_axis(covariance, order[..., None, None, :], axis=-1)
            covariance *= used[..., None, :, None] * used[..., None, None, :]
        return replace(
            self,
            means=np.take_along_axis(self.means, order[..., None, :], axis=-1) * used[..., None, :],
            covariance=covariance,
            ideas=ideas,
            sets=np.take_along_axis(self.sets, order[..., None, :], axis=-1) * used[..., None, :],
        )

    def run_variance(self, rules: DecisionRules) -> Array:
        """s2 of one run's score around its config's true score, (..., h): of the seed, and of the examples (e2)."""
        seeds = np.array([noise * rules.seed_sd for _ in rules.priors for _, noise in rules.noises])
        total: Array = seeds**2 + np.asarray(self.pairing_variance)[..., None]
        return total


def at(values: Array, index: Index) -> Array:
    """Element `index`, (...), of the last axis of `values`, (..., k)."""
    found: Array = np.take_along_axis(values, np.asarray(index)[..., None], axis=-1)[..., 0][()]
    return found


def padded(factors: Array) -> Array:
    """With a slot more that is not in use, (..., k + 1)."""
    return np.concatenate([factors, np.zeros((*factors.shape[:-1], 1))], axis=-1)

"""The rule before take-backs, for many campaigns at once: docs/decision-rule.md, sections 7 and 9.

A two-variable belief over (incumbent, candidate), replicates where they are worth their price, and special
cases for leaps and collapses. It needs two numbers of a run: its mean score, and e2, the pairing variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from nightshift.campaign.noise import INITIAL_CORRELATION_LOSS, SMOOTHING
from nightshift.records import DecisionRules


@dataclass(frozen=True)
class FormerRules(DecisionRules):
    """The constants of that rule (section 7), as fractions."""

    prior_mean: float = -0.0035
    leap: float = 2.0
    run_value: float = 0.0006


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

NOBODY, CANDIDATE, INCUMBENT = 0, 1, 2  # whose run comes next

_erf = np.frompyfunc(math.erf, 1, 1)


def cdf(x: Floats) -> Floats:
    """The standard normal distribution function."""
    return 0.5 * (1 + _erf(x / math.sqrt(2)).astype(np.float64))


def pdf(x: Floats) -> Floats:
    """The standard normal density."""
    return np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)


@dataclass
class Campaigns:
    """Belief, run noise and comparison of every campaign; the names are those of decision.py."""

    a: Floats
    b: Floats
    va: Floats
    vb: Floats
    cov: Floats
    squares: Floats
    df: Floats
    e2: Floats
    incumbent_runs: Floats  # their number and sum of scores
    incumbent_sum: Floats
    candidate_runs: Floats
    candidate_sum: Floats
    collapses: Floats

    def take(self, mask: Bools, **changes: Floats) -> None:
        """Change fields where `mask` is true."""
        for name, value in changes.items():
            setattr(self, name, np.where(mask, value, getattr(self, name)))


class Rule:
    """The rule under given constants."""

    def __init__(self, rules: FormerRules) -> None:
        self.rules = rules
        self.c: Campaigns

    def begin(self, scores: Floats, num_examples: int) -> None:
        """Baselines: `scores[i, r]` is the r-th baseline run of campaign i."""
        size, num_runs = scores.shape
        self.c = Campaigns(**{field.name: np.zeros(size) for field in fields(Campaigns)})
        c = self.c
        mean = scores.mean(axis=1)
        c.squares = ((scores - mean[:, None]) ** 2).sum(axis=1)
        c.df = np.full(size, num_runs - 1.0)
        c.e2 = INITIAL_CORRELATION_LOSS * mean * (1 - mean) / num_examples
        c.incumbent_runs, c.incumbent_sum = np.full(size, float(num_runs)), scores.sum(axis=1)
        c.a, c.va = mean, self.run_variance() / num_runs

    def run_variance(self) -> Floats:
        """s2."""
        c, rules = self.c, self.rules
        prior = rules.seed_df * (rules.seed_sd**2 + c.e2)
        return np.maximum((prior + c.squares) / (rules.seed_df + c.df), c.e2)

    def compare(self) -> None:
        """A new candidate in every campaign."""
        c = self.c
        zero = np.zeros_like(c.a)
        c.b, c.vb, c.cov = c.a + self.rules.prior_mean, c.va + self.rules.prior_sd**2, c.va.copy()
        c.candidate_runs, c.candidate_sum = zero, zero.copy()

    def observe_candidate(self, mask: Bools, y: Floats, e2: Floats) -> None:
        """One run of the candidate in the campaigns of `mask`."""
        c, rules = self.c, self.rules
        c.take(mask, e2=SMOOTHING * c.e2 + (1 - SMOOTHING) * e2)
        self._replicate(mask & (c.candidate_runs > 0), y, c.candidate_runs, c.candidate_sum)
        s2 = self.run_variance()
        r = y - c.b
        leap = (c.candidate_runs == 0) & (r > rules.leap * np.sqrt(c.vb + s2))
        vb = np.where(leap, c.va + r**2, c.vb)
        innovation = vb + s2
        kb = vb / innovation
        ka = np.where(r < -rules.gate * np.sqrt(innovation), 0.0, c.cov / innovation)
        c.take(
            mask,
            a=c.a + ka * r,
            b=c.b + kb * r,
            va=c.va - ka * c.cov,
            vb=vb - kb * vb,
            cov=c.cov - kb * c.cov,
            candidate_runs=c.candidate_runs + 1,
            candidate_sum=c.candidate_sum + y,
        )

    def observe_incumbent(self, mask: Bools, y: Floats) -> None:
        """One run of the incumbent in the campaigns of `mask`."""
        c, rules = self.c, self.rules
        r = y - c.a
        aside = mask & (r < -rules.gate * np.sqrt(c.va + self.run_variance())) & (c.collapses == 0)
        c.take(aside, collapses=np.ones_like(c.a))
        mask = mask & ~aside
        self._replicate(mask, y, c.incumbent_runs, c.incumbent_sum)
        innovation = c.va + self.run_variance()
        ka, kb = c.va / innovation, c.cov / innovation
        c.take(
            mask,
            a=c.a + ka * r,
            b=c.b + kb * r,
            va=c.va - ka * c.va,
            vb=c.vb - kb * c.cov,
            cov=c.cov - ka * c.cov,
            incumbent_runs=c.incumbent_runs + 1,
            incumbent_sum=c.incumbent_sum + y,
        )

    def decide(self, can_replicate: Bools) -> tuple[Bools, Ints]:
        """(keep, whose run comes next) of every campaign."""
        c, rules = self.c, self.rules
        s2 = self.run_variance()
        distance = np.abs(self.delta - rules.threshold)
        candidate = expected_gain(np.abs(c.vb - c.cov) / np.sqrt(c.vb + s2), distance)
        incumbent = expected_gain(np.abs(c.va - c.cov) / np.sqrt(c.va + s2), distance)
        runs = (c.candidate_runs, c.incumbent_runs)
        return self.delta > rules.threshold, side_to_run(rules, can_replicate, (candidate, incumbent), runs)

    def settle(self, mask: Bools, keep: Bools) -> Ints:
        """The campaigns of `mask` take their verdict; 0: none goes back to an earlier incumbent."""
        c = self.c
        kept = mask & keep
        c.take(kept, a=c.b, va=c.vb, incumbent_runs=c.candidate_runs, incumbent_sum=c.candidate_sum)
        c.take(kept, collapses=np.zeros_like(c.a))
        return np.zeros(len(mask), dtype=np.int64)

    @property
    def delta(self) -> Floats:
        """Posterior mean of candidate minus incumbent."""
        return self.c.b - self.c.a

    @property
    def p_better(self) -> Floats:
        """Posterior probability that the candidate is better."""
        c = self.c
        sd = np.sqrt(np.maximum(c.va + c.vb - 2 * c.cov, 0.0))
        return cdf(self.delta / np.where(sd > 0, sd, 1e-12))

    @property
    def reported(self) -> Floats:
        """What the campaign says of its incumbent."""
        return self.c.a

    def _replicate(self, mask: Bools, y: Floats, num_runs: Floats, total: Floats) -> None:
        count = np.maximum(num_runs, 1)
        deviation = y - total / count
        self.c.take(mask, squares=self.c.squares + deviation**2 * count / (count + 1), df=self.c.df + 1)


def expected_gain(g: Floats, distance: Floats) -> Floats:
    """K(g): what one more run is worth."""
    u = np.minimum(distance / np.maximum(g, 1e-12), 38.0)  # beyond, the density is 0 in double precision
    return np.where(g > 0, g * (pdf(u) - u * cdf(-u)), 0.0)


def side_to_run(
    rules: DecisionRules, can_replicate: Bools, values: tuple[Floats, Floats], num_runs: tuple[Floats, Floats]
) -> Ints:
    """Whose run is worth most and more than its price; candidate, then incumbent."""
    candidate, incumbent = (
        np.where(runs < rules.max_runs_per_config, value, -1.0) for value, runs in zip(values, num_runs, strict=True)
    )
    wanted = can_replicate & (np.maximum(candidate, incumbent) > rules.run_value)
    return np.where(wanted, np.where(candidate >= incumbent, CANDIDATE, INCUMBENT), NOBODY)

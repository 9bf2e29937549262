"""nightshift/campaign/decision.py for many campaigns at once: the same formulas on arrays, one element a campaign.

The belief is a joint Gaussian over the candidate and the last `memory` incumbents (decision.py forgets none).

Every run of a child informs what is believed of its parents. So a keep is not final: after each experiment
the incumbent is the remembered config with the highest posterior mean, and a doubtful keep is tested by the
children that are tried on it, at no cost. Nothing is ever run twice but the baseline.

It needs two numbers of a run, its mean score and e2, the pairing variance that decision.py would take from
the run's per-example scores. tests/unit/test_decision_rules_benchmark.py holds it to decision.py at 1e-9.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vectorised_rule import Bools, Floats, Ints, cdf, expected_gain, side_to_run

from nightshift.campaign.decision import _CALIBRATION, _NORMAL
from nightshift.campaign.noise import INITIAL_CORRELATION_LOSS, SMOOTHING
from nightshift.records import DecisionRules

# (share, mean, sd) in units of prior_sd.
Components = Sequence[tuple[float, float, float]]

_quantile = np.frompyfunc(_NORMAL.inv_cdf, 1, 1)


class RememberingRule:
    """The rule under given constants. Index 0 is the incumbent, `memory` the candidate, between them the past."""

    def __init__(self, rules: DecisionRules, memory: int = 8, components: Components | None = None) -> None:
        self.rules, self.memory = rules, memory
        share, mean, sd = (np.array(column) for column in zip(*(components or rules.ideas), strict=True))
        self.share, self.shift, self.spread = share / share.sum(), mean * rules.prior_sd, (sd * rules.prior_sd) ** 2
        self.mean: Floats
        self.cov: Floats
        self._p_better: Floats

    def begin(self, scores: Floats, num_examples: int) -> None:
        """Baselines: `scores[i, r]` is the r-th baseline run of campaign i."""
        size, num_runs = scores.shape
        first = scores.mean(axis=1)
        self.squares = ((scores - first[:, None]) ** 2).sum(axis=1)
        self.df = np.full(size, num_runs - 1.0)
        self.e2 = INITIAL_CORRELATION_LOSS * first * (1 - first) / num_examples
        shape = (size, self.memory + 1)
        self.mean, self.cov = np.full(shape, -np.inf), np.zeros((*shape, self.memory + 1))
        self.num_runs, self.total = np.zeros(shape), np.zeros(shape)
        self.mean[:, 0], self.num_runs[:, 0], self.total[:, 0] = first, num_runs, scores.sum(axis=1)
        self.cov[:, 0, 0] = self.run_variance() / num_runs
        self.collapses = np.zeros(size)
        self._p_better = np.full(size, np.nan)

    def run_variance(self) -> Floats:
        """s2, as in decision.py."""
        prior = self.rules.seed_df * (self.rules.seed_sd**2 + self.e2)
        return np.maximum((prior + self.squares) / (self.rules.seed_df + self.df), self.e2)

    def compare(self) -> None:
        """A new candidate in every campaign; its place is filled by its first run."""
        self.num_runs[:, -1] = self.total[:, -1] = 0

    def observe_candidate(self, mask: Bools, y: Floats, e2: Floats) -> None:
        """One run of the candidate in the campaigns of `mask`."""
        self.e2 = np.where(mask, SMOOTHING * self.e2 + (1 - SMOOTHING) * e2, self.e2)
        first = mask & (self.num_runs[:, -1] == 0)
        self._count(mask, -1, y)
        if first.any():
            self._meet(first, y)
        if (mask & ~first).any():
            self._update(mask & ~first, self.memory, y)

    def observe_incumbent(self, mask: Bools, y: Floats) -> None:
        """One run of the incumbent in the campaigns of `mask`."""
        surprise = y - self.mean[:, 0]
        limit = -self.rules.gate * np.sqrt(self.cov[:, 0, 0] + self.run_variance())
        aside = mask & (surprise < limit) & (self.collapses == 0)
        self.collapses = self.collapses + aside
        self._count(mask & ~aside, 0, y)
        self._update(mask & ~aside, 0, y)

    def decide(self, can_replicate: Bools) -> tuple[Bools, Ints]:
        """(keep, whose run comes next) of every campaign."""
        rules, s2, end = self.rules, self.run_variance(), self.memory
        va, vb, cov = self.cov[:, 0, 0], self.cov[:, end, end], self.cov[:, 0, end]
        distance = np.abs(self.delta - rules.threshold)
        candidate = expected_gain(np.abs(vb - cov) / np.sqrt(vb + s2), distance)
        incumbent = expected_gain(np.abs(va - cov) / np.sqrt(va + s2), distance)
        runs = (self.num_runs[:, end], self.num_runs[:, 0])
        keep = (self.delta > rules.threshold) & (self.mean[:, -1] >= self.mean.max(axis=1))
        return keep, side_to_run(rules, can_replicate, (candidate, incumbent), runs)

    def settle(self, mask: Bools, keep: Bools) -> Ints:
        """The campaigns of `mask` take their verdict; returns which remembered config (0: the present one) is best."""
        kept = np.nonzero(mask & keep)[0]
        self._reorder(kept, np.r_[self.memory, 0 : self.memory][None, :].repeat(len(kept), axis=0))
        means = self.mean[:, :-1].copy()
        means[:, 0] += self.rules.take_back
        best = np.where(mask, means.argmax(axis=1), 0)
        back = np.nonzero(best)[0]
        order = to_front(best[back], self.memory)
        self._reorder(back, np.c_[order, np.full(len(back), self.memory)])
        self.collapses = np.where(mask & (keep | (best > 0)), 0, self.collapses)
        return best

    @property
    def delta(self) -> Floats:
        """Posterior mean of candidate minus incumbent; 0 before the candidate's first run."""
        return np.where(self.num_runs[:, -1] > 0, self.mean[:, -1], self.mean[:, 0]) - self.mean[:, 0]

    @property
    def p_better(self) -> Floats:
        """Posterior probability that the candidate is better, calibrated."""
        p = np.clip(np.nan_to_num(self._p_better, nan=0.5), 1e-15, 1 - 1e-15)
        return cdf(_CALIBRATION * _quantile(p).astype(np.float64))

    @property
    def reported(self) -> Floats:
        """What the campaign says of its incumbent."""
        return self.mean[:, 0]

    def _meet(self, mask: Bools, y: Floats) -> None:
        """The first run of a candidate: condition every component on it, then match two moments."""
        end = self.memory
        with_parent = self.cov[:, :end, 0]  # of every remembered config with the candidate's parent
        innovation = with_parent[:, :1] + self.spread + self.run_variance()[:, None]
        surprise = y[:, None] - self.mean[:, :1] - self.shift
        log = np.log(self.share) - 0.5 * np.log(innovation) - 0.5 * surprise**2 / innovation
        weight = np.exp(log - log.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        pull = surprise / innovation
        effect, effect_variance = self.shift + self.spread * pull, self.spread - self.spread**2 / innovation
        mean_pull, mean_effect = (weight * pull).sum(axis=1), (weight * effect).sum(axis=1)
        curvature = (weight * (pull**2 - 1 / innovation)).sum(axis=1) - mean_pull**2
        joint = (weight * (pull * effect - self.spread / innovation)).sum(axis=1) - mean_pull * mean_effect
        total_effect = (weight * (effect_variance + effect**2)).sum(axis=1) - mean_effect**2
        mean, cov = self.mean.copy(), self.cov.copy()
        mean[:, :end] = np.where(np.isfinite(mean[:, :end]), mean[:, :end] + with_parent * mean_pull[:, None], -np.inf)
        mean[:, end] = mean[:, 0] + mean_effect
        cov[:, :end, :end] += with_parent[:, :, None] * with_parent[:, None, :] * curvature[:, None, None]
        cov[:, :end, end] = cov[:, end, :end] = cov[:, :end, 0] + with_parent * joint[:, None]
        cov[:, end, end] = cov[:, 0, 0] + 2 * with_parent[:, 0] * joint + total_effect
        self.mean = np.where(mask[:, None], mean, self.mean)
        self.cov = np.where(mask[:, None, None], cov, self.cov)
        chance = (weight * cdf(effect / np.sqrt(np.maximum(effect_variance, 1e-18)))).sum(axis=1)
        self._p_better = np.where(mask, chance, self._p_better)

    def _update(self, mask: Bools, index: int, y: Floats) -> None:
        """One more run of config `index`: the Kalman update of all."""
        column = self.cov[:, :, index]
        gain = column / (column[:, index] + self.run_variance())[:, None]
        mean = self.mean + gain * np.where(np.isfinite(self.mean[:, index]), y - self.mean[:, index], 0)[:, None]
        cov = self.cov - gain[:, :, None] * column[:, None, :]
        self.mean = np.where(mask[:, None], mean, self.mean)
        self.cov = np.where(mask[:, None, None], cov, self.cov)
        sd = np.sqrt(np.maximum(self.cov[:, 0, 0] + self.cov[:, -1, -1] - 2 * self.cov[:, 0, -1], 1e-18))
        self._p_better = np.where(mask, cdf(np.where(mask, self.delta, 0.0) / sd), self._p_better)

    def _count(self, mask: Bools, index: int, y: Floats) -> None:
        """Pool a repeated run into the run variance (Welford)."""
        num_runs, total = self.num_runs[:, index], self.total[:, index]
        repeated, count = mask & (num_runs > 0), np.maximum(num_runs, 1)
        deviation = y - total / count
        self.squares = np.where(repeated, self.squares + deviation**2 * count / (count + 1), self.squares)
        self.df = self.df + repeated
        self.total[:, index] = np.where(mask, total + y, total)
        self.num_runs[:, index] = num_runs + mask

    def _reorder(self, which: Ints, order: Ints) -> None:
        rows = which[:, None]
        for name in ("mean", "num_runs", "total"):
            values = getattr(self, name)
            values[which] = values[rows, order]
        self.cov[which] = self.cov[which[:, None, None], order[:, :, None], order[:, None, :]]


def to_front(index: Ints, length: int) -> Ints:
    """For each index the order that puts it first and leaves the others as they are."""
    place = np.arange(length)[None, :]
    first = index[:, None]
    order: Ints = np.where(place == 0, first, np.where(place <= first, place - 1, place))
    return order

"""How much runs of one config differ, and how much of that the shared examples explain: learnt as a campaign goes on.

Source: docs/decision-rule.md, section 7. Notation: s2 = variance of one run's score around its config's true
score; e2 = its part from the finite example set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nightshift.rules import DecisionRules

Scores = Sequence[float]  # one score an example, in the order of the selection set
INITIAL_CORRELATION_LOSS = 0.4  # 1 - 0.60: start of e2 before any pair was seen (section 7 step 1)
SMOOTHING = 0.9


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

    def with_pair(self, scores: Scores, incumbent_runs: Sequence[Scores]) -> RunNoise:
        """e2 from the spread of per-example differences, smoothed (section 7 step 1)."""
        k = len(incumbent_runs)
        difference = np.asarray(scores) - mean_vector(incumbent_runs)
        n = len(difference)
        observed = float(difference.var(ddof=1)) / (n * (1 + 1 / k)) if n > 1 else 0.0
        if self.pairing_variance is None:
            return replace(self, pairing_variance=observed)
        return replace(self, pairing_variance=SMOOTHING * self.pairing_variance + (1 - SMOOTHING) * observed)


def mean_score(scores: Scores) -> float:
    """Of one run."""
    return float(np.mean(scores))


def mean_vector(runs: Sequence[Scores]) -> NDArray[np.float64]:
    """Of runs on the same examples: one mean an example."""
    vector: NDArray[np.float64] = np.asarray(runs, dtype=np.float64).mean(axis=0)
    return vector

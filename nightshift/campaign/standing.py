"""What is believed of incumbent and baseline between two experiments, as people are told it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nightshift.campaign.belief import Array, Belief
from nightshift.decision_rules import DecisionRules

Z95 = 1.959964  # half-width of a 95 % interval in standard deviations


@dataclass(frozen=True, slots=True)
class Standing:
    """What is believed of incumbent and baseline between two experiments.

    Scores are fractions 0..1, posterior means; the `_sd` are posterior standard deviations. The difference is
    what is reported of it (reported_gain). `run_sd` is that of one run's score around its config's true score:
    seeds and examples.
    """

    incumbent: float
    baseline: float
    incumbent_sd: float
    difference_sd: float
    run_sd: float

    @property
    def difference(self) -> float:
        """Incumbent minus baseline, both posterior means."""
        return self.incumbent - self.baseline

    @property
    def difference_interval(self) -> tuple[float, float]:
        """95 % of the difference."""
        half = Z95 * self.difference_sd
        return self.difference - half, self.difference + half


def reported_gain(belief: Belief, rules: DecisionRules) -> tuple[Array, Array]:
    """What people are told of the incumbent's gain on the baseline, see `shrinkage` of DecisionRules: mean and standard
    deviation, (...) both. No gain becomes a loss by that."""
    mean, sd = belief.difference(belief.incumbent, 0)
    less, share = rules.shrinkage
    return np.maximum(mean - less * sd, np.minimum(mean, 0.0)), share * sd


def standing_of(belief: Belief, rules: DecisionRules) -> Standing:
    """Of a campaign's belief under the constants of its incumbent."""
    gain, gain_sd = reported_gain(belief, rules)
    baseline = float(belief.expected[0])
    return Standing(
        incumbent=baseline + float(gain),
        baseline=baseline,
        incumbent_sd=float(belief.sd),
        difference_sd=float(gain_sd),
        run_sd=math.sqrt((belief.weights * belief.run_variance(rules)).sum()),
    )

"""How often does the page's 95 % interval of the total gain hold the truth? Simulated campaigns.

    uv run benchmarks/posterior_interval.py --campaigns 750

The world is the default one of simulated_nights.py, without its interaction of configs and
examples: 1,319 examples, ideas that help, are neutral or harm, 40 experiments after the baseline.
nightshift/campaign/decision.py decides on the scores of every example, as in a real campaign.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import click
import numpy as np
from simulated_nights import Bools, Floats, Ints

from nightshift.campaign import decision
from nightshift.config.decision_rules import DecisionRules

RULES = DecisionRules()
NUM_EXAMPLES, NUM_EXPERIMENTS = 1319, 40
START, SEED_SD = 0.475, 0.0125
SHARED = 0.62  # of an answer's latent variance: the example's difficulty, the same in every run

_quantile = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])


class Campaigns:
    """Campaigns in step, on one score an example: the belief, and what the kept configs answered."""

    def __init__(self, first: Floats, rules: DecisionRules) -> None:
        """Baselines: `first` (campaigns, examples), answers 0 or 1."""
        self.rules, (size, num_examples) = rules, first.shape
        self.belief = decision.baseline(first.mean(axis=1), num_examples, rules)
        self.rows, self.num_kept = np.arange(size), np.ones(size, int)
        self.right = first.astype(np.uint8)[:, None]  # (campaigns, configs, examples)

    @property
    def incumbent(self) -> Ints:
        """(campaigns) which of the kept configs it is."""
        return np.asarray(self.belief.incumbent)

    def test(self, scores: Floats) -> Bools:
        """One child of every incumbent, `scores` (campaigns, examples): is it kept?"""
        e2 = decision.pairing(scores, self.right[self.rows, self.incumbent])
        tested = decision.observe(self.belief, self.incumbent, scores.mean(axis=1), e2, self.rules)
        keep = np.asarray(tested.keep)
        self.belief = decision.settle(tested, keep, self.rules)
        if self.belief.sets.shape[-2] > self.right.shape[1]:
            self.right = np.pad(self.right, ((0, 0), (0, 1), (0, 0)))
        self.right[keep, self.num_kept[keep]] = scores[keep]
        self.num_kept += keep
        return keep


def effects(rng: np.random.Generator, size: int) -> Floats:
    """The true differences of ideas, as fractions."""
    kind = rng.random(size)
    help_ = np.minimum(0.2 + rng.exponential(0.6, size), 2.0)
    harm = np.where(rng.random(size) < 0.1, rng.uniform(5, 20, size), rng.exponential(1.5, size))
    return np.where(kind < 0.27, help_, np.where(kind < 0.60, rng.normal(0, 0.15, size), -harm)) / 100


def answers(rng: np.random.Generator, difficulty: Floats, truth: Floats) -> Floats:
    """One run of a config of each campaign: 0 or 1 for each of its examples, of the shape of `difficulty`."""
    share = np.clip(truth + rng.normal(0, SEED_SD, len(truth)), 0.02, 0.98)
    latent = math.sqrt(SHARED) * difficulty + math.sqrt(1 - SHARED) * rng.standard_normal(difficulty.shape)
    return (latent > _quantile(1 - share)[:, None]).astype(float)


def play(size: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """(true gain, believed gain, its standard deviation) of each campaign in which the last incumbent is a keep."""
    difficulty = rng.standard_normal((size, NUM_EXAMPLES))
    truths = np.full((size, NUM_EXPERIMENTS + 1), START)  # of the configs that were kept
    campaigns = Campaigns(answers(rng, difficulty, truths[:, 0]), RULES)
    for _ in range(NUM_EXPERIMENTS):
        candidate = truths[campaigns.rows, campaigns.incumbent] + effects(rng, size)
        where = campaigns.rows, campaigns.num_kept.copy()
        truths[where] = np.where(campaigns.test(answers(rng, difficulty, candidate)), candidate, truths[where])
    belief, best = campaigns.belief, campaigns.incumbent
    believed, sd = belief.difference(best, 0)
    gain = truths[campaigns.rows, best] - START
    moved = sd > 0
    return gain[moved], believed[moved], sd[moved]


@click.command(help=__doc__)
@click.option("--campaigns", default=750, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(campaigns: int, seed: int) -> None:
    """Print the share of campaigns whose interval holds the truth."""
    true, believed, sd = play(campaigns, np.random.default_rng(seed))
    share = float(np.mean(np.abs(believed - true) < 1.96 * sd))
    print(f"campaigns with a keep:  {len(true)} of {campaigns}")
    print(f"true gain, mean:        {100 * true.mean():+.2f} pp")
    print(f"believed minus true:    {100 * (believed - true).mean():+.2f} pp on average")
    print(f"95 % interval holds it: {share:.1%} (standard error {math.sqrt(share * (1 - share) / len(true)):.1%})")


if __name__ == "__main__":
    main()

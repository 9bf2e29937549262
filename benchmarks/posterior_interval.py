"""How often does the page's 95 % interval of the total gain hold the truth? Simulated campaigns.

    uv run benchmarks/posterior_interval.py --campaigns 750

The world is the default one of docs/decision-rule.md, section 2, without its interaction of configs and
examples: 1,319 examples, ideas that help, are neutral or harm, 40 experiments after the baseline, at most
3 runs each. decision.py decides and nightshift/campaign/posterior.py follows, as in a real campaign.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import click
import numpy as np

from nightshift.campaign import decision
from nightshift.campaign.posterior import follow
from nightshift.records import Evaluation, Judgement, Outcome, Record, Run, Side, Training, Verdict, Weights
from nightshift.records import DecisionRules

RULES = DecisionRules()
NUM_EXAMPLES, NUM_EXPERIMENTS, MAX_RUNS = 1319, 40, 3
START, SEED_SD = 0.475, 0.0125
SHARED = 0.62  # of an answer's latent variance: the example's difficulty, the same in every run


def effect(rng: np.random.Generator) -> float:
    """The true difference of one idea, a fraction."""
    kind = rng.random()
    if kind < 0.27:
        return min(0.2 + rng.exponential(0.6), 2.0) / 100
    if kind < 0.60:
        return float(rng.normal(0, 0.15)) / 100
    return float(-rng.uniform(5, 20) if rng.random() < 0.1 else -rng.exponential(1.5)) / 100


def campaign(rng: np.random.Generator) -> tuple[float, float, float] | None:
    """(true gain, believed gain, its standard deviation) of one campaign; None if nothing was kept."""
    difficulty = rng.standard_normal(NUM_EXAMPLES)

    def scores(truth: float) -> tuple[float, ...]:
        share = min(max(truth + rng.normal(0, SEED_SD), 0.02), 0.98)
        latent = math.sqrt(SHARED) * difficulty + math.sqrt(1 - SHARED) * rng.standard_normal(NUM_EXAMPLES)
        return tuple((latent > NormalDist().inv_cdf(1 - share)).astype(float).tolist())

    truths = [START]  # of the configs that were kept; the belief says which one is the incumbent
    first = [(Side.CANDIDATE, scores(START)) for _ in range(RULES.baseline_runs)]
    kept = [1]  # their experiments
    belief = decision.baseline([s for _, s in first], RULES)
    records = [record(1, first, Judgement(Verdict.KEEP, "baseline", incumbent_score=belief.mean))]
    for number in range(2, NUM_EXPERIMENTS + 2):
        truth = truths[belief.incumbent]
        candidate = truth + effect(rng)
        comparison, runs = decision.compare(belief, RULES), []
        side: Side | None = Side.CANDIDATE
        while side is not None:
            runs.append((side, scores(candidate if side is Side.CANDIDATE else truth)))
            comparison = decision.observe(comparison, *runs[-1], RULES)
            choice = decision.decide(comparison, RULES, can_replicate=len(runs) < MAX_RUNS)
            side = choice.replicate
        judgement = decision.judge(comparison, choice)
        records.append(record(number, runs, decision.taken_back(judgement, comparison, RULES, kept)))
        belief = decision.settle(comparison, choice.keep, RULES)
        if choice.keep:
            truths.append(candidate)
            kept.append(number)
    standing = follow(records, RULES)[records[-1].number]
    assert standing.difference_sd is not None
    truth = truths[belief.incumbent]
    return (truth - START, standing.difference, standing.difference_sd) if standing.difference_sd > 0 else None


def record(number: int, runs: list[tuple[Side, tuple[float, ...]]], judgement: Judgement) -> Record:
    """A record that holds nothing but its runs' scores and its verdict."""
    made = tuple(
        Run(i, side, i, Training(Outcome.BUDGET, 1), evaluation(run_scores), None, 0.0)
        for i, (side, run_scores) in enumerate(runs, 1)
    )
    empty = Record(number, "", "", None, "", "", "", "", "", "", "", (), (), None, {}, "")
    return replace(empty, status=str(judgement.verdict), runs=made, judgement=judgement)


def evaluation(scores: tuple[float, ...]) -> Evaluation:
    """An evaluation that holds nothing but its scores."""
    return Evaluation(sum(scores) / len(scores), 0.0, scores, "", 0.0, 0.0, Weights(0, ""), 0.0)


@click.command(help=__doc__)
@click.option("--campaigns", default=750, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(campaigns: int, seed: int) -> None:
    """Print the share of campaigns whose interval holds the truth."""
    rng = np.random.default_rng(seed)
    found = np.array([one for _ in range(campaigns) if (one := campaign(rng)) is not None])
    true, believed, sd = found.T
    share = float(np.mean(np.abs(believed - true) < 1.96 * sd))
    print(f"campaigns with a keep:  {len(found)} of {campaigns}")
    print(f"true gain, mean:        {100 * true.mean():+.2f} pp")
    print(f"believed minus true:    {100 * (believed - true).mean():+.2f} pp on average")
    print(f"95 % interval holds it: {share:.1%} (standard error {math.sqrt(share * (1 - share) / len(found)):.1%})")


if __name__ == "__main__":
    main()

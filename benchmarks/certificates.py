"""How often a certificate says "better" of two equal configs, and how often its interval holds: simulated certificates.

    uv run benchmarks/certificates.py                  2,000 campaigns a case, about five minutes

A campaign has its test examples and asks up to five times, each time with fresh seeds, about two configs that are
equally good. Scores are 0 or 1 by a latent normal model: difficulty of an example, what a config makes of it, the seed,
noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from machine import RESULTS, machine, table, write_result

from nightshift.config.rules import RuleConstants
from nightshift.experiment.certify import estimate, level_of_access, verdict

NUM_ACCESSES = 5
SLOPE = 0.39894  # of the score in the latent shift, at a score of one half


@dataclass(frozen=True, slots=True)
class Case:
    """Runs of each side, examples, sd of seeds (a score), latent correlation of an example's answers within a config
    and between configs."""

    name: str
    num_runs: int
    num_examples: int
    seed_sd: float
    within: float
    between: float


CASES = (
    Case("as the rules believe", 3, 1319, 0.0125, 0.85, 0.80),
    Case("no noise of seeds", 3, 1319, 0.0, 0.85, 0.80),
    Case("noisy seeds, unlike configs", 3, 1000, 0.03, 0.85, 0.50),
    Case("five runs", 5, 1000, 0.02, 0.85, 0.80),
    Case("two runs", 2, 1319, 0.0125, 0.85, 0.80),
    Case("two runs, noisy seeds, unlike configs", 2, 1000, 0.03, 0.85, 0.50),
    Case("two runs, no noise of seeds", 2, 1000, 0.0, 0.85, 0.50),
)


def campaign(case: Case, rng: np.random.Generator, gain: float = 0.0) -> list[tuple[bool, bool]]:
    """For each use: whether the verdict is "better", and whether the interval contains 0. `gain`: of the incumbent."""
    difficulty = rng.standard_normal((1, case.num_examples))
    own = [rng.standard_normal((1, case.num_examples)) for _ in range(2)]
    answers = []
    for access in range(1, NUM_ACCESSES + 1):
        sides = []
        for config, shift in zip(own, (0.0, gain / SLOPE), strict=True):
            seeds = rng.standard_normal((case.num_runs, 1)) * case.seed_sd / SLOPE
            noise = rng.standard_normal((case.num_runs, case.num_examples))
            of_example = math.sqrt(case.between) * difficulty + math.sqrt(case.within - case.between) * config
            sides.append((of_example + math.sqrt(1 - case.within) * noise + seeds + shift > 0).astype(float))
        result = estimate(sides[0], sides[1], RuleConstants())
        low, high = result.interval
        answers.append((verdict(result, level_of_access(access)) == "better", low <= 0 <= high))
    return answers


def simulate(case: Case, num_campaigns: int, seed: int) -> dict[str, Any]:
    """Shares over campaigns: "better" said by one of the first k accesses; the interval holds at the first."""
    rng = np.random.default_rng(seed)
    answers = np.array([campaign(case, rng) for _ in range(num_campaigns)])
    said = np.logical_or.accumulate(answers[:, :, 0], axis=1).mean(axis=0)
    return {
        "name": case.name,
        "runs": case.num_runs,
        "seed_sd": case.seed_sd,
        "campaigns": num_campaigns,
        "better_within": [float(share) for share in said],
        "covered": float(answers[:, 0, 1].mean()),
    }


def power(num_runs: int, gain: float, num_campaigns: int, seed: int) -> dict[str, float]:
    """Return the share of campaigns whose first certificate finds a true gain, with the noise that the rules assume."""
    rng, case = np.random.default_rng(seed), replace(CASES[0], num_runs=num_runs)
    num_better = sum(campaign(case, rng, gain)[0][0] for _ in range(num_campaigns))
    return {"runs": num_runs, "gain": gain, "better": num_better / num_campaigns}


@click.command(help=__doc__)
@click.option("--campaigns", default=2000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "certificates.json")
def main(campaigns: int, seed: int, output: Path) -> None:
    """Simulate, print, write."""
    rows = []
    for case in CASES:
        rows.append(simulate(case, campaigns, seed))
        click.echo(f"{case.name}: done", err=True)
    command = f"uv run benchmarks/certificates.py --campaigns {campaigns} --seed {seed}"
    powers = [power(runs, gain, campaigns, seed) for runs in (3, 5) for gain in (0.035, 0.05)]
    write_result(output, command, {"rows": rows, "power": powers}, machine())
    shown = [row | {"one": row["better_within"][0], "five": row["better_within"][-1]} for row in rows]
    click.echo(
        table(
            shown, {"name": "<38", "runs": ">5", "seed_sd": ">8", "one": ">7.3f", "five": ">7.3f", "covered": ">8.3f"}
        )
    )


if __name__ == "__main__":
    main()

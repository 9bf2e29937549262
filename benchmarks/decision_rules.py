"""What the decision rule gains over others: simulated nights, at equal wall-clock time.

    uv run benchmarks/decision_rules.py

Our rule is nightshift/campaign/decision.py with the constants of rules.py, on arrays (remembering_rule.py). Compared:
the seed's rule (200 examples, keep what scores above the best so far), the same on 1,319 examples, fixed z
thresholds, always two seeds; the rule before take-backs (vectorised_rule.py), without replicates, stricter and
more hopeful; ours with replicates, early stopping, fewer kinds of ideas, and without memory. Prints the
tables and writes results/decision_rules.json. Nothing here was measured on real training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from machine import RESULTS, machine, write_result
from remembering_rule import RememberingRule
from simulated_nights import Night, Player, World, simulate
from vectorised_rule import CANDIDATE, NOBODY, Bools, Floats, FormerRules, Ints, Rule

from nightshift.records import DecisionRules

RULES, FORMER = DecisionRules(), FormerRules()
MEMORY = 12  # more changes nothing: a night keeps about fifteen and goes back one or two
ORDINARY_OR_WILD = ((0.95, 0.0, 1.0), (0.05, -4.0, 10.0))
DEFAULT = World()
WORLDS = {
    "default": DEFAULT,
    "seed sd 0.5": replace(DEFAULT, seed_sd=0.005),
    "seed sd 1": replace(DEFAULT, seed_sd=0.010),
    "seed sd 1.5": replace(DEFAULT, seed_sd=0.015),
    "seed sd 2": replace(DEFAULT, seed_sd=0.020),
    "helpful 10%": DEFAULT.with_helpful(0.10),
    "helpful 20%": DEFAULT.with_helpful(0.20),
    "helpful 35%": DEFAULT.with_helpful(0.35),
    "helpful 50%": DEFAULT.with_helpful(0.50),
    "hard": replace(DEFAULT, helpful=0.12, neutral=0.20, mean_harm=0.025),
    "small": replace(DEFAULT, least_help=0.001, mean_help=0.003, most_help=0.010),
    "big": replace(DEFAULT, mean_help=0.012, most_help=0.040),
    "decay": replace(DEFAULT, decay=0.025),
    "collapse": replace(DEFAULT, collapses=0.04),
    "4.5 h": replace(DEFAULT, hours=4.5),
    "18 h": replace(DEFAULT, hours=18.0),
    "helpful 0%": DEFAULT.with_helpful(0.0),
}
LEAST_GAIN = 0.005  # a world whose best rule gains less is not worth a share of the best
WORSE = -0.002  # a keep that matters


class AboveBest:
    """Keep what scores above the best so far: by `z` standard errors, on the mean of `num_seeds` runs."""

    def __init__(self, num_seeds: int = 1, z: float = 0.0) -> None:
        self.num_seeds, self.z = num_seeds, z

    def begin(self, scores: Floats, num_examples: int) -> None:
        """The baseline's mean is the first best."""
        self.best, self.best_runs = scores.mean(axis=1), np.full(len(scores), float(scores.shape[1]))
        self.e2 = np.zeros(len(scores))

    def compare(self) -> None:
        """A new candidate."""
        self.total, self.num_runs = np.zeros_like(self.best), np.zeros_like(self.best)

    def observe_candidate(self, mask: Bools, y: Floats, e2: Floats) -> None:
        """One run of it."""
        self.total, self.num_runs, self.e2 = np.where(mask, self.total + y, self.total), self.num_runs + mask, e2

    def observe_incumbent(self, mask: Bools, y: Floats) -> None:
        """Never asked for."""

    def decide(self, can_replicate: Bools) -> tuple[Bools, Ints]:
        """(keep, whose run comes next)."""
        runs = np.maximum(self.num_runs, 1)
        stderr = np.sqrt((RULES.seed_sd**2 + self.e2) * (1 / runs + 1 / self.best_runs))
        side = np.where(can_replicate & (self.num_runs < self.num_seeds), CANDIDATE, NOBODY)
        return self.total / runs - self.best > self.z * stderr, side

    def settle(self, mask: Bools, keep: Bools) -> Ints:
        """The kept candidate's mean is the new best."""
        kept = mask & keep
        self.best = np.where(kept, self.total / np.maximum(self.num_runs, 1), self.best)
        self.best_runs = np.where(kept, self.num_runs, self.best_runs)
        return np.zeros(len(mask), dtype=np.int64)

    @property
    def reported(self) -> Floats:
        """The best score, luck included."""
        return self.best

    @property
    def p_better(self) -> Floats:
        """It has none."""
        return np.full(len(self.best), np.nan)


def players() -> dict[str, Player]:
    """The rules, by what the table calls them."""
    return {
        "keep above best, n=200": Player(AboveBest(), 200, 1, 1),
        "keep above best, n=1319": Player(AboveBest(), baseline_runs=1, max_runs=1),
        "z > 0.5": Player(AboveBest(z=0.5), baseline_runs=1, max_runs=1),
        "z > 1.28": Player(AboveBest(z=1.28), baseline_runs=1, max_runs=1),
        "z > 1.645": Player(AboveBest(z=1.645), baseline_runs=1, max_runs=1),
        "always two seeds": Player(AboveBest(2), max_runs=2),
        "before": Player(Rule(FORMER)),
        "before, no replicates": Player(Rule(FORMER), max_runs=1),
        "before, stricter": Player(Rule(replace(FORMER, threshold=0.0015))),
        "before, more hopeful": Player(Rule(replace(FORMER, prior_mean=-0.002))),
        "ours": Player(RememberingRule(RULES, MEMORY)),
        "ours, early stop": Player(RememberingRule(RULES, MEMORY), early_stop=-0.03),
        "ours, replicates": Player(RememberingRule(replace(RULES, run_value=0.0010), MEMORY)),
        "ours, 2 kinds of ideas": Player(RememberingRule(RULES, MEMORY, ORDINARY_OR_WILD)),
        "ours, memory of one": Player(RememberingRule(RULES, 1)),
        "same, replicates": Player(RememberingRule(replace(RULES, run_value=0.0006), 1)),
    }


def figures(night: Night) -> dict[str, float]:
    """One row of the table: scores in percentage points, shares as fractions."""
    kept, better = night.kept, night.delta > -WORSE
    return {
        "gain": 100 * float(night.gain.mean()),
        "gain_stderr": 100 * float(night.gain.std(ddof=1)) / len(night.gain) ** 0.5,
        "p10": 100 * float(np.quantile(night.gain, 0.1)),
        "ends_worse": float((night.gain < 0).mean()),
        "kept_worse": float((night.delta[kept] < WORSE).mean()) if kept.any() else 0.0,
        "missed": float((~kept[better]).mean()) if better.any() else 0.0,
        "bias": 100 * float(night.bias.mean()),
        "ideas": night.ideas,
        "replicates": night.replicates,
        "taken_back": night.taken_back,
    }


def calibration(night: Night) -> list[dict[str, float]]:
    """What p_better said and how often the candidate was better, by tenth; tenths of fewer than 200 are left out."""
    said = ~np.isnan(night.p_better)
    p, better = night.p_better[said], night.delta[said] > 0
    tenths = np.minimum((10 * p).astype(int), 9)
    return [
        {
            "said": float(p[tenths == t].mean()),
            "was": float(better[tenths == t].mean()),
            "number": int(sum(tenths == t)),
        }
        for t in range(10)
        if sum(tenths == t) >= 200
    ]


def calibration_error(night: Night) -> float:
    """The largest difference between what p_better said and what was, over the tenths; NaN without any."""
    return max((abs(tenth["said"] - tenth["was"]) for tenth in calibration(night)), default=math.nan)


def shares_of_best(gains: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Each rule's gain as a share of the best rule's, in the worlds where that is worth having.

    Without early stopping: no engine gives the forecast that it needs.
    """
    gains = {rule: row for rule, row in gains.items() if not rule.endswith("early stop")}
    worlds = next(iter(gains.values())).keys()
    best = {world: max(row[world] for row in gains.values()) for world in worlds}
    return {
        rule: {world: row[world] / best[world] for world in worlds if best[world] > 100 * LEAST_GAIN}
        for rule, row in gains.items()
    }


def report(result: Mapping[str, Any]) -> str:
    """The tables for people."""
    columns = ("gain", "p10", "ends_worse", "kept_worse", "missed", "bias", "ideas", "replicates", "taken_back")
    lines = [f"{'default world':24}" + "".join(f"{column:>12}" for column in columns)]
    for rule, row in result["rules"].items():
        lines.append(f"{rule:24}" + "".join(f"{row[column]:12.2f}" for column in columns))
    worlds = list(next(iter(result["gains"].values())))
    tables = (
        ("true gain, pp", result["gains"], False),
        ("share of best", result["shares"], True),
        ("p_better is off by", result["calibration_error"], False),
    )
    for title, table, least in tables:
        names = [world for world in worlds if world in next(iter(table.values()))]
        head = "".join(f"{world.replace('seed ', '').replace('helpful', 'help'):>9}" for world in names)
        lines += ["", f"{title:24}{head}" + ("    least" if least else "")]
        for rule, row in table.items():
            cells = "".join(f"{row[world]:9.2f}" for world in names)
            lines.append(f"{rule:24}{cells}" + (f"{min(row.values()):9.2f}" if least else ""))
    lines += ["", "p_better in the default world: said -> was"]
    for rule, tenths in result["calibration"].items():
        lines.append(f"{rule:24}" + "  ".join(f"{t['said']:.2f} -> {t['was']:.2f}" for t in tenths))
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--campaigns", default=2000, show_default=True, help="Simulated nights a rule and world.")
@click.option("--seed", default=101, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "decision_rules.json")
def main(campaigns: int, seed: int, output: Path) -> None:
    """Simulate, print, write."""
    kind, began = machine(), time.monotonic()
    nights = {}
    for name, player in players().items():
        click.echo(f"{name} ({time.monotonic() - began:.0f} s)", err=True)
        nights[name] = {world: simulate(player, WORLDS[world], campaigns, seed) for world in WORLDS}
    gains = {name: {world: 100 * float(n.gain.mean()) for world, n in row.items()} for name, row in nights.items()}
    default = {name: row["default"] for name, row in nights.items()}
    has_p = {name: night for name, night in default.items() if not np.isnan(night.p_better).all()}
    result = {
        "campaigns": campaigns,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "rules": {name: figures(night) for name, night in default.items()},
        "gains": gains,
        "shares": shares_of_best(gains),
        "calibration": {name: calibration(night) for name, night in has_p.items()},
        "calibration_error": {name: {w: calibration_error(nights[name][w]) for w in WORLDS} for name in has_p},
    }
    click.echo(report(result))
    command = f"uv run benchmarks/decision_rules.py --campaigns {campaigns} --seed {seed}"
    write_result(output, command, result, kind)


if __name__ == "__main__":
    main()

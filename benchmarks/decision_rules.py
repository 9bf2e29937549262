"""What the decision rule gains over others: simulated nights, at equal wall-clock time.

    uv run benchmarks/decision_rules.py

Ours is nightshift/campaign/decision.py itself with the constants of rules.py, its batch axis being the nights.
Compared: keep what scores above the best so far, on 200 and on 1,319 examples; ours when nothing is taken back, and
with fewer kinds of ideas; and an oracle that knows the truth. Prints the tables and writes
results/decision_rules.json. Nothing here was measured on real training.
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
from simulated_nights import Bools, Floats, Night, Player, ShippedRule, World, simulate

from nightshift.decision_rules import DecisionRules

RULES = DecisionRules()
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
WORSE = -0.002  # a keep that matters


class AboveBest:
    """Keep what scores above the best so far."""

    def begin(self, scores: Floats, num_examples: int) -> None:
        """The baseline's mean is the first best."""
        self.reported, self.incumbent = scores.mean(axis=1), np.zeros(len(scores), int)

    @property
    def gain(self) -> tuple[Floats, Floats]:
        """None is believed."""
        return self.reported * math.nan, self.reported * math.nan

    def test(self, active: Bools, score: Floats, e2: Floats, delta: Floats) -> tuple[Bools, Floats]:
        """A kept score is the new best, luck included."""
        keep = active & self.better(score, delta)
        self.reported, self.incumbent = np.where(keep, score, self.reported), self.incumbent + keep
        return keep, np.full(len(score), np.nan)

    def better(self, score: Floats, delta: Floats) -> Bools:
        """Which candidates are believed to be better."""
        return score > self.reported


class Oracle(AboveBest):
    """Keep what is truly better: what no rule can reach."""

    def better(self, score: Floats, delta: Floats) -> Bools:
        """The truth."""
        return delta > 0


def players() -> dict[str, Player]:
    """The rules, by what the table calls them."""
    return {
        "keep above best, n=200": Player(AboveBest(), 200, 1),
        "keep above best, n=1319": Player(AboveBest(), baseline_runs=1),
        "ours": Player(ShippedRule(RULES)),
        "ours, nothing taken back": Player(ShippedRule(replace(RULES, take_back=math.inf))),
        "ours, 2 kinds of ideas": Player(ShippedRule(replace(RULES, ideas=ORDINARY_OR_WILD))),
        "oracle": Player(Oracle()),
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


def report(result: Mapping[str, Any]) -> str:
    """The tables for people."""
    columns = ("gain", "p10", "ends_worse", "kept_worse", "missed", "bias", "ideas", "taken_back")
    lines = [f"{'default world':26}" + "".join(f"{column:>12}" for column in columns)]
    for rule, row in result["rules"].items():
        lines.append(f"{rule:26}" + "".join(f"{row[column]:12.2f}" for column in columns))
    worlds = list(next(iter(result["gains"].values())))
    head = "".join(f"{world.replace('seed ', '').replace('helpful', 'help'):>9}" for world in worlds)
    for title, name in (("true gain, pp", "gains"), ("p_better is off by", "calibration_error")):
        lines += ["", f"{title:26}{head}"]
        for rule, row in result[name].items():
            lines.append(f"{rule:26}" + "".join(f"{row[world]:9.2f}" for world in worlds))
    lines += ["", "p_better in the default world: said -> was"]
    for rule, tenths in result["calibration"].items():
        lines.append(f"{rule:26}" + "  ".join(f"{t['said']:.2f} -> {t['was']:.2f}" for t in tenths))
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
        "calibration": {name: calibration(night) for name, night in has_p.items()},
        "calibration_error": {name: {w: calibration_error(nights[name][w]) for w in WORLDS} for name in has_p},
    }
    click.echo(report(result))
    command = f"uv run benchmarks/decision_rules.py --campaigns {campaigns} --seed {seed}"
    write_result(output, command, result, kind)


if __name__ == "__main__":
    main()

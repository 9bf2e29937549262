"""What the proposals of recorded nights were like: how far they reach, whether they fit the budget, how sure plans are.

    uv run benchmarks/proposals.py RUNS ...        folders like runs/, with curves; each is one night

Of a proposal whose learning rate decays: the share of the budget that its steps took, on the budget's clock, and if its
decay had begun. Of every run: the steps that the throughput model foretold from the runs before it, against those
that its pace makes in the whole budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from machine import RESULTS, machine, write_result

from nightshift.agents.space import DECAY, DECAYING, KIND, STEPS
from nightshift.agents.throughput import Throughput
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import METRICS_NAME, Step, read_steps
from nightshift.campaign.records import Record
from nightshift.config.train_toml import Config, parse

ROOT = Path(__file__).parents[1]


def proposals(folder: Path, budget_seconds: float) -> Iterator[dict[str, Any]]:
    """A row a decided proposal of a night that left a curve."""
    ledger, before = Ledger(ROOT, folder), list[Any]()
    decided = [record for record in ledger.records() if record.decided is not None]
    for record in sorted(decided, key=lambda record: record.decided or 0):
        config = parse(ledger.source(record.number))
        if record.parent is not None and record.result and record.diff:
            yield from _row(ledger, record, config, Throughput.of(before, budget_seconds))
        before += [(config, record.result)] if record.result else []


def curve(ledger: Ledger, record: Record) -> list[Step]:
    """The steps of its run."""
    return read_steps(ledger.files_dir(record) / METRICS_NAME)


def _row(ledger: Ledger, record: Record, config: Config, throughput: Throughput) -> Iterator[dict[str, Any]]:
    run, steps = record.result, curve(ledger, record)
    assert run is not None
    if not steps or not steps[-1].time:
        return
    planned, kind = config.get(STEPS), config.get(KIND)
    pace, is_decaying = len(steps) / steps[-1].time, kind in DECAYING and planned is not None
    begins = 0 if kind == "cosine" else (planned or 0) - (config.get(DECAY) or 0)
    yield {
        "night": ledger.runs_dir.parent.name,
        "number": record.number,
        "keys": sum(not change.lstrip("+-").startswith(STEPS) for change in record.diff),
        "delta": record.decision.effect if record.decision else None,
        "planned": planned,
        "steps": run.training.num_steps,
        "used": min(steps[-1].time / throughput.budget_seconds, 1.0) if is_decaying else None,
        "is_cut": is_decaying and run.training.num_steps < begins,
        "log_error": math.log(pace * throughput.budget_seconds / throughput.plan(config.resolved).num_steps),
    }


def errors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the throughput model: relative, half of the runs are nearer than the median, nine of ten than the other."""
    sizes = [abs(math.expm1(row["log_error"])) for row in rows]
    if not sizes:
        return {"runs": 0, "median": None, "90 %": None}
    return {"runs": len(sizes), "median": float(np.median(sizes)), "90 %": float(np.quantile(sizes, 0.9))}


def used(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the budget, by decaying proposals."""
    shares = [row["used"] for row in rows if row["used"] is not None]
    quantiles = [float(np.quantile(shares, q)) for q in (0.5, 0.1)] if shares else [None, None]
    return {"decaying": len(shares), "used_median": quantiles[0], "used_10": quantiles[1]}


@click.command(help=__doc__)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--budget-seconds", default=60.0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "proposals.json")
def main(folders: tuple[Path, ...], budget_seconds: float, output: Path) -> None:
    """Read, print, write."""
    kind = machine()
    rows = [row for folder in folders for row in proposals(folder, budget_seconds)]
    known = [row["delta"] for row in rows if row["delta"] is not None]
    found = {
        "proposals": len(rows),
        "keys_mean": float(np.mean([row["keys"] for row in rows])),
        "keys_most": max(row["keys"] for row in rows),
        "far_worse": float(np.mean([delta < -0.10 for delta in known])),
        "decaying": sum(row["used"] is not None for row in rows) / len(rows),
        "cut_before_decay": sum(row["is_cut"] for row in rows),
        "schedules": used(rows),
        "throughput": errors(rows),
    }
    for name, value in found.items():
        click.echo(f"{name:20}{value}")
    write_result(output, "uv run benchmarks/proposals.py RUNS ...", {**found, "rows": rows}, kind)


if __name__ == "__main__":
    main()

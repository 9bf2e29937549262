"""How much of an experiment's wall-clock is training, on the trl engine.

\b
    uv run benchmarks/where_the_time_goes.py                         3 experiments of 60 s, 7 minutes
    uv run benchmarks/where_the_time_goes.py --runs 1 --budget-seconds 2

Whole processes of the real run.py in a clone of this checkout, on its default train.toml: a baseline, then experiments
that repeat it with new seeds, one run each. `harness` is all that head and worker take beside the trainer's start,
training and evaluation: their own starts too.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from machine import RESULTS, machine, table, write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nightshift.campaign.ledger import Ledger  # noqa: E402
from tests import checkouts  # noqa: E402

Row = dict[str, Any]


def measure_experiment(root: Path, budget_seconds: float, python: str = sys.executable) -> Row:
    """Seconds of one experiment by its phases, from the process's start to its exit."""
    command = [python, "run.py", "--engine", "trl", "--budget-seconds", str(budget_seconds), "--again"]
    began = time.monotonic()
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    wall_seconds = time.monotonic() - began
    run = Ledger(root).records()[-1].result
    if result.returncode != 0 or run is None or run.evaluation is None or run.training.training_seconds is None:
        sys.exit(f"run.py ended with {result.returncode}: {result.stderr}")
    assert run.startup_seconds is not None
    parts = {
        "start-up of the trainer": run.startup_seconds,
        "training": run.training.training_seconds,
        "evaluation": run.evaluation.seconds,
    }
    return {**parts, "harness": wall_seconds - sum(parts.values()), "all": wall_seconds}


def summarize(experiments: Sequence[Row]) -> Row:
    """Medians, and shares of the whole."""
    medians = {name: statistics.median(row[name] for row in experiments) for name in experiments[0]}
    shares = {name: seconds / medians["all"] for name, seconds in medians.items() if name != "all"}
    return {"seconds": medians, "shares": shares}


@click.command(help=__doc__)
@click.option("--runs", default=3, show_default=True, type=click.IntRange(1), help="Experiments of one run.")
@click.option("--budget-seconds", default=60.0, show_default=True, type=click.FloatRange(1))
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "where_the_time_goes.json")
def main(runs: int, budget_seconds: float, output: Path) -> None:
    """Measure, print the table, write the result."""
    kind = machine()
    with tempfile.TemporaryDirectory(prefix="time-") as name:
        clone = checkouts.clone(Path(name) / "clone", "autoresearch/time")
        measure_experiment(clone, budget_seconds)  # the baseline, of more than one run
        experiments = [measure_experiment(clone, budget_seconds) for _ in range(runs)]
    result = {"budget_seconds": budget_seconds, "experiments": experiments, **summarize(experiments)}
    command = f"uv run benchmarks/where_the_time_goes.py --runs {runs} --budget-seconds {budget_seconds:g}"
    write_result(output, command, result, kind)
    rows = [{"phase": name, "seconds": seconds, "share": result["shares"].get(name)}
            for name, seconds in result["seconds"].items()]  # fmt: skip
    print(table(rows, {"phase": "<36", "seconds": ">9.1f", "share": ">8.3f"}))


if __name__ == "__main__":
    main()

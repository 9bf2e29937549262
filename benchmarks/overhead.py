"""What the harness itself costs: an experiment without its training, a refusal, the report.

\b
    uv run benchmarks/overhead.py                       a few minutes
    uv run benchmarks/overhead.py --experiments 2 --refusals 1 --sizes 10

experiment   whole processes of run.py in a copy of the checkout, on a campaign branch, with a stand-in for the
             process that trains: what remains without its start, training and evaluation is the harness
refusal      whole processes of run.py that end with exit code 2: from start to exit
commands     run.py --dry-run, `nightshift --help`, `status`, `history` and `report` over stand-in campaigns of so many
             experiments, and one more experiment there

Seconds are wall-clock medians; CPU seconds beside them say what other processes add.
"""

from __future__ import annotations

import os
import shutil
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
from where_the_time_goes import measure_experiment

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nightshift.campaign.ledger import Ledger  # noqa: E402
from tests import checkouts, stand_in_campaign  # noqa: E402

BUDGET_SECONDS = 60.0  # no experiment trains that long: the config ends it after three steps
CONFIG = "max_steps = 3\n[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = {}\n"
REFUSED = {
    "syntax error": "[trainer\nlr = 1\n",
    "unknown key": "[trainer.optim]\nlrr = 1e-6\n",
    "locked key": "[model]\nname = 'x'\n",
    "out of range": "[trainer.optim]\nlr = -1.0\n",
    "10 MB file": "# x\n" * 2_500_000,
    "already tried": CONFIG.format("4e-6"),
}

Row = dict[str, Any]


def measure_experiments(root: Path, num_experiments: int) -> Row:
    """Medians over experiments of one run each, after a baseline, or after one that sees to the table."""
    measure_experiment(root, BUDGET_SECONDS, checkouts.python(root))
    rows = []
    for number in range(num_experiments):
        (root / "train.toml").write_text(CONFIG.format(f"{4 + number}e-6"))
        rows.append(measure_experiment(root, BUDGET_SECONDS, checkouts.python(root)))
    harness, wall = (statistics.median(row[name] for row in rows) for name in ("harness", "all"))
    return {"num_experiments": len(rows), "harness_seconds": harness, "wall_seconds": wall}


def timed(command: Sequence[str | Path], folder: Path, repeats: int, expected: int = 0) -> Row:
    """Whole processes, one after the other: medians of their wall-clock and CPU seconds."""
    rows = []
    for _ in range(repeats):
        began, before = time.perf_counter(), os.times()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        seconds, after = time.perf_counter() - began, os.times()
        if done.returncode != expected:
            sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}, not {expected}: {done.stderr}")
        cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
        rows.append((seconds, cpu_seconds))
    wall, cpu = zip(*rows, strict=True)
    return {"seconds": statistics.median(wall), "cpu_seconds": statistics.median(cpu), "slowest_seconds": max(wall)}


def measure_refusals(root: Path, num_refusals: int) -> Row:
    """run.py from process start to exit code 2, for each kind of bad config."""
    found = {}
    for name, text in REFUSED.items():
        (root / "train.toml").write_text(text)
        found[name] = timed([checkouts.python(root), "run.py", "--engine", "trl"], root, num_refusals, expected=2)
    return found


def measure_size(root: Path, num_records: int, num_experiments: int, repeats: int) -> Row:
    """The commands of a campaign of so many experiments, and what one more of them costs beside its training."""
    checkouts.make_checkout(root, stand_in_campaign.BRANCH, CONFIG.format("2e-6"), stand_in=True)
    python, nightshift = checkouts.python(root), root / ".venv" / "bin" / "nightshift"
    measure_experiment(root, BUDGET_SECONDS, python)
    first = Ledger(root).record(1)
    shutil.rmtree(root / "runs")
    theirs = {name: getattr(first, name) for name in ("rules_hash", "hardware", "commit")}
    stand_in_campaign.build(root, num_records, **theirs)
    experiment = measure_experiments(root, num_experiments)  # the first of them leaves an index, as every campaign has
    (root / "train.toml").write_text(CONFIG.format("3e-7"))  # none that was tried
    dry_run = (python, "run.py", "--engine", "trl", "--budget-seconds", str(BUDGET_SECONDS), "--dry-run")
    row: Row = {"num_experiments": num_records, "dry-run": timed(dry_run, root, repeats)}
    row |= {name: timed((nightshift, name), root, repeats) for name in ("--help", "status", "history", "report")}
    row["report_mb"] = (root / "runs" / "report.html").stat().st_size / 1e6
    return {**row, "experiment": experiment}


def told(result: Row) -> str:
    """The result for people."""
    experiment = result["experiment"]
    rows = [{"what": f"refusal: {name}", **row} for name, row in result["refusals"].items()]
    rows += [
        {"what": f"{name}, {row['num_experiments']} records", **row[name]}
        for row in result["commands"]
        for name in ("--help", "dry-run", "status", "history", "report")
    ]
    sizes = [(row["num_experiments"], row["experiment"]) for row in result["commands"]]
    figures = {"what": "<28", "seconds": ">9.3f", "slowest_seconds": ">17.3f", "cpu_seconds": ">13.3f"}
    return "\n".join([
        f"one experiment of one run: {experiment['wall_seconds']:.3f} s of wall-clock",
        f"the harness: all but the trainer: {experiment['harness_seconds']:.3f} s",
        *(f"with {n} records: {e['harness_seconds']:.3f} s" for n, e in sizes),
        "",
        table(rows, figures),
    ])  # fmt: skip


@click.command(help=__doc__)
@click.option("--experiments", default=10, show_default=True, type=click.IntRange(1))
@click.option("--refusals", default=10, show_default=True, type=click.IntRange(1), help="Of each kind.")
@click.option("--sizes", default="10,1000", show_default=True, help="Experiments of the campaigns.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "overhead.json", help="Result as JSON.")
def main(experiments: int, refusals: int, sizes: str, output: Path) -> None:
    """Measure, print the table, write the result."""
    kind = machine()
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name).resolve()
        root, repeats = folder / "checkout", min(3, refusals)
        checkouts.make_checkout(root, "autoresearch/overhead", CONFIG.format("2e-6"), stand_in=True)
        result: Row = {
            "experiment": measure_experiments(root, experiments),
            "refusals": measure_refusals(root, refusals),
            "commands": [measure_size(folder / n, int(n), experiments, repeats) for n in sizes.split(",")],
        }
    flags = f"--experiments {experiments} --refusals {refusals} --sizes {sizes}"
    write_result(output, f"uv run benchmarks/overhead.py {flags}", result, kind)
    print(told(result))


if __name__ == "__main__":
    main()

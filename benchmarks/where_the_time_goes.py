"""How much of an experiment's wall-clock is training, on the trl engine; and what a warm parent could save.

\b
    uv run benchmarks/where_the_time_goes.py                         3 experiments of 60 s, 7 minutes
    uv run benchmarks/where_the_time_goes.py --runs 1 --budget-seconds 2

Whole processes of the real run.py in a clone of this checkout, on its default train.toml: a baseline, then experiments
that repeat it with new seeds, one run each. `harness` is all that head and worker take beside the trainer's start,
training and evaluation: their own starts too. The trainer's start is taken apart once more in one that does nothing
else: what it imports is all that a parent which has imported everything before could save, whatever keeps it warm.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import click
import psutil
from machine import RESULTS, machine, write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nightshift.campaign.ledger import Ledger  # noqa: E402
from nightshift.engines.trl.engine import TRAINER  # noqa: E402
from nightshift.entry import isolated  # noqa: E402
from tests import checkouts  # noqa: E402

EXIT_SECONDS = 30.0

Row = dict[str, Any]


def measure_experiment(root: Path, budget_seconds: float, python: str = sys.executable) -> Row:
    """Seconds of one experiment by its phases, from the process's start to its exit."""
    command = [python, "run.py", "--engine", "trl", "--budget-seconds", str(budget_seconds), "--again"]
    began = time.monotonic()
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    wall_seconds = time.monotonic() - began
    run = Ledger(root).records()[-1].runs[-1]
    if result.returncode != 0 or run.evaluation is None or run.training.training_seconds is None:
        sys.exit(f"run.py ended with {result.returncode}: {result.stderr}")
    assert run.startup_seconds is not None
    parts = {
        "start-up of the trainer": run.startup_seconds,
        "training": run.training.training_seconds,
        "evaluation": run.evaluation.seconds,
    }
    return {**parts, "harness": wall_seconds - sum(parts.values()), "all": wall_seconds}


def measure_start(clone: Path, folder: Path) -> Row:
    """The start of a trainer like that of the first run: its parts, CPU seconds, and memory when it is ready."""
    (spec_path,) = clone.glob("runs/0001/run-1/attempt-0/spec.json")
    spec = json.loads(spec_path.read_text())
    spec |= {"metrics_path": str(folder / "metrics.jsonl"), "weights_dir": str(folder / "weights")}
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    began = time.monotonic()
    argv = isolated(str(TRAINER), str(path))
    with subprocess.Popen(argv, cwd=folder, stdin=PIPE, stdout=PIPE, stderr=DEVNULL) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        ready = json.loads(trainer.stdout.readline())
        seconds = time.monotonic() - began
        process = psutil.Process(trainer.pid)
        times, memory = process.cpu_times(), process.memory_info().rss
        trainer.stdin.close()
        trainer.wait(EXIT_SECONDS)
    parts = ready["seconds"]
    return {
        "interpreter": seconds - sum(parts.values()),
        **parts,
        "all": seconds,
        "cpu_seconds": times.user + times.system,
        "memory_mb": memory / 1e6,
    }


def summarize(experiments: Sequence[Row], start: Row) -> Row:
    """Medians, shares of the whole, and the most that a warm parent could save of it."""
    medians = {name: statistics.median(row[name] for row in experiments) for name in experiments[0]}
    shares = {name: seconds / medians["all"] for name, seconds in medians.items() if name != "all"}
    could_save = min(start["import"] + start["interpreter"], medians["start-up of the trainer"])
    return {"seconds": medians, "shares": shares, "warm_parent_saves_at_most": could_save / medians["all"]}


def table(result: Row) -> str:
    """The result for people."""
    seconds, shares = result["seconds"], result["shares"]
    lines = [f"{'phase of an experiment of one run':36}{'seconds':>9}{'share':>8}"]
    lines += [f"  {name:34}{seconds[name]:9.1f}{100 * share:7.1f}%" for name, share in shares.items()]
    lines += [f"  {'all':34}{seconds['all']:9.1f}", "", "start-up of a trainer"]
    lines += [
        f"  {name:34}{result['start'][name]:9.2f}" for name in ("interpreter", "import", "model", "trainer", "all")
    ]
    lines.append(f"  {'its CPU seconds':34}{result['start']['cpu_seconds']:9.2f}")
    saved = 100 * result["warm_parent_saves_at_most"]
    lines.append(f"a parent that has imported everything saves at most {saved:.1f} % of the wall-clock")
    return "\n".join(lines)


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
        start = measure_start(clone, Path(name))
    result = {"budget_seconds": budget_seconds, "experiments": experiments, "start": start}
    result |= summarize(experiments, start)
    command = f"uv run benchmarks/where_the_time_goes.py --runs {runs} --budget-seconds {budget_seconds:g}"
    write_result(output, command, result, kind)
    print(table(result))


if __name__ == "__main__":
    main()

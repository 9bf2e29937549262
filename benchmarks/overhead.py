"""What the harness itself costs: an experiment by its parts, a refusal, the report, the ledger.

\b
    uv run benchmarks/overhead.py                       a few minutes
    uv run benchmarks/overhead.py --experiments 2 --refusals 1 --sizes 10 --records 100
    uv run benchmarks/overhead.py --checkout DIR        experiment and refusals of another commit, to compare with

experiment   whole processes of run.py in a copy of the checkout, on a campaign branch, with a stand-in for the
             process that trains: what that takes is not the harness's and is shown apart (stopwatch.py)
refusal      whole processes of run.py that end with exit code 2: from start to exit
commands     `nightshift report`, `status` and `history` over stand-in campaigns of so many experiments
ledger       one experiment's writes, and one start's reading, in a ledger of so many records

Seconds are wall-clock medians; CPU seconds beside them say what a busy machine adds. Memory is the peak resident size.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import stopwatch
from machine import RESULTS, machine, table, write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nightshift.campaign.ledger import Ledger  # noqa: E402
from nightshift.records import Record  # noqa: E402
from tests import checkouts, stand_in_campaign  # noqa: E402

NIGHTSHIFT = Path(sys.executable).with_name("nightshift")
BRANCH = "autoresearch/overhead"
EXIT = "exit"
REPEATS = 5
CONFIG = "max_steps = 3\n[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = {}\n"
REFUSED = {
    "syntax error": "[trainer\nlr = 1\n",
    "unknown key": "[trainer.optim]\nlrr = 1e-6\n",
    "locked key": "[model]\nname = 'x'\n",
    "out of range": "[trainer.optim]\nlr = -1.0\n",
    "10 MB file": "# x\n" * 2_500_000,
}

Row = dict[str, Any]


def make_checkout(root: Path, source: Path) -> None:
    """A copy of `source` with a config that ends after three steps, whose processes are timed."""
    checkouts.make_checkout(root, BRANCH, CONFIG.format("2e-6"), source=source, stand_in=True)
    packages, folder = checkouts.site_packages(root), root.with_name("told")
    folder.mkdir()
    shutil.copyfile(stopwatch.__file__, packages / "stopwatch.py")
    (packages / stopwatch.OUTPUT.name).write_text(str(folder))
    (packages / "stopwatch.pth").write_text("import stopwatch\n")


def measure_experiment(root: Path, name: str) -> Row:
    """Seconds of one experiment by its parts, those of the worker too where it is a process of its own."""
    folder = root.with_name("told")
    for path in folder.iterdir():
        path.unlink()
    began = time.time()
    command = [checkouts.python(root), "run.py", "--engine", "trl", "-m", name]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    ended = time.time()
    processes = [json.loads(path.read_text()) for path in folder.iterdir()]
    (head,) = (p for p in processes if p["is_head"])
    workers = [p for p in processes if p is not head]  # none before 2026-11-22
    for worker in workers:
        worker["seconds"][stopwatch.WORKER_START] = worker["seconds"].pop(stopwatch.START)
    parts = sum((Counter(p["seconds"]) for p in processes), Counter())
    parts[stopwatch.START] += head["began"] - began
    parts[EXIT] += ended - head["ended"]
    parts[stopwatch.WAIT] -= sum(worker["ended"] - worker["began"] for worker in workers)
    wall_seconds = ended - began
    return {
        "parts": parts,
        "harness_seconds": wall_seconds - sum(parts[part] for part in stopwatch.ENGINE),
        "cpu_seconds": sum(p["cpu_seconds"] for p in processes),
        "wall_seconds": wall_seconds,
        "peak_memory_mb": sum(p["peak_memory_mb"] for p in processes),
    }


def measure_experiments(root: Path, num_experiments: int) -> Row:
    """Medians over experiments of one run each, after a baseline."""
    measure_experiment(root, "baseline")
    runs = []
    for number in range(num_experiments):
        (root / "train.toml").write_text(CONFIG.format(f"{4 + number}e-6"))
        runs.append(measure_experiment(root, f"experiment {number}"))
    found = {part for run in runs for part in run["parts"]}
    order = dict.fromkeys((stopwatch.START, stopwatch.WORKER_START, *stopwatch.PARTS.values(), stopwatch.REST, EXIT))
    parts = {part: statistics.median(run["parts"][part] for run in runs) for part in order if part in found}
    rest = {name: statistics.median(run[name] for run in runs) for name in runs[0] if name != "parts"}
    return {"num_experiments": len(runs), "parts": parts, **rest}


def timed(command: Sequence[str], folder: Path, expected: int) -> Row:
    """One whole process: its wall-clock and CPU seconds, and its peak memory."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != expected:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}, not {expected}")
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_memory_mb": usage.ru_maxrss * unit / 1e6,
    }


def medians(rows: Sequence[Row]) -> Row:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]} | {
        "slowest_seconds": max(row["seconds"] for row in rows)
    }


def measure_refusals(root: Path, num_refusals: int) -> Row:
    """run.py from process start to exit code 2, for each kind of bad config."""
    command = [checkouts.python(root), "run.py", "--engine", "trl"]
    found = {}
    for name, text in {**REFUSED, "already tried": CONFIG.format("4e-6")}.items():
        (root / "train.toml").write_text(text)
        found[name] = medians([timed(command, root, expected=2) for _ in range(num_refusals)])
    return found


def measure_commands(folder: Path, num_experiments: int, repeats: int) -> Row:
    """The commands that read a whole campaign."""
    folder.mkdir()
    for name in ("run.py", "train.toml"):
        shutil.copyfile(ROOT / name, folder / name)
    stand_in_campaign.build(folder, num_experiments)
    rows = {
        name: medians([timed([str(NIGHTSHIFT), name], folder, expected=0) for _ in range(repeats)])
        for name in ("report", "status", "history")
    }
    size = (folder / "runs" / "report.html").stat().st_size
    return {"num_experiments": num_experiments, "report_mb": size / 1e6, **rows}


def measure_ledger(folder: Path, num_records: int) -> Row:
    """The writes of one experiment and the reading of one start, in a ledger of `num_records`."""
    stand_in_campaign.build(folder, 2, with_files=False)
    ledger = Ledger(folder)
    record = ledger.records()[-1]
    text = (ledger.run_dir(2) / "record.json").read_text()
    for number in range(3, num_records + 1):
        ledger.run_dir(number).mkdir()
        numbered = msgspec.json.encode(replace(record, number=number))
        (ledger.run_dir(number) / "record.json").write_bytes(numbered)
    ledger.sync_tsv()
    seconds: dict[str, list[float]] = {}

    def clock(name: str, act: Callable[..., Any], *arguments: object) -> Any:
        began = time.perf_counter()
        result = act(*arguments)
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    for _ in range(REPEATS):
        fresh = Ledger(folder)
        reserved: Record = clock("reserve", fresh.reserve, record, {"train.toml": b"x = 1\n"})
        closed = replace(record, number=reserved.number)
        clock("write", fresh.write, closed)
        clock("close", fresh.close, closed)
        clock("read all records, first time", fresh.records)
        clock("read all records, again", fresh.records)
        clock("compare results.tsv with all records", fresh.sync_tsv)
    figures = {name: statistics.median(found) for name, found in seconds.items()}
    record_kb = len(text) / 1e3
    return {"num_records": num_records, "record_kb": record_kb, "seconds": figures}


def told(result: Row) -> str:
    """The result for people."""
    experiment = result["experiment"]
    lines = ["one experiment of one run, seconds of wall-clock"]
    lines += [f"  {part:40}{seconds:9.3f}" for part, seconds in experiment["parts"].items()]
    lines += [
        f"  {'the harness: all but the trainer':40}{experiment['harness_seconds']:9.3f}",
        f"  {'its own CPU seconds':40}{experiment['cpu_seconds']:9.3f}",
        f"  {'its peak memory, MB':40}{experiment['peak_memory_mb']:9.0f}\n",
    ]
    figures = {"seconds": ">9.3f", "slowest_seconds": ">17.3f", "cpu_seconds": ">13.3f", "peak_memory_mb": ">16.0f"}
    rows = [{"refusal": name, **row} for name, row in result["refusals"].items()]
    lines.append(table(rows, {"refusal": "<20", **figures}))
    if "commands" not in result:
        return "\n".join(lines)
    names = ("report", "status", "history")
    rows = [{"command": f"{name}, {r['num_experiments']}", **r[name]} for r in result["commands"] for name in names]
    lines += ["", table(rows, {"command": "<20", **figures})]
    ledger = result["ledger"]
    lines += ["", f"ledger of {ledger['num_records']:,} records of {ledger['record_kb']:.0f} kB, milliseconds"]
    lines += [f"  {name:40}{1000 * seconds:9.1f}" for name, seconds in ledger["seconds"].items()]
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--experiments", default=10, show_default=True, type=click.IntRange(1))
@click.option("--refusals", default=10, show_default=True, type=click.IntRange(1), help="Of each kind.")
@click.option("--sizes", default="10,100,1000", show_default=True, help="Experiments of the campaigns to report.")
@click.option("--records", default=10_000, show_default=True, type=click.IntRange(3), help="Of the big ledger.")
@click.option("--checkout", type=click.Path(exists=True, path_type=Path), help="Another commit; writes no result.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "overhead.json", help="Result as JSON.")
def main(experiments: int, refusals: int, sizes: str, records: int, checkout: Path | None, output: Path) -> None:
    """Measure, print the table, write the result."""
    kind = machine()
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name).resolve()
        make_checkout(folder / "checkout", checkout.resolve() if checkout else ROOT)
        result: Row = {"experiment": measure_experiments(folder / "checkout", experiments)}
        result["refusals"] = measure_refusals(folder / "checkout", refusals)
        if checkout is None:
            repeats = min(3, refusals)
            result["commands"] = [measure_commands(folder / n, int(n), repeats) for n in sizes.split(",")]
            result["ledger"] = measure_ledger(folder / "ledger", records)
            flags = f"--experiments {experiments} --refusals {refusals} --sizes {sizes} --records {records}"
            write_result(output, f"uv run benchmarks/overhead.py {flags}", result, kind)
    print(told(result))


if __name__ == "__main__":
    main()

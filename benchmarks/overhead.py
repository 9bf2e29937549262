"""What the harness itself costs: an experiment by its parts, a refusal, the report, the ledger.

\b
    uv run benchmarks/overhead.py                       a few minutes
    uv run benchmarks/overhead.py --experiments 2 --refusals 1 --sizes 10 --records 100

experiment   whole processes of run.py in a clone of this checkout, on a campaign branch, with the stand-in
             worker (timed_run.py): what the worker takes is not the harness's and is shown apart
refusal      whole processes of the real run.py that end with exit code 2: from start to exit
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from machine import RESULTS, machine, write_result
from timed_run import ENGINE, PARTS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nightshift.campaign.ledger import Ledger  # noqa: E402
from nightshift.records import Record  # noqa: E402
from tests import stand_in_campaign  # noqa: E402

TIMED_RUN = Path(__file__).with_name("timed_run.py")
NIGHTSHIFT = Path(sys.executable).with_name("nightshift")
BRANCH = "autoresearch/overhead"
STARTING, ENDING = "start Python and import", "exit"
REPEATS = 5
REFUSED = {
    "syntax error": b"[trainer\nlr = 1\n",
    "unknown key": b"[trainer.optim]\nlrr = 1e-6\n",
    "locked key": b"[model]\nname = 'x'\n",
    "out of range": b"[trainer.optim]\nlr = -1.0\n",
    "10 MB file": b"# x\n" * 2_500_000,
}

Row = dict[str, Any]


def source_of(rate: float) -> bytes:
    return f"max_steps = 3\n[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = {rate!r}\n".encode()


def make_clone(folder: Path) -> Path:
    """A clone of this checkout on a campaign branch, with a config that ends after three steps."""
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(folder)], check=True)
    (folder / "train.toml").write_bytes(source_of(2e-6))
    identity = ("-c", "user.name=Overhead", "-c", "user.email=overhead@localhost")
    for command in (("switch", "--quiet", "--create", BRANCH), ("commit", "--quiet", "--all", "-m", "baseline config")):
        subprocess.run(["git", *identity, *command], cwd=folder, check=True)
    return folder


def measure_experiments(clone: Path, num_experiments: int) -> Row:
    """Medians of the parts over experiments of one run each, after a baseline."""
    runs = []
    for number in range(num_experiments + 1):
        if number:
            (clone / "train.toml").write_bytes(source_of(1e-6 * (3 + number)))
        output, began = clone.parent / "parts.json", time.time()
        flags = ["--engine", "trl", "--max-runs", "1", "-m", f"experiment {number}"]
        command = [sys.executable, str(TIMED_RUN), str(clone), str(output), repr(began), *flags]
        subprocess.run(command, cwd=clone, check=True, capture_output=True)
        ended = time.time()
        run = json.loads(output.read_text())
        run["seconds"][ENDING] = ended - run.pop("ended")
        run["wall_seconds"] = ended - began
        if number:
            runs.append(run)
    parts = [STARTING, *dict.fromkeys(part for _, _, part in PARTS), ENDING]
    medians = {part: statistics.median(r["seconds"].get(part, 0.0) for r in runs) for part in parts}
    return {
        "num_experiments": len(runs),
        "parts": medians,
        "harness_seconds": statistics.median(
            sum(seconds for part, seconds in r["seconds"].items() if part not in ENGINE) for r in runs
        ),
        "cpu_seconds": statistics.median(r["cpu_seconds"] for r in runs),
        "wall_seconds": statistics.median(r["wall_seconds"] for r in runs),
        "peak_memory_mb": max(r["peak_memory_mb"] for r in runs),
    }


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


def measure_refusals(clone: Path, num_refusals: int) -> Row:
    """run.py from process start to exit code 2, for each kind of bad config."""
    tried = (clone / "runs" / "0002" / "train.toml").read_bytes()
    found = {}
    for name, source in {**REFUSED, "already tried": tried}.items():
        (clone / "train.toml").write_bytes(source)
        command = [sys.executable, "run.py", "--engine", "trl"]
        found[name] = medians([timed(command, clone, expected=2) for _ in range(num_refusals)])
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
        numbered = text.replace('"number": 2,', f'"number": {number},', 1)
        (ledger.run_dir(number) / "record.json").write_text(numbered)
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


def table(result: Row) -> str:
    """The result for people."""
    experiment = result["experiment"]
    lines = ["one experiment of one run, seconds of wall-clock"]
    lines += [f"  {part:40}{seconds:9.3f}" for part, seconds in experiment["parts"].items()]
    lines += [
        f"  {'the harness: all but the worker':40}{experiment['harness_seconds']:9.3f}",
        f"  {'its own CPU seconds':40}{experiment['cpu_seconds']:9.3f}",
        f"  {'its peak memory, MB':40}{experiment['peak_memory_mb']:9.0f}",
        "",
        f"{'refusal':42}{'median s':>9}{'slowest s':>11}{'CPU s':>8}",
    ]
    for name, row in result["refusals"].items():
        lines.append(f"  {name:40}{row['seconds']:9.3f}{row['slowest_seconds']:11.3f}{row['cpu_seconds']:8.3f}")
    lines += ["", f"{'command, experiments':42}{'median s':>9}{'CPU s':>8}{'MB':>7}"]
    for row in result["commands"]:
        for name in ("report", "status", "history"):
            figures = row[name]
            what = f"  {name}, {row['num_experiments']}"
            lines.append(
                f"{what:42}{figures['seconds']:9.2f}{figures['cpu_seconds']:8.2f}{figures['peak_memory_mb']:7.0f}"
            )
    ledger = result["ledger"]
    lines += ["", f"ledger of {ledger['num_records']:,} records of {ledger['record_kb']:.0f} kB, milliseconds"]
    lines += [f"  {name:40}{1000 * seconds:9.1f}" for name, seconds in ledger["seconds"].items()]
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--experiments", default=10, show_default=True, type=click.IntRange(1))
@click.option("--refusals", default=10, show_default=True, type=click.IntRange(1), help="Of each kind.")
@click.option("--sizes", default="10,100,1000", show_default=True, help="Experiments of the campaigns to report.")
@click.option("--records", default=10_000, show_default=True, type=click.IntRange(3), help="Of the big ledger.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "overhead.json", help="Result as JSON.")
def main(experiments: int, refusals: int, sizes: str, records: int, output: Path) -> None:
    """Measure, print the table, write the result."""
    kind = machine()
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        clone = make_clone(folder / "clone")
        result = {
            "experiment": measure_experiments(clone, experiments),
            "refusals": measure_refusals(clone, refusals),
            "commands": [measure_commands(folder / size, int(size), min(3, refusals)) for size in sizes.split(",")],
            "ledger": measure_ledger(folder / "ledger", records),
        }
    command = (
        f"uv run benchmarks/overhead.py --experiments {experiments} --refusals {refusals} "
        f"--sizes {sizes} --records {records}"
    )
    write_result(output, command, result, kind)
    print(table(result))


if __name__ == "__main__":
    main()

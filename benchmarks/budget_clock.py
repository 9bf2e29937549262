"""Which clock shall count a budget on a machine that others use? Steps of one config by four clocks beside busy loops.

    uv run benchmarks/budget_clock.py --output clocks --loops 0,2,4 --repetitions 2

Each run trains on the embedded engine and notes at every step wall-clock and CPU seconds and, every two seconds, how
long a calibration kernel takes by both. A clock that is scaled counts a second less where the kernel is slower than in
calm. Whole runs that the folder holds are not made again; `--results` writes the table of all that it holds.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from machine import RESULTS, machine, table, write_result

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 50.0  # of each clock, in which steps are counted
SETTINGS: dict[str, dict[str, Any]] = {"default": {}, "batch128": {"batch_size": 128}}
CLOCKS = ("wall", "cpu", "wall_scaled", "cpu_scaled")
LOOP = "while True: pass"

Row = dict[str, Any]  # step, wall, cpu, and perhaps kernel: its latest times, [wall, cpu] each


def train(setting: str, seed: int, folder: Path) -> None:
    """One run in this process; `folder` gets rows.jsonl."""
    import torch
    from arithmetic import ARITHMETIC_TRL, load
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nightshift.config import train_toml
    from nightshift.engines.trl import grpo
    from nightshift.engines.trl.engine import TrlEngine

    torch.set_num_threads(1)
    engine = TrlEngine(ARITHMETIC_TRL, ROOT, dict(os.environ))
    settings = {**engine.validate(train_toml.load(ROOT / "train.toml")).settings, **SETTINGS[setting]}
    folder.mkdir(parents=True)
    spec = engine._spec(settings, seed, folder)
    kernel = make_kernel(torch)
    began: list[float] = []
    last = [0.0]

    def note(event: Row) -> None:
        if event["event"] != "step":
            return
        row: Row = {"step": event["step"], "wall": time.monotonic() - began[0], "cpu": time.process_time() - began[1]}
        if row["wall"] - last[0] > 2.0:
            row["kernel"], last[0] = [kernel(), kernel()], row["wall"]
        rows.write(json.dumps(row) + "\n")

    model, tokenizer = (kind.from_pretrained(spec["model"]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    trainer = grpo.Trainer(model, tokenizer, load(ROOT, ARITHMETIC_TRL.environments), spec, note)
    with (folder / "rows.jsonl").open("w", buffering=1) as rows:
        began += [time.monotonic(), time.process_time()]
        trainer.train_for(1.3 * SECONDS)
    (folder / "done").touch()


def make_kernel(torch: Any) -> Callable[[], tuple[float, float]]:
    """About 20 ms of what training does: large and small products, and Python. Its wall-clock and CPU seconds."""
    generator = torch.Generator().manual_seed(0)
    large, other = (torch.randn(256, 256, generator=generator) for _ in range(2))
    small = torch.randn(64, 64, generator=generator)

    def kernel() -> tuple[float, float]:
        wall, cpu = time.monotonic(), time.process_time()
        product, little = large, small
        for _ in range(12):
            product = torch.tanh(product @ other * 0.05)
        for _ in range(300):
            little = torch.tanh(little @ small * 0.05)
        sum(i * i for i in range(20_000))
        return time.monotonic() - wall, time.process_time() - cpu

    return kernel


def steps_by_clock(rows: list[Row], calm: tuple[float, float]) -> dict[str, int | None]:
    """Steps within SECONDS of each clock; None where the run was too short for it. `calm`: the kernel's seconds."""
    found: dict[str, int | None] = dict.fromkeys(CLOCKS)
    clocks, before, recent = dict.fromkeys(CLOCKS, 0.0), {"wall": 0.0, "cpu": 0.0}, list[Any]()
    for row in rows:
        recent = (recent + row.get("kernel", []))[-6:]
        for index, name in enumerate(("wall", "cpu")):
            passed, before[name] = row[name] - before[name], row[name]
            slow = statistics.median(times[index] for times in recent) / calm[index] if recent else 1.0
            clocks[name] += passed
            clocks[f"{name}_scaled"] += passed / slow
        for name in CLOCKS:
            if clocks[name] > SECONDS and found[name] is None:
                found[name] = row["step"] - 1
    return found


def read(folder: Path) -> dict[str, list[Row]]:
    """The rows of the whole runs, by `setting-loops-repetition`."""
    paths = sorted(path.parent for path in folder.glob("*/done"))
    return {path.name: [json.loads(line) for line in (path / "rows.jsonl").read_text().splitlines()] for path in paths}


def summarize(runs: dict[str, list[Row]]) -> dict[str, Any]:
    """Steps of every run by clock, and their spread over the runs of the default: standard deviation over mean."""
    kernels = [times for name, rows in runs.items() if "-0-" in name for row in rows for times in row.get("kernel", [])]
    calm = (statistics.median(wall for wall, _ in kernels), statistics.median(cpu for _, cpu in kernels))
    steps = {name: steps_by_clock(rows, calm) for name, rows in runs.items()}
    spread = {}
    for clock in CLOCKS:
        of_default = [found[clock] for name, found in steps.items() if name.startswith("default-")]
        known = [num for num in of_default if num is not None]
        spread[clock] = statistics.stdev(known) / statistics.mean(known) if len(known) > 1 else None
    return {"seconds": SECONDS, "kernel_seconds": calm, "steps": steps, "spread": spread}


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder of the runs.")
@click.option("--loops", default="0,2,4", show_default=True, help="Busy loops beside a run.")
@click.option("--repetitions", default=2, show_default=True)
@click.option("--child", help="For itself: make one run, SETTING/SEED/FOLDER.")
@click.option("--results", type=click.Path(path_type=Path), help="Also write the table as JSON.")
def main(output: Path, loops: str, repetitions: int, child: str | None, results: Path | None) -> None:
    """Make what is missing, print the table."""
    if child:
        setting, seed, name = child.split("/")
        train(setting, int(seed), output / name)
        return
    for repetition in range(repetitions):
        for setting in SETTINGS:
            for count in map(int, filter(None, loops.split(","))):
                name = f"{setting}-{count}-{repetition}"
                if (output / name / "done").exists():
                    continue
                shutil.rmtree(output / name, ignore_errors=True)  # of a run that was stopped
                busy = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
                command = [sys.executable, __file__, "--output", output, "--child", f"{setting}/1000/{name}"]
                try:
                    subprocess.run(command, check=True)
                finally:
                    for process in busy:
                        process.kill()
                        process.wait()
    figures = summarize(read(output))
    print(table([{"run": name, **steps} for name, steps in figures["steps"].items()],
                {"run": "<20", **dict.fromkeys(CLOCKS, ">13")}))  # fmt: skip
    print(table([{"run": "spread", **figures["spread"]}], {"run": "<20", **dict.fromkeys(CLOCKS, ">13.3f")}))
    if results:
        command = f"uv run benchmarks/budget_clock.py --output clocks --loops {loops} --repetitions {repetitions}"
        write_result(results, f"{command} --results {RESULTS.name}/{results.name}", figures, machine())


if __name__ == "__main__":
    main()

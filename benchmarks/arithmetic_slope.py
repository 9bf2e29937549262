"""Does the arithmetic task have a slope? Scores of settings and seeds, through the worker's real protocol.

    uv run benchmarks/arithmetic_slope.py --output slope.jsonl --settings default,lr/3,lr*3,group16 --seeds 0-4
    uv run benchmarks/arithmetic_slope.py --output slope.jsonl --random 20 --seed 1
    uv run benchmarks/arithmetic_slope.py --output slope.jsonl --settings base

A setting is a name such as `default`, `lr/3`, `lr*3`, `group16`, `temp0.7`, `batch64`, `muon`, `max_rl`, or
several joined by `+`. `base` is the base model without training: greedy, and 8 samples an example. Rows
that the output already holds are not run again. One run at a time, on an otherwise idle machine; every
row notes the load.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from arithmetic import ROOT, RULES, data, score
from machine import RESULTS, machine, write_result

WORKER = ROOT / "nightshift" / "engines" / "trl" / "trainer.py"
LEARNING_RATE = 3e-6  # of train.toml
SELECTION_SIZE, TRAIN_SIZE = 1000, 4000
NUM_SAMPLES = 8

Row = dict[str, Any]


class Worker:
    """The child process; `ask` sends one command and returns its last event."""

    def __init__(self, folder: Path, model: Path, settings: Mapping[str, Any], seed: int, num_threads: int) -> None:
        self.folder = folder
        spec = {
            "model": str(model),
            "root": str(ROOT),
            "environments": [asdict(replace(RULES, num_train=TRAIN_SIZE))],
            "train_seed": seed,
            "settings": settings,
            "metrics_path": str(folder / "metrics.jsonl"),
            "weights_dir": str(folder / "weights"),
            "device": "cpu",
            "num_threads": num_threads,
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        self.began = time.monotonic()
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", WORKER, folder / "spec.json"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )

    def wait_for(self, name: str, step: Callable[[Row], None] = lambda event: None) -> Row:
        """The next event of that name. Exits with the worker's log if it fails."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: Row = json.loads(line)
            if event["event"] in (name, "error"):
                return event
            step(event)
        sys.exit(f"the worker died:\n{(self.folder / 'log').read_text()[-2000:]}")

    def ask(self, command: Mapping[str, Any], name: str, step: Callable[[Row], None] = lambda event: None) -> Row:
        """Send a command and wait for the event that ends it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.wait_for(name, step)

    def scores(self, examples: Sequence[data.Example], temperature: float = 0.0) -> list[float]:
        """The score of one completion an example."""
        prompts, output = self.folder / "prompts.json", self.folder / "completions.jsonl"
        prompts.write_text(json.dumps([data.messages(example) for example in examples]))
        command = {"command": "complete", "prompts_path": str(prompts), "output_path": str(output)}
        self.ask({**command, "max_completion_tokens": 64, "temperature": temperature, "batch_size": 250}, "completed")
        texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
        return [score(text, example.answer) for text, example in zip(texts, examples, strict=True)]

    def close(self) -> None:
        """Tell the worker to leave."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def make_settings(name: str, scale: float, max_steps: int | None) -> dict[str, Any]:
    """Settings of a name; the default is train.toml's, as the engine scales and caps it."""
    settings: dict[str, Any] = {
        "optimizer": {
            "type": "adamw", "lr": LEARNING_RATE * scale, "weight_decay": 0.01,
            "betas1": 0.9, "betas2": 0.999, "max_norm": 1.0,
        },
        "scheduler": {"type": "constant"},
        "algo": {"type": "grpo"},
        "batch_size": 256,
        "group_size": 4,
        "temperature": 1.0,
        "max_completion_tokens": 64,
        "max_steps": max_steps,
        "seq_len": 2048,
        "filter_zero_advantages": True,
    }  # fmt: skip
    for part in name.split("+"):
        match = re.fullmatch(r"([a-z_]+)([*/]?)([0-9.e-]*)", part)
        if match is None:
            sys.exit(f"setting {part!r} is unknown. Write for example lr*3, group16 or temp0.7")
        match match.groups():
            case ("default", "", ""):
                pass
            case ("lr", "*", factor):
                settings["optimizer"]["lr"] *= float(factor)
            case ("lr", "/", factor):
                settings["optimizer"]["lr"] /= float(factor)
            case ("group", "", size):
                settings["group_size"] = int(size)
            case ("batch", "", size):
                settings["batch_size"] = int(size)
            case ("temp", "", temperature):
                settings["temperature"] = float(temperature)
            case ("betas2_", "", beta):
                settings["optimizer"]["betas2"] = float(beta)
            case ("muon", "", ""):
                settings["optimizer"] |= {"type": "muon", "mu": 0.95, "betas2": 0.95}
            case ("max_rl", "", ""):
                settings["algo"] = {"type": "max_rl"}
            case ("unfiltered", "", ""):
                settings["filter_zero_advantages"] = False
            case _:
                sys.exit(f"setting {part!r} is unknown. Write for example lr*3, group16 or temp0.7")
    return settings


def random_names(count: int, seed: int) -> Iterator[str]:
    """Settings drawn from the box that a sensible agent would search, around the default."""
    rng = random.Random(seed)
    for _ in range(count):
        factor = math.exp(rng.uniform(math.log(1 / 4), math.log(4)))
        group, batch = rng.choice([2, 4, 8, 16]), rng.choice([64, 128, 256, 512])
        parts = [f"lr*{factor:.2f}", f"group{group}", f"batch{batch}", f"temp{rng.uniform(0.7, 1.3):.2f}"]
        if rng.random() < 0.25:
            parts.append("max_rl")
        yield "+".join(parts)


def measure(name: str, seed: int, arguments: argparse.Namespace, folder: Path) -> Row:
    """Train one setting with one seed and score the final policy on the selection set."""
    settings = make_settings(name, arguments.scale, arguments.num_steps)
    load_before = os.getloadavg()[0]
    worker = Worker(folder, arguments.model, settings, seed, arguments.num_threads)
    startup = worker.wait_for("ready")
    startup_seconds = {**startup.get("seconds", {}), "total": time.monotonic() - worker.began}

    def show(event: Row) -> None:
        if event["event"] == "step" and sys.stderr.isatty():
            print(
                f"\r{name} seed {seed}: step {event['step']} reward {event['reward_mean']:.3f} ",
                end="",
                file=sys.stderr,
            )

    trained = worker.ask({"command": "train", "budget_seconds": arguments.budget_seconds}, "trained", show)
    print(file=sys.stderr)
    row = {"startup_seconds": startup_seconds, "load": [load_before, os.getloadavg()[0]]}
    if trained["event"] == "error":
        return {**row, "eval_score": None, "cause": trained["cause"]}
    worker.ask({"command": "load_final_weights"}, "weights")
    examples = data.load("selection", SELECTION_SIZE)
    began = time.monotonic()
    scores = worker.scores(examples)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row |= {
        "eval_score": statistics.fmean(scores),
        "levels": by_level(examples, scores),
        "evaluation_seconds": time.monotonic() - began,
        "rewards": [round(step["reward_mean"], 4) for step in steps],
        "generate_seconds": statistics.median(step["generate_seconds"] for step in steps),
        "train_seconds": statistics.median(step["train_seconds"] for step in steps),
    }
    worker.close()
    return {**row, **{key: trained[key] for key in ("outcome", "num_steps", "training_seconds", "peak_memory_gb")}}


def measure_base(arguments: argparse.Namespace, folder: Path) -> Row:
    """Scores of the base model: greedy pass@1, and pass@1 and pass@8 by sampling, on the selection set."""
    worker = Worker(folder, arguments.model, make_settings("default", arguments.scale, 1), 0, arguments.num_threads)
    worker.wait_for("ready")
    examples = data.load("selection", SELECTION_SIZE)
    greedy = worker.scores(examples)
    sampled = worker.scores([example for example in examples for _ in range(NUM_SAMPLES)], temperature=1.0)
    best = [max(sampled[start : start + NUM_SAMPLES]) for start in range(0, len(sampled), NUM_SAMPLES)]
    worker.close()
    return {
        "eval_score": statistics.fmean(greedy),
        "levels": by_level(examples, greedy),
        "sampled_pass1": statistics.fmean(sampled),
        "pass8": statistics.fmean(best),
        "pass8_levels": by_level(examples, best),
    }


def by_level(examples: Sequence[data.Example], scores: Sequence[float]) -> dict[str, float]:
    """Mean score a level."""
    return {
        level: round(statistics.fmean(s for e, s in zip(examples, scores, strict=True) if e.level == level), 4)
        for level in data.Level
    }


def print_table(rows: Sequence[Row]) -> None:
    """Mean, sd and distance to the default in pooled sd of each setting."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["setting"], []).append(row["eval_score"] if row["eval_score"] is not None else 0.0)
    default = scores.get("default", [])
    print(f"{'setting':44} seeds   mean     sd  vs default  pooled sd  steps  scores")
    for name, values in sorted(scores.items(), key=lambda item: -statistics.fmean(item[1])):
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        gap = statistics.fmean(values) - statistics.fmean(default) if default else math.nan
        pooled = math.sqrt((statistics.variance(default) + spread**2) / 2) if len(default) > 1 else math.nan
        steps = statistics.fmean(row.get("num_steps", 0) for row in rows if row["setting"] == name)
        figures = " ".join(f"{value:.3f}" for value in values)
        ratio = gap / pooled if pooled else math.nan
        row = f"{name:44} {len(values):5}  {statistics.fmean(values):.3f}  {spread:.3f}  {gap:+10.3f}  {ratio:+9.1f}"
        print(f"{row}  {steps:5.0f}  {figures}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines file that rows are appended to")
    parser.add_argument("--settings", default="", help="comma-separated names")
    parser.add_argument("--seeds", default="0", help="a number, or a range such as 0-4")
    parser.add_argument("--random", type=int, default=0, help="also run this many random settings, one seed each")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random settings and of their runs")
    parser.add_argument("--budget-seconds", type=float, default=60.0)
    parser.add_argument("--num-steps", type=int, help="stop after this many steps instead: independent of the machine")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--scale", type=float, default=50.0, help="factor on train.toml's learning rate")
    parser.add_argument("--results", type=Path, help="also write the table of this call as JSON")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "arithmetic-base")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    names = [name for name in arguments.settings.split(",") if name]
    seeds = range(int(first), int(last or first) + 1)
    jobs = [(name, seed) for seed in seeds for name in names if name != "base" or seed == seeds[0]]  # has no seed
    jobs += [(name, arguments.seed) for name in random_names(arguments.random, arguments.seed)]
    shared = {
        "budget_seconds": arguments.budget_seconds,
        "max_steps": arguments.num_steps,
        "num_threads": arguments.num_threads,
        "scale": arguments.scale,
        "model": str(arguments.model),
    }
    arguments.output.touch()
    rows: list[Row] = [json.loads(line) for line in arguments.output.read_text().splitlines()]
    rows = [row for row in rows if shared.items() <= row.items()]
    for name, seed in jobs:
        if any((row["setting"], row["seed"]) == (name, seed) for row in rows):
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = (
                measure_base(arguments, Path(folder))
                if name == "base"
                else measure(name, seed, arguments, Path(folder))
            )
        rows.append({"setting": name, "seed": seed, **shared, **run})
        with arguments.output.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    asked = [row for row in rows if (row["setting"], row["seed"]) in jobs]
    print_table(asked)
    if arguments.results:
        command = (
            f"uv run benchmarks/arithmetic_slope.py --output slope.jsonl --settings {arguments.settings} "
            f"--seeds {arguments.seeds} --results {RESULTS.name}/{arguments.results.name}"
        )
        del shared["model"]
        write_result(arguments.results, command, {"conditions": shared, **figures(asked)}, machine())


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Scores of each setting by seed, with mean, sd and mean number of steps; None where nothing was measured."""
    found: dict[str, Any] = {}
    for row in rows:
        found.setdefault(row["setting"], []).append(row)
    return {
        "settings": {
            name: {
                "scores": {str(row["seed"]): row["eval_score"] for row in runs},
                "mean": statistics.fmean(row["eval_score"] or 0.0 for row in runs),
                "sd": statistics.stdev(row["eval_score"] or 0.0 for row in runs) if len(runs) > 1 else None,
                "steps": None if name == "base" else statistics.fmean(row["num_steps"] for row in runs),
                "load_before": None if name == "base" else [row["load"][0] for row in runs],
            }
            for name, runs in found.items()
        }
    }


if __name__ == "__main__":
    main()

"""Does an environment have a slope? Scores of settings and seeds, through the trl engine on the CPU.

    uv run benchmarks/slope.py --environment countdown --output slope.jsonl --settings default,lr/3,group16 --seeds 0-4
    uv run benchmarks/slope.py --environment arithmetic --model models/mixed-base --output slope.jsonl --settings base

A setting is a name such as `default`, which is the shipped train.toml, `lr/3`, `lr*3`, `group16`, `temp0.7`, `batch64`,
`muon`, `max_rl`, or several joined by `+`. `base` is the base model without training: greedy, and 8 samples an
example. Rows that the output already holds are not run again. One run at a time, on an otherwise idle machine;
every row notes the load. `paired` in the result tells what common random numbers are worth: a campaign gives every
config the same seeds in the same order; where batch or group change, the k-th prompt comes at another time.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from machine import RESULTS, machine, table, write_result

from nightshift.campaign.records import Completion
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import load, parse
from nightshift.engines.base import Session
from nightshift.engines.trl.engine import TrlEngine
from nightshift.evaluation import environment as environments
from nightshift.evaluation.environment import Environment, Example
from nightshift.evaluation.evaluate import evaluate

ROOT = Path(__file__).resolve().parents[1]
NUM_SAMPLES = 8
# What the parts of a setting's name change, with a number after them or without.
NUMBERS = {
    "lr": "trainer.optim.lr",
    "group": "orchestrator.group_size",
    "batch": "orchestrator.batch_size",
    "temp": "orchestrator.train.sampling.temperature",
    "betas2_": "trainer.optim.betas2",
}
WORDS: dict[str, dict[str, Any]] = {
    "default": {},
    "base": {},
    "muon": {"trainer.optim.type": "muon", "trainer.optim.mu": 0.95, "trainer.optim.betas2": 0.95},
    "max_rl": {"orchestrator.algo.type": "max_rl"},
    "unfiltered": {"orchestrator.train.filter_zero_advantages": False},
    "pool": {"orchestrator.train.opponent.type": "pool"},
}

Row = dict[str, Any]


def source_of(name: str) -> str:
    """The train.toml of a setting: the shipped one with what its name changes."""
    values = dict(load(ROOT / "train.toml").values)
    for part in name.split("+"):
        match = re.fullmatch(r"([a-z_]+|betas2_)([*/]?)([0-9.e-]+)", part)
        if part in WORDS:
            values |= WORDS[part]
        elif match and match[1] in NUMBERS:
            key, number = NUMBERS[match[1]], json.loads(match[3])
            values[key] = {"": number, "*": values.get(key, 0) * number, "/": values.get(key, 0) / number}[match[2]]
        else:
            sys.exit(f"setting {part!r} is unknown. Write for example lr*3, group16 or temp0.7")
    return "".join(f"{path} = {json.dumps('None' if v is None else v)}\n" for path, v in values.items())


def scores_of(
    session: Session, rules: Rules, environment: Environment, examples: Sequence[Example], temperature: float = 0.0
) -> list[float]:
    """What the base model scores on every example, the mean of its episodes."""
    decoding = replace(rules.decoding, temperature=temperature)
    played = [environment.episodes(example) for example in examples]

    def complete(chats: Sequence[environments.Chat]) -> Sequence[Completion]:
        return session.complete(chats, decoding, lambda progress: None)

    list(environments.play_out([episode for episodes in played for episode in episodes], complete))
    return [statistics.fmean(episode.score() for episode in episodes) for episodes in played]


def measure(name: str, seed: int, rules: Rules, folder: Path) -> Row:
    """Train one setting with one seed and score the final policy on the validation split; `base` is not trained."""
    engine = TrlEngine(rules, ROOT, dict(os.environ))
    settings = engine.validate(parse(source_of(name).encode())).settings
    (environment,) = environments.load(ROOT, rules.environments)
    examples = environment.examples("validation")
    load_before, began = os.getloadavg()[0], time.monotonic()
    session = engine.open(settings, seed, folder, rules.deadline_seconds)
    row: Row = {"startup_seconds": time.monotonic() - began}
    try:
        if name == "base":
            greedy = scores_of(session, rules, environment, examples)
            several = [example for example in examples for _ in range(NUM_SAMPLES)]
            sampled = scores_of(session, rules, environment, several, temperature=1.0)
            best = [max(sampled[start : start + NUM_SAMPLES]) for start in range(0, len(sampled), NUM_SAMPLES)]
            return {
                "eval_score": statistics.fmean(greedy),
                "sampled_pass1": statistics.fmean(sampled),
                "pass8": statistics.fmean(best),
            }
        training = session.train(rules.budget_seconds, lambda progress: None)
        row["load"] = [load_before, os.getloadavg()[0]]
        if not training.outcome.is_success:
            return row | {"eval_score": None, "cause": training.cause, "num_steps": training.num_steps}
        evaluation = evaluate(session, [(environment, each) for each in examples], rules, None, lambda progress: None)
    finally:
        session.close()
    return row | {
        "eval_score": evaluation.eval_score,
        "evaluation_seconds": evaluation.seconds,
        "outcome": training.outcome,
        "num_steps": training.num_steps,
        "training_seconds": training.training_seconds,
    }


def paired(one: Row, other: Row) -> Row | None:
    """Return the standard deviations of the difference of two settings, with the same seed and with different ones;
    None for fewer than three seeds in common."""
    first, second = one["scores"], other["scores"]
    seeds = [seed for seed in first if first[seed] is not None and second.get(seed) is not None]
    if len(seeds) < 3:
        return None
    same = [first[seed] - second[seed] for seed in seeds]
    unlike = [(first[a] - second[b] - statistics.fmean(same)) ** 2 for a in seeds for b in seeds if a != b]
    # The mean was taken from the same numbers: one degree of freedom of both sides is gone.
    different = (statistics.fmean(unlike) * len(seeds) / (len(seeds) - 1)) ** 0.5
    return {"seeds": len(seeds), "same": statistics.stdev(same), "different": different}


def summarize(rows: Sequence[Row]) -> dict[str, Row]:
    """Scores of each setting by seed, with mean, sd and mean number of steps; None where nothing was measured."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["setting"], []).append(row)
    return {
        name: {
            "scores": {str(row["seed"]): row["eval_score"] for row in runs},
            "mean": statistics.fmean(row["eval_score"] or 0.0 for row in runs),
            "sd": statistics.stdev(row["eval_score"] or 0.0 for row in runs) if len(runs) > 1 else None,
            "steps": None if name == "base" else statistics.fmean(row["num_steps"] for row in runs),
            "load_before": None if name == "base" else [row["load"][0] for row in runs],
            **({key: runs[0][key] for key in ("sampled_pass1", "pass8")} if name == "base" else {}),
        }
        for name, runs in found.items()
    }


def told(settings: dict[str, Row]) -> str:
    """The settings for people, best first, with their distance to the default."""
    default = settings["default"]["mean"] if "default" in settings else None
    rows = [
        {"setting": name, "seeds": len(row["scores"]), "vs_default": None if default is None else row["mean"] - default}
        | row
        for name, row in sorted(settings.items(), key=lambda item: -item[1]["mean"])
    ]
    columns = {"setting": "<44", "seeds": ">6", "mean": ">8.3f", "sd": ">8.3f", "vs_default": ">+12.3f"}
    return table(rows, columns | {"steps": ">7.0f"})


@click.command(help=__doc__)
@click.option("--environment", required=True, help="A folder of environments/.")
@click.option("--model", default="", help="Default: the environment's own.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON lines; rows are appended.")
@click.option("--settings", default="", help="Comma-separated names.")
@click.option("--seeds", default="0", show_default=True, help="A number, or a range such as 0-4.")
@click.option("--budget-seconds", default=60.0, show_default=True)
@click.option("--results", type=click.Path(path_type=Path), help="Also write the table of this call as JSON.")
def main(
    environment: str, model: str, output: Path, settings: str, seeds: str, budget_seconds: float, results: Path | None
) -> None:
    """Run what is missing, print the table, write the result."""
    first, _, last = seeds.partition("-")
    numbers = range(int(first), int(last or first) + 1)
    names = [name for name in settings.split(",") if name]
    jobs = [(name, seed) for seed in numbers for name in names if name != "base" or seed == numbers[0]]  # has no seed
    rules = rules_of(ROOT, Chosen(environments=[environment], model=model), "trl", 0).with_budget(budget_seconds)
    shared = {
        "environment": environment,
        "model": rules.model,
        "budget_seconds": budget_seconds,
        "budget_clock": rules.budget_clock,
        "scale": rules.learning_rate_scale,
    }
    output.touch()
    rows: list[Row] = [json.loads(line) for line in output.read_text().splitlines()]
    rows = [row for row in rows if shared.items() <= row.items()]
    for name, seed in jobs:
        if any((row["setting"], row["seed"]) == (name, seed) for row in rows):
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"setting": name, "seed": seed, **shared, **measure(name, seed, rules, Path(folder))})
        with output.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    asked = [row for row in rows if (row["setting"], row["seed"]) in jobs]
    found = summarize(asked)
    pairs = {name: paired(row, found["default"]) for name, row in found.items() if "default" in found}
    print(told(found))
    if results:
        command = f"uv run benchmarks/slope.py --environment {environment} --model {rules.model} --output slope.jsonl"
        command += f" --settings {settings} --seeds {seeds} --results {RESULTS.name}/{results.name}"
        write_result(results, command, {"conditions": shared, "settings": found, "paired": pairs}, machine())


if __name__ == "__main__":
    main()

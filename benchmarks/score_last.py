"""Does the mean of the last steps' weights score more steadily than the last weights alone? On the arithmetic task.

    uv run benchmarks/score_last.py --output score_last.jsonl --seeds 0-9 --results results/score_last.json

A seed is trained once, by the trl engine's own trainer with a setting of slope.py, and its one run is scored
with several `score_last`: the differences are those of the weights alone, and no neighbour's. 1 is the plain score.
Rows that the output already holds are not run again: a file for each setting.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from arithmetic import ARITHMETIC_TRL, ROOT, RULES, data, score
from machine import RESULTS, machine, table, write_result
from slope import source_of

from nightshift.engines.trl.engine import TrlEngine
from nightshift.engines.trl.trainer import Trainer
from nightshift.train_toml.config import parse

LASTS = (1, 2, 5, 10, 20)
Row = dict[str, Any]


def measure(setting: str, seed: int, budget_seconds: float, folder: Path) -> Row:
    """The scores on the selection set by `score_last`, None where there were fewer steps; the steps, the load."""
    engine = TrlEngine(replace(ARITHMETIC_TRL, score_last=max(LASTS)), ROOT, dict(os.environ))
    spec = engine._spec(engine.validate(parse(source_of(setting).encode())).settings, seed, folder)
    events, load_before = io.StringIO(), os.getloadavg()[0]
    trainer = Trainer(spec, events)
    trainer.obey({"command": "train", "budget_seconds": budget_seconds})
    last, scores = [*trainer._trainer._last], {}
    for k in LASTS:
        trainer._trainer._last = deque(last, maxlen=k)
        scores[str(k)] = score_now(trainer, events) if k <= len(last) else None
    trained = next(event for event in said(events) if event["event"] == "trained")
    return {"seed": seed, "num_steps": trained["num_steps"], "load_before": load_before, "scores": scores}


def score_now(trainer: Trainer, events: io.StringIO) -> float:
    """Greedy pass@1 of the final policy, as the trainer writes, loads and completes it."""
    trainer.obey({"command": "load_final_weights"})
    examples, decoding = data.load("selection", RULES.num_selection), ARITHMETIC_TRL.decoding
    asked = {name: getattr(decoding, name) for name in ("max_completion_tokens", "temperature", "batch_size")}
    trainer.obey({"command": "complete", "prompts": [data.messages(e) for e in examples], **asked})
    batches = [event["completions"] for event in said(events) if event["event"] == "completions"]
    texts = [completion["text"] for batch in batches for completion in batch][-len(examples) :]
    return statistics.fmean(score(text, e.answer) for text, e in zip(texts, examples, strict=True))


def said(events: io.StringIO) -> list[Row]:
    """Every event so far."""
    return [json.loads(line) for line in events.getvalue().splitlines()]


def summarize(rows: Sequence[Row]) -> list[Row]:
    """By `score_last`: mean and sd over the seeds, and the gain over the plain score of the same runs."""
    found = []
    for k in LASTS:
        pairs = [(row["scores"][str(k)], row["scores"]["1"]) for row in rows if row["scores"][str(k)] is not None]
        if len(pairs) < 2:
            continue
        gains = [ours - plain for ours, plain in pairs]
        found.append(
            {
                "score_last": k,
                "seeds": len(pairs),
                "mean": statistics.fmean(ours for ours, _ in pairs),
                "sd": statistics.stdev(ours for ours, _ in pairs),
                "gain": statistics.fmean(gains),
                "gain_stderr": statistics.stdev(gains) / len(gains) ** 0.5,
            }
        )
    return found


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON lines; rows are appended.")
@click.option("--setting", default="default", show_default=True, help="As in slope.py.")
@click.option("--seeds", default="0-9", show_default=True, help="A range.")
@click.option("--budget-seconds", default=60.0, show_default=True)
@click.option("--results", type=click.Path(path_type=Path), help="Also write the table as JSON.")
def main(output: Path, setting: str, seeds: str, budget_seconds: float, results: Path | None) -> None:
    """Run what is missing, print the table, write the result."""
    first, _, final = seeds.partition("-")
    output.touch()
    rows: list[Row] = [json.loads(line) for line in output.read_text().splitlines()]
    for seed in range(int(first), int(final) + 1):
        if any(row["seed"] == seed for row in rows):
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(setting, seed, budget_seconds, Path(folder)))
        with output.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    found = summarize(rows)
    columns = {"score_last": ">10", "seeds": ">6", "mean": ">8.4f", "sd": ">8.4f", "gain": ">+9.4f"}
    print(table(found, columns | {"gain_stderr": ">12.4f"}))
    if results:
        command = f"uv run benchmarks/score_last.py --output score_last.jsonl --setting {setting} --seeds {seeds}"
        command += f" --results {RESULTS.name}/{results.name}"
        write_result(results, command, {"budget_seconds": budget_seconds, "settings": found, "runs": rows}, machine())


if __name__ == "__main__":
    main()

"""Steps a CPU second of the embedded trainer, against another version of Nightshift and against plain TRL.

    uv run benchmarks/trainer_steps.py --against ../nightshift-0.2.0 --repetitions 5

Each takes the same number of steps with the shipped train.toml's settings on arithmetic, in processes of one thread, in
turn: other load slows all alike, so ratios are taken within a repetition. `--against` is another checkout with its
environment. `plain` is trl.GRPOTrainer as its documentation shows it: its own generation, the same model, prompts,
rewards, batch and group.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from arithmetic import ARITHMETIC_TRL, RULES, data, score
from machine import RESULTS, machine, table, write_result

from nightshift.config import train_toml
from nightshift.engines.trl.engine import TrlEngine

ROOT = Path(__file__).resolve().parents[1]
SEED = 7
WARM_UP_STEPS = 3  # the first steps make the caches of torch


def step_seconds(checkout: Path, num_steps: int) -> float:
    """CPU seconds a step of a checkout's own trainer process."""
    python = str(checkout / ".venv" / "bin" / "python")
    with tempfile.TemporaryDirectory() as folder:
        config = train_toml.load(ROOT / "train.toml")
        engine = TrlEngine(ARITHMETIC_TRL, checkout, dict(os.environ))
        settings = dict(engine.validate(config).settings) | {"max_steps": num_steps}
        spec = Path(folder) / "spec.json"
        read = engine.spec(settings, SEED, Path(folder)) | {"score_last": 1, "model_revision": None}  # of 0.2.0, too
        spec.write_text(json.dumps(read))
        command = [python, "-m", "nightshift.engines.trl.trainer", str(spec)]
        train = json.dumps({"command": "train", "budget_seconds": 1e6}) + "\n"
        with subprocess.Popen(
            command, cwd=checkout, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True
        ) as trainer:
            assert trainer.stdin is not None
            assert trainer.stdout is not None
            trainer.stdin.write(train)
            trainer.stdin.flush()  # not closed: that would end the training
            last = next(line for line in trainer.stdout if '"trained"' in line or '"error"' in line)
            trainer.stdin.close()
        if '"error"' in last:
            sys.exit(f"{checkout}: {last}")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return float(rows[-1]["time"] - rows[WARM_UP_STEPS - 1]["time"]) / (len(rows) - WARM_UP_STEPS)


def plain_step_seconds(num_steps: int) -> float:
    """CPU seconds a step of trl.GRPOTrainer, in a process of its own."""
    command = [sys.executable, __file__, "--plain", str(num_steps)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(result.stdout.splitlines()[-1])


def _train_plain(num_steps: int) -> float:
    """CPU seconds a step of trl.GRPOTrainer in this process."""
    import time

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    config = train_toml.load(ROOT / "train.toml")
    problems = data.load("train", RULES.num_train or 4000)
    rows = [{"prompt": data.messages(one), "answer": one.answer} for one in problems]
    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            moments.append(time.process_time())

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [score(said[0]["content"], right) for said, right in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            learning_rate=ARITHMETIC_TRL.learning_rate_scale * config.get("trainer.optim.lr"),
            max_steps=num_steps,
            per_device_train_batch_size=config.get("orchestrator.batch_size"),
            num_generations=config.get("orchestrator.group_size"),
            max_completion_length=512 - data.PROMPT_TOKENS,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "arithmetic-base", dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "arithmetic-base")
        trainer = GRPOTrainer(
            model, reward, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    return (moments[-1] - moments[WARM_UP_STEPS - 1]) / (len(moments) - WARM_UP_STEPS)


@click.command(help=__doc__)
@click.option("--against", type=click.Path(exists=True, path_type=Path), help="Another checkout, with its .venv.")
@click.option("--repetitions", default=5, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=16, show_default=True, type=click.IntRange(WARM_UP_STEPS + 1), help="Of each.")
@click.option("--plain", hidden=True, type=int, help="Train with plain TRL; print the CPU seconds a step.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "trainer_steps.json")
def main(against: Path | None, repetitions: int, steps: int, plain: int | None, output: Path) -> None:
    """Measure in turn, print the table, write the result."""
    if plain is not None:
        print(_train_plain(plain))
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    kind, rounds = machine(), list[dict[str, float]]()
    for _ in range(repetitions):
        seconds = {"here": step_seconds(ROOT, steps)}
        if against:
            seconds["against"] = step_seconds(against.resolve(), steps)
        seconds["plain"] = plain_step_seconds(steps)
        rounds.append(seconds)
        print(", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items()), flush=True)
    rows = []
    for name in rounds[0]:
        ratios = [one[name] / one["here"] for one in rounds]
        milliseconds = 1000 * statistics.median(one[name] for one in rounds)
        rows.append({"trainer": name, "ms_a_step": milliseconds, "times_here": statistics.median(ratios),
                     "least": min(ratios), "most": max(ratios)})  # fmt: skip
    columns = {"trainer": "<10", "ms_a_step": ">10.0f", "times_here": ">12.2f", "least": ">8.2f", "most": ">8.2f"}
    print(table(rows, columns))
    command = f"uv run benchmarks/trainer_steps.py --repetitions {repetitions} --steps {steps}"
    commit = None
    if against:
        git = ["git", "-C", str(against), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        command += f" --against {against.name}"
    write_result(output, command, {"against": commit, "rounds": rounds, "summary": rows}, kind)


if __name__ == "__main__":
    main()

"""The worker over its real protocol: a child process, JSON lines both ways, files on disk."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from nightshift_arithmetic import data
from nightshift_arithmetic.scoring import score

from nightshift.campaign.metrics import SAMPLES_NAME, Sample
from nightshift.files import read_rows
from tests.integration.test_trl_trainer import ADAMW, make_spec

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "nightshift" / "engines" / "trl" / "trainer.py"
MODEL = ROOT / "models" / "arithmetic-base"
COLUMNS = {
    "step", "time", "reward_mean", "reward_std", "completion_tokens_mean", "truncated_share", "all_right_share",
    "all_wrong_share", "equal_share", "entropy", "kl", "grad_norm", "lr", "loss", "tokens_per_second",
    "generate_seconds", "train_seconds",
}  # fmt: skip


class Worker:
    """The child and its folder."""

    def __init__(self, folder: Path, lr: float = 6e-4, **settings: Any) -> None:
        self.folder = folder
        optimizer = ADAMW | {"lr": lr, "max_norm": 1.0}
        settings = {"optimizer": optimizer, "batch_size": 64, "max_completion_tokens": 64, "max_steps": None} | settings
        spec = make_spec(folder, **settings) | {
            "model": str(MODEL),
            "root": str(ROOT),
            "environments": [{"name": "arithmetic", "num_validation": 1, "num_train": 400, "needs": ["gsm8k"]}],
            "device": "cpu",
            "num_threads": 1,
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", WORKER, folder / "spec.json"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def events(self, last: str) -> list[dict[str, Any]]:
        """Events up to and including the first named `last`; an error ends them too."""
        assert self.process.stdout is not None
        events: list[dict[str, Any]] = []
        for line in self.process.stdout:
            events.append(json.loads(line))  # whatever a library prints must not come this way
            if events[-1]["event"] in (last, "error"):
                return events
        raise AssertionError(f"no {last}: {(self.folder / 'log').read_text()[-2000:]}")

    def ask(self, command: Mapping[str, Any], last: str) -> list[dict[str, Any]]:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.events(last)

    def complete(self, prompts: list[list[dict[str, str]]], max_tokens: int = 64) -> list[dict[str, Any]]:
        command = {"command": "complete", "prompts": prompts, "temperature": 0.0}
        events = self.ask({**command, "max_completion_tokens": max_tokens, "batch_size": 50}, "completed")
        assert events[-1] == {"event": "completed"}
        assert [len(event["completions"]) for event in events[:-1]] == [
            min(50, len(prompts) - start) for start in range(0, len(prompts), 50)
        ]
        return [line for event in events[:-1] for line in event["completions"]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    workers: list[Worker] = []

    def start_worker(**settings: Any) -> Worker:
        folder = tmp_path / str(len(workers))
        folder.mkdir()
        workers.append(Worker(folder, **settings))
        return workers[-1]

    yield start_worker
    for worker in workers:
        with worker.process:  # closes the pipes and waits
            worker.process.kill()


def test_a_whole_run_from_base_scores_to_scores_of_the_written_weights(start: Any) -> None:
    worker = start(max_steps=3)
    worker.events("ready")
    examples = data.load("validation", 120)
    prompts = [data.messages(example) for example in examples]

    # Before training the base completes, in order; mixed lengths and finished rows must not change an answer.
    before = worker.complete(prompts)
    assert len(before) == 120
    base_score = sum(score(line["text"], e.answer) for line, e in zip(before, examples, strict=True)) / 120
    assert 0.25 < base_score < 0.55
    alone = worker.complete([prompts[77]])[0]
    assert alone == before[77]
    short = worker.complete([prompts[77]], max_tokens=3)[0]
    assert (short["num_tokens"], short["truncated"]) == (3, True)
    assert before[77]["text"].startswith(short["text"])
    base = worker.ask({"command": "load_final_weights"}, "weights")[-1]
    assert base["step"] == 0

    events = worker.ask({"command": "train", "budget_seconds": 300}, "trained")
    trained = events[-1]
    assert (trained["outcome"], trained["num_steps"]) == ("finished", 3)
    assert 0 < trained["peak_memory_gb"] < 16
    rows = [json.loads(line) for line in (worker.folder / "metrics.jsonl").read_text().splitlines()]
    assert [{"event": "step", **row} for row in rows] == events[:-1]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(set(row) == COLUMNS for row in rows)
    assert trained["reward_mean"] == pytest.approx(sum(row["reward_mean"] for row in rows) / 3)
    assert all(row["lr"] == 6e-4 and row["grad_norm"] > 0 and row["kl"] is None for row in rows)

    rollouts = read_rows(worker.folder / SAMPLES_NAME, Sample)
    assert {rollout.step for rollout in rollouts} == {1, 2, 3}
    assert len(rollouts) >= 6  # of each step the best and the worst
    answers = {example.question: example.answer for example in data.load("train", 400)}
    for rollout in rollouts:
        (question,) = (each for each in answers if each in rollout.problem)
        assert rollout.reward == score(rollout.completion, answers[question])

    weights = worker.ask({"command": "load_final_weights"}, "weights")[-1]
    file = worker.folder / "weights" / "model.safetensors"
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert weights == {"event": "weights", "step": 3, "sha256": sha256}
    assert weights["sha256"] != base["sha256"]
    assert not list(worker.folder.glob("*.partial"))
    names = {path.name for path in file.parent.iterdir()}
    assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {file.parent.stat().st_mode & 0o666}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names  # a complete model: vLLM can serve it
    worker.process.stdin.close()  # the parent is gone
    assert worker.process.wait() == 0

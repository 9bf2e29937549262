"""A whole run of the embedded engine's trainer: what it answers before and after, and the files that it writes."""

import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from nightshift_arithmetic import data
from nightshift_arithmetic.scoring import score

from nightshift.campaign.metrics import SAMPLES_NAME, Sample
from nightshift.campaign.records import Completion, Outcome, Progress
from nightshift.config.rules import Decoding
from nightshift.config.train_toml import parse
from nightshift.engines.trl.engine import TrlEngine
from nightshift.files import read_rows
from tests.rules import ARITHMETIC_TRL, ROOT
from tests.waiting import HANG_SECONDS

COLUMNS = {
    "step", "time", "reward_mean", "reward_std", "completion_tokens_mean", "truncated_share", "all_right_share",
    "all_wrong_share", "equal_share", "entropy", "kl", "grad_norm", "lr", "loss", "tokens_per_second",
    "generate_seconds", "train_seconds",
}  # fmt: skip
RULES = replace(ARITHMETIC_TRL, environments=(replace(ARITHMETIC_TRL.environments[0], num_train=400),))
CONFIG = b"max_steps = 3\n[orchestrator]\nbatch_size = 64\ngroup_size = 4\n[trainer.optim]\nlr = 3e-5\n"


@pytest.mark.slow
def test_a_whole_run_from_base_scores_to_scores_of_the_written_weights(tmp_path: Path) -> None:
    examples = data.load("validation", 120)
    prompts = [data.messages(example) for example in examples]
    readings: list[Progress] = []
    engine = TrlEngine(RULES, ROOT, dict(os.environ))
    session = engine.open(engine.validate(parse(CONFIG)).settings, 3, tmp_path, math.inf)

    def complete(chats: list[list[dict[str, str]]], max_tokens: int = 64) -> list[Completion]:
        return session.complete(chats, Decoding(max_tokens, batch_size=50), readings.append)

    try:
        # Before training the base completes, in order; mixed lengths and finished rows must not change an answer.
        before = complete(prompts)
        assert [reading.num_done for reading in readings] == [50, 100, 120]
        base_score = sum(score(one.text, e.answer) for one, e in zip(before, examples, strict=True)) / 120
        assert 0.25 < base_score < 0.55
        assert complete([prompts[77]]) == [before[77]]
        (short,) = complete([prompts[77]], max_tokens=3)
        assert (short.num_tokens, short.truncated) == (3, True)
        assert before[77].text.startswith(short.text)
        base = session.load_final_weights()
        assert base.step == 0
        readings.clear()
        training = session.train(HANG_SECONDS, readings.append)
        weights = session.load_final_weights()
        session._trainer.stdin.close()  # the parent is gone
        assert session._trainer.wait() == 0
    finally:
        session.close()
    assert (training.outcome, training.num_steps) == (Outcome.FINISHED, 3)
    assert 0 < training.peak_memory_gb < 16
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward_mean"]) for row in rows] == [(one.num_steps, one.reward) for one in readings]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(set(row) == COLUMNS for row in rows)
    assert training.reward_mean == pytest.approx(sum(row["reward_mean"] for row in rows) / 3)
    assert all(row["lr"] == pytest.approx(6e-4) and row["grad_norm"] > 0 and row["kl"] is None for row in rows)

    rollouts = read_rows(tmp_path / SAMPLES_NAME, Sample)
    assert {rollout.step for rollout in rollouts} == {1, 2, 3}
    assert len(rollouts) >= 6  # of each step the best and the worst
    answers = {example.question: example.answer for example in data.load("train", 400)}
    for rollout in rollouts:
        (question,) = (each for each in answers if each in rollout.problem)
        assert rollout.reward == score(rollout.completion, answers[question])

    folder = tmp_path / "weights"
    assert weights.step == 3
    assert weights.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() != base.sha256
    assert not list(tmp_path.glob("*.partial"))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {folder.stat().st_mode & 0o666}
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names  # a complete model: vLLM can serve it

"""metrics.jsonl, whatever a killed engine leaves in it; and the files of a real prime-rl, however they are cut."""

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.metrics import Step
from nightshift.engines.prime_rl.metrics import MetricsTail

RECORDED = Path(__file__).parents[1] / "fixtures" / "prime_rl"
FILES = sorted(path.name for path in RECORDED.glob("metrics-*.jsonl"))
AGENT = {"gsm8k": "agent"}
STEPS = {
    "metrics-5-steps.jsonl": range(1, 6),
    "metrics-evals.jsonl": range(0),
    "metrics-first-15-of-40-steps.jsonl": range(1, 16),
    "metrics-resumed.jsonl": range(1, 8),
}


def read(*paths: Path) -> MetricsTail:
    tail = MetricsTail(*paths, seats=AGENT)
    tail.poll()
    return tail


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / name).read_text().splitlines()]


def written(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def is_trainers(row: dict[str, Any]) -> bool:
    return not any(key.startswith(("train/", "eval/")) for key in row)


@pytest.mark.parametrize("name", FILES)
def test_a_recorded_file_read_whole(name: str) -> None:
    tail = read(RECORDED / name)
    steps = tail.steps(began=0.0)
    assert [step.step for step in steps] == list(STEPS[name])
    assert tail.num_steps == len(steps)
    assert tail.not_finite_step() is None
    for step in steps:
        missing = {field.name for field in fields(Step) if getattr(step, field.name) is None}
        unwritten = {"reward_std", "generate_seconds", "rewards", "equal_share", "server_error_share", "branches_mean"}
        assert missing == unwritten, step  # the recorded files have none of them


def test_each_raw_key_lands_in_its_field() -> None:
    rows = rows_of("metrics-5-steps.jsonl")
    raw: dict[str, float] = {}
    for row in rows:
        if row["step"] == 1 and not any(key.startswith("eval/") for key in row):
            raw |= {f"orchestrator {k}" if k == "time/step" and "progress/tokens" in row else k: row[k] for k in row}
    (step, *_) = read(RECORDED / "metrics-5-steps.jsonl").steps(began=raw["time"] - 1000)
    assert step == Step(
        step=1,
        time=pytest.approx(1000.0, abs=0.1),
        reward_mean=raw["train/agg/all/agent/reward/mean"],
        all_right_share=raw["train/agg/all/agent/solved_all"],
        all_wrong_share=raw["train/agg/all/agent/solved_none"],
        completion_tokens_mean=raw["train/agg/all/agent/num_output_tokens/mean"],
        truncated_share=raw["train/agg/all/agent/is_truncated/mean"],
        entropy=raw["entropy/all/mean"],
        kl=raw["mismatch_kl/all/mean"],
        grad_norm=raw["optim/grad_norm"],
        lr=raw["optim/lr"],
        loss=raw["loss/mean"],
        tokens_per_second=pytest.approx(0.032 * raw["train/agg/all/agent/num_output_tokens/mean"], rel=0.01),
        train_seconds=raw["time/forward_backward"],
        broadcast_seconds=raw["time/broadcast_weights"],
        wait_for_rollouts_seconds=raw["time/wait_for_batch"],
        wait_for_policy_seconds=raw["time/wait_for_policy"],
        off_policy_mean=raw["off_policy/mean"],
        masked_share=raw["is_masked/mean"],
        error_share=raw["train/agg/all/has_error/mean"],
    )
    # what was left after the filter flatters the policy, and is another number in this very file
    assert raw["train/agg/effective/agent/reward/mean"] != step.reward_mean


def test_a_file_cut_at_any_byte_invents_nothing_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """One tail reads the file as it grows; at every cut it must know what a fresh reader of the whole lines knows."""
    data = (RECORDED / "metrics-resumed.jsonl").read_bytes()
    path, whole_lines = tmp_path / "metrics.jsonl", tmp_path / "whole.jsonl"
    ends = [index for index, byte in enumerate(data) if byte == ord("\n")]
    near = {end + offset for end in ends for offset in (-1, 0, 1, 2)}
    cuts = sorted({*range(0, len(data), 41), *near, len(data)} & set(range(len(data) + 1)))
    tail, fresh, num_lines = MetricsTail(path, seats=AGENT), MetricsTail(whole_lines, seats=AGENT), 0
    for before, cut in zip([0, *cuts], cuts, strict=False):
        with path.open("ab") as file:
            file.write(data[before:cut])
        tail.poll()
        if data[:cut].count(b"\n") > num_lines:
            num_lines = data[:cut].count(b"\n")
            whole_lines.write_bytes(data[: data[:cut].rindex(b"\n") + 1])
            fresh = read(whole_lines)
        assert tail.steps(0.0) == fresh.steps(0.0), cut


def test_a_step_counts_when_the_trainers_rows_exist_with_an_unknown_reward_without_the_orchestrators(tmp_path):
    recorded = rows_of("metrics-5-steps.jsonl")
    orchestrators = written(tmp_path / "o.jsonl", (row for row in recorded if not is_trainers(row)))
    only = read(orchestrators, tmp_path / "missing.jsonl")
    assert (only.num_steps, only.steps(0.0), only.reward_mean(), only.not_finite_step()) == (0, [], None, None)
    tail = read(written(tmp_path / "a.jsonl", [row for row in recorded if is_trainers(row) or row["step"] < 5]))
    assert [step.reward_mean is None for step in tail.steps(0.0)] == [False, False, False, False, True]
    assert [tail.is_whole(number) for number in range(7)] == [False, True, True, True, True, False, False]
    mean, tail.last_step = tail.reward_mean(), 4
    assert tail.reward_mean() == mean


@pytest.mark.parametrize(("key", "field"), [("loss/mean", "loss"), ("optim/grad_norm", "grad_norm")])
def test_what_became_nan_is_not_measured_and_a_loss_names_its_step(tmp_path, key, field):
    """prime-rl drops values that are no finite numbers (P/monitors/file.py)."""
    rows = rows_of("metrics-5-steps.jsonl")
    rows = [{k: v for k, v in row.items() if k != key or row["step"] < 3} for row in rows]
    tail = read(written(tmp_path / "metrics.jsonl", rows))
    assert [step.step for step in tail.steps(0.0) if getattr(step, field) is None] == [3, 4, 5]
    assert tail.not_finite_step() == (3 if field == "loss" else None)


def test_the_mean_reward_weighs_steps_by_their_rollouts() -> None:
    rows = [row for row in rows_of("metrics-5-steps.jsonl") if "progress/rollouts" in row]
    rewards = [(row["train/agg/all/agent/reward/mean"], row["progress/rollouts"]) for row in rows]
    assert {n for _, n in rewards} == {32, 64}
    expected = sum(reward * n for reward, n in rewards) / sum(n for _, n in rewards)
    tail = read(RECORDED / "metrics-5-steps.jsonl")
    assert tail.reward_mean() == pytest.approx(expected)
    tail.last_step = 1
    assert tail.reward_mean() == pytest.approx(rewards[0][0])


@pytest.mark.parametrize("line", [b"\xff\xfe", b'{"step": "1", "time/forward_backward": 1}', b"[" * 100_000])
def test_a_strange_line_is_passed_over(tmp_path: Path, line: bytes) -> None:
    whole = (RECORDED / "metrics-5-steps.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n" + whole + line)
    assert read(tmp_path / "metrics.jsonl").steps(0.0) == read(RECORDED / "metrics-5-steps.jsonl").steps(0.0)


def test_environments_whose_seats_differ_have_mean_rewards_and_errors_of_every_seat(tmp_path: Path) -> None:
    numbers = {"first/all/agent": 0.25, "second/all/player0": 0.75, "second/all/agent": 0.0, "agg/all/agent": 0.1}
    row = {f"train/{place}/reward/mean": number for place, number in numbers.items()}
    row |= {f"train/agg/all/{seat}/error/ProviderError": 1.0 for seat in ("agent", "player0")}
    trainer = {"step": 1, "time/forward_backward": 1.0, "time": 5.0}
    rows = [trainer, row | {"progress/rollouts": 8, "step": 1}]
    tail = MetricsTail(written(tmp_path / "rows", rows), seats={"first": "agent", "second": "player0"})
    tail.poll()
    [step] = tail.steps(began=0.0)
    assert (step.reward_mean, step.server_error_share) == (0.5, 0.25)
    assert step.rewards == {"first": 0.25, "second": 0.75}

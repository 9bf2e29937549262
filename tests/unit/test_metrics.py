"""metrics.jsonl survives whatever a killed engine leaves in it."""

import json
from pathlib import Path

from nightshift.campaign.metrics import Step, read_steps, write_steps


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    steps = [Step(1, time=0.5, reward_mean=0.25), Step(2, time=1.0, kl=1e-4)]
    write_steps(tmp_path / "metrics.jsonl", steps)
    assert read_steps(tmp_path / "metrics.jsonl") == steps


def test_a_file_cut_at_any_byte_gives_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b"".join(json.dumps({"step": n, "reward_mean": n / 10}).encode() + b"\n" for n in (1, 2, 3))
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = sum(end - 1 <= cut for end in ends)
        assert [step.step for step in read_steps(path)] == list(range(1, complete + 1)), cut


def test_a_step_written_twice_counts_once_and_the_last_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "reward_mean": 0.1}\n{"step": 1}\n{"step": 2, "reward_mean": 0.9}\n')
    assert [(step.step, step.reward_mean) for step in read_steps(path)] == [(1, None), (2, 0.9)]


def test_lines_with_strange_values_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    huge = "1" + "0" * 400
    values = (f'"entropy": {huge}', '"entropy": 1e400', '"loss": NaN', '"loss": Infinity', '"lr": "x"', '"kl": true')
    lines = [f'{{"step": 1, {value}}}' for value in values]
    lines += ["[" * 100_000, "[]", "null", '{"step": "2"}', f'{{"step": {huge}}}', '{"lr": 1}', "\0"]
    path.write_text("\n".join([*lines, '{"step": 3, "surprise": 1}']))
    assert read_steps(path) == [Step(3)]

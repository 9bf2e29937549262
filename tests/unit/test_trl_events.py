"""What the trainer of the trl engine may say, and what becomes of anything else."""

from __future__ import annotations

import json

import pytest

from nightshift.campaign.records import Completion
from nightshift.engines.trl.session import Completions, Ready, Trained, decode_event
from nightshift.errors import EngineError

TRAINED = {
    "event": "trained",
    "outcome": "budget",
    "num_steps": 40,
    "training_seconds": 60.1,
    "reward_mean": None,
    "peak_memory_gb": 0.9,
}


def test_an_event_comes_as_it_was_said() -> None:
    assert decode_event(json.dumps(TRAINED).encode()) == Trained("budget", 40, 60.1, None, 0.9)
    assert decode_event(b'{"event": "ready", "seconds": {"import": 3.5}}') == Ready()
    line = b'{"event": "completions", "completions": [{"text": "\\ud83d\\ude00", "num_tokens": 3, "truncated": true}]}'
    assert decode_event(line) == Completions([Completion("😀", 3, truncated=True)])


@pytest.mark.parametrize(
    "line",
    [
        b"Loading checkpoint shards: 100%",
        b"\xff\xfe",
        b"17",
        b"{}",
        b'{"event": ["step"]}',
        b'{"event": "retired"}',
        b'{"event": "trained"}',
        b'{"event": "step", "step": "two", "time": 1.0, "reward_mean": 0.5}',
        b'{"event": "step", "step": 2, "time": 1.0, "reward_mean": NaN}',
        b"[" * 100_000,
    ],
)
def test_anything_else_is_one_line_about_the_trainer(line: bytes) -> None:
    with pytest.raises(EngineError, match="the trainer said b'") as caught:
        decode_event(line)
    assert len(str(caught.value)) < 1000

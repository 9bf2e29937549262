"""What the worker of the trl engine may say, and what becomes of anything else."""

from __future__ import annotations

import json

import pytest

from nightshift.engines.trl.engine import _event
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
    assert _event(json.dumps(TRAINED).encode()) == TRAINED
    assert _event(b'{"event": "ready", "seconds": {"import": 3.5}}')["event"] == "ready"


@pytest.mark.parametrize(
    "line",
    [
        b"Loading checkpoint shards: 100%",
        b"\xff\xfe",
        b"17",
        b"{}",
        b'{"event": ["step"]}',
        b'{"event": "trained"}',
        b'{"event": "step", "step": "two", "time": 1.0, "reward_mean": 0.5}',
        b'{"event": "step", "step": 2, "time": 1.0, "reward_mean": NaN}',
        b"[" * 100_000,
    ],
)
def test_anything_else_is_one_line_about_the_worker(line: bytes) -> None:
    with pytest.raises(EngineError, match="the worker said b'") as caught:
        _event(line)
    assert len(str(caught.value)) < 1000

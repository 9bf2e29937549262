"""Tests of the reward: run them with `uv run --group dev pytest environments/NAME`."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parent))

from NAME_env import Config, TwoTurns

TASK = next(iter(TwoTurns(Config())))


@pytest.mark.parametrize(("num_right", "score"), [(0, 0.0), (1, 0.5), (2, 1.0)])
def test_each_right_answer_is_rewarded(num_right: int, score: float) -> None:
    replies = [*TASK.data.answers[:num_right], *["no idea"] * (2 - num_right)]
    trace = SimpleNamespace(assistant_messages=[SimpleNamespace(content=reply) for reply in replies])
    assert asyncio.run(TASK.right(trace)) == score


def test_a_conversation_that_ended_early_is_scored() -> None:
    assert asyncio.run(TASK.right(SimpleNamespace(assistant_messages=[]))) == 0.0

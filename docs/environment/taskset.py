"""The same as a verifiers v1 taskset, which prime-rl trains on. It does not hold the test split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from nightshift_gsm8k.harness import ChatHarness

from nightshift_NAME import data, scoring

__all__ = ["ChatHarness", "Taskset"]


class Problem(vf.TaskData):
    """What travels between prime-rl's processes."""

    key: str
    answer: str


class Task(vf.Task[Problem]):
    """Paid by the environment's own scoring."""

    @property
    def key(self) -> str:
        """The example's."""
        return self.data.key

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """0..1."""
        return scoring.score(trace.last_reply, self.data.answer)


class Config(vf.TasksetConfig):
    """Which examples."""

    split: Literal["train", "validation"]
    size: int | None = None
    seed: int = 0


class Taskset(vf.Taskset[Task, Config]):
    """The configured examples."""

    def load(self) -> Iterator[Task]:
        """Each asked exactly as the evaluation does."""
        for index, one in enumerate(data.load(self.config.split, self.config.size, self.config.seed)):
            prompt = data.messages(one)
            yield Task(Problem(idx=index, prompt=prompt, key=one.key, answer=one.answer), self.config.task)

"""The same problems as a verifiers v1 taskset, on which prime-rl trains. It does not contain the test split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from nightshift_gsm8k.harness import ChatHarness

from nightshift_NAME import data, scoring

__all__ = ["ChatHarness", "Taskset"]


class Problem(vf.TaskData):
    """The data of a task, which prime-rl sends between its processes."""

    key: str
    answer: str


class Task(vf.Task[Problem]):
    """A task, rewarded by the environment's own scoring."""

    @property
    def key(self) -> str:
        """The key of the example."""
        return self.data.key

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return the reward, 0 to 1."""
        return scoring.score(trace.last_reply, self.data.answer)


class Config(vf.TasksetConfig):
    """Which examples to load."""

    split: Literal["train", "validation"]
    size: int | None = None
    seed: int = 0


class Taskset(vf.Taskset[Task, Config]):
    """The configured examples."""

    def load(self) -> Iterator[Task]:
        """Yield the tasks, with the prompts that the evaluation uses."""
        for index, example in enumerate(data.load(self.config.split, self.config.size, self.config.seed)):
            prompt = data.messages(example)
            yield Task(Problem(idx=index, prompt=prompt, key=example.key, answer=example.answer), self.config.task)

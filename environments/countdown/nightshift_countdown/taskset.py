"""The countdown environment as a verifiers v1 taskset; it shares the harness and the shape of a task with gsm8k."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from nightshift_gsm8k.taskset import ChatHarness, WordProblemConfig, WordProblemTask, word_problems
from pydantic import Field

from nightshift_countdown import data, scoring

__all__ = ["ChatHarness", "CountdownTaskset"]


class CountdownConfig(WordProblemConfig):
    """`size` has no default: the problems are generated, so there is no such thing as all of them."""

    size: int = Field(ge=1)
    """Number of examples."""
    seed: int = 0
    """Which examples: another seed generates other problems."""


class CountdownTask(WordProblemTask):
    """Right or wrong, by countdown's scoring."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1.0 if the model's last reply reaches the target."""
        return scoring.score(trace.last_reply, self.data.answer)


class CountdownTaskset(vf.Taskset[CountdownTask, CountdownConfig]):
    """Generated countdown problems without the test split."""

    def load(self) -> Iterator[CountdownTask]:
        """The configured problems."""
        for task in word_problems(data, self.config):
            yield CountdownTask(task.data, task.config)

"""The countdown environment as a verifiers v1 taskset. It shares gsm8k's harness and classes."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from nightshift_gsm8k.taskset import ChatHarness, GeneratedConfig, WordProblemTask, word_problems

from nightshift_countdown import data, scoring

__all__ = ["ChatHarness", "CountdownTaskset"]


class CountdownTask(WordProblemTask):
    """A task whose reward is the score of countdown's scoring."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1.0 if the model's last reply reaches the target, else 0.0."""
        return scoring.score(trace.last_reply, self.data.answer)


class CountdownTaskset(vf.Taskset[CountdownTask, GeneratedConfig]):
    """Generated countdown problems without the test split."""

    def load(self) -> Iterator[CountdownTask]:
        """Yield the configured problems."""
        for task in word_problems(data, self.config):
            yield CountdownTask(task.data, task.config)

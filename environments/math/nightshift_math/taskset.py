"""MATH as a verifiers v1 taskset; it shares the harness and the shape of a task with gsm8k."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import verifiers.v1 as vf
from nightshift_gsm8k.taskset import ChatHarness, WordProblemConfig, WordProblemTask, word_problems

from nightshift_math import data, scoring

__all__ = ["ChatHarness", "MathTaskset"]


class MathConfig(WordProblemConfig):
    """`levels` of the problems, as in rules.toml."""

    levels: tuple[int, ...] = data.LEVELS


class MathTask(WordProblemTask):
    """Right or wrong, by math-verify."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1.0 if the model's last reply has the right answer; 0.0 too where that takes too long to tell."""
        with suppress(TimeoutError):
            return scoring.score(trace.last_reply, self.data.answer)
        return 0.0


class MathTaskset(vf.Taskset[MathTask, MathConfig]):
    """MATH without the test split."""

    def load(self) -> Iterator[MathTask]:
        """The configured problems."""
        for task in word_problems(data, self.config, levels=self.config.levels):
            yield MathTask(task.data, task.config)

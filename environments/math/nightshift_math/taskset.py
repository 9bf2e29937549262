"""MATH as a verifiers v1 taskset. It shares gsm8k's harness and classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import verifiers.v1 as vf
from nightshift_gsm8k.taskset import ChatHarness, WordProblemConfig, WordProblemTask, word_problems

from nightshift_math import data, scoring

__all__ = ["ChatHarness", "MathTaskset"]


class MathConfig(WordProblemConfig):
    """Which problems. `levels`: as in rules.toml."""

    levels: tuple[int, ...] = data.LEVELS


class MathTask(WordProblemTask):
    """A task whose reward is the score of math-verify."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1.0 if the model's last reply has the right answer; 0.0 also if the comparison takes too long."""
        with suppress(TimeoutError):
            return scoring.score(trace.last_reply, self.data.answer)
        return 0.0


class MathTaskset(vf.Taskset[MathTask, MathConfig]):
    """MATH without the test split."""

    def load(self) -> Iterator[MathTask]:
        """Yield the configured problems."""
        for task in word_problems(data, self.config, levels=self.config.levels):
            yield MathTask(task.data, task.config)

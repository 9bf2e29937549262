"""The arithmetic environment as a verifiers v1 taskset. Only its data differs from gsm8k's taskset."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from nightshift_gsm8k.taskset import ChatHarness, GeneratedConfig, WordProblemTask, word_problems

from nightshift_arithmetic import data

__all__ = ["ArithmeticTaskset", "ChatHarness"]


class ArithmeticTaskset(vf.Taskset[WordProblemTask, GeneratedConfig]):
    """Generated word problems without the test split."""

    def load(self) -> Iterator[WordProblemTask]:
        """Yield the configured problems."""
        return word_problems(data, self.config)

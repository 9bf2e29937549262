"""The arithmetic environment as a verifiers v1 taskset; it shares all but the data with gsm8k."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from nightshift_gsm8k.taskset import ChatHarness, WordProblemConfig, WordProblemTask, word_problems
from pydantic import Field

from nightshift_arithmetic import data

__all__ = ["ArithmeticTaskset", "ChatHarness"]


class ArithmeticConfig(WordProblemConfig):
    """`size` has no default: the problems are generated, so there is no such thing as all of them."""

    size: int = Field(ge=1)
    """Number of examples."""
    seed: int = 0
    """Which examples: another seed generates other problems."""


class ArithmeticTaskset(vf.Taskset[WordProblemTask, ArithmeticConfig]):
    """Generated word problems without the test split."""

    def load(self) -> Iterator[WordProblemTask]:
        """The configured problems."""
        return word_problems(data, self.config)

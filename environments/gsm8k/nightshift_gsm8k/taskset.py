"""GSM8K as a verifiers v1 taskset, so that prime-rl can train on it; and what every word-problem taskset shares.

The sealed set cannot be loaded from here: nothing that trains has a way to see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.runtimes import Runtime

from nightshift_gsm8k import data, scoring
from nightshift_gsm8k.harness import ChatHarness

__all__ = ["ChatHarness", "Gsm8kTaskset", "WordProblem", "WordProblemConfig", "WordProblemTask", "word_problem"]


class WordProblem(vf.TaskData):
    """What travels between prime-rl's processes: the prompt, the answer, and the example's key."""

    key: str
    answer: str


class WordProblemTask(vf.Task[WordProblem]):
    """Right or wrong, by the environment's own scoring."""

    @property
    def key(self) -> str:
        """The example's key: the same in every split, order and size."""
        return self.data.key

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1.0 if the model's last reply ends in the right number."""
        return scoring.score(trace.last_reply, self.data.answer)

    async def validate(self, runtime: Runtime) -> bool:
        """True if the gold answer scores 1.0; asked by `validate` without a model."""
        return scoring.score(f"#### {self.data.answer}", self.data.answer) == 1.0


class WordProblemConfig(vf.TasksetConfig):
    """`split` has no default: whoever trains says on what."""

    split: Literal["train", "selection"]
    size: int | None = Field(None, ge=1)
    """Number of examples; None = all."""
    seed: int = 0
    """Order of the train split: prime-rl keeps the order in which tasks are loaded."""


class _Example(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def answer(self) -> str: ...


def word_problem(
    index: int, example: _Example, messages: Sequence[Mapping[str, str]], config: vf.TaskConfig
) -> WordProblemTask:
    """One task that asks with `messages`, exactly as the evaluation does."""
    problem = WordProblem(idx=index, prompt=messages, key=example.key, answer=example.answer)
    return WordProblemTask(problem, config)


class Gsm8kConfig(WordProblemConfig):
    """`folder` holds the official files; None = where prepare.py put them."""

    folder: Path | None = None


class Gsm8kTaskset(vf.Taskset[WordProblemTask, Gsm8kConfig]):
    """GSM8K without its official test set."""

    def load(self) -> Iterator[WordProblemTask]:
        """The configured examples. Raises DataError with the command that prepares the data."""
        config = self.config
        for index, example in enumerate(data.load(config.split, config.size, config.seed, config.folder)):
            yield word_problem(index, example, data.messages(example), config.task)

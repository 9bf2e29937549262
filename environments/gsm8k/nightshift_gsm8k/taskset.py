"""GSM8K as a verifiers v1 taskset, so that prime-rl can train on it, and the classes that other tasksets share.

The taskset cannot load the test split, so no trainer can see that split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from nightshift_gsm8k import data, scoring
from nightshift_gsm8k.harness import ChatHarness

__all__ = ["ChatHarness", "Gsm8kTaskset"]


class WordProblem(vf.TaskData):
    """The data of a task that prime-rl's processes exchange."""

    key: str
    answer: str


class WordProblemTask(vf.Task[WordProblem]):
    """A task whose reward is the score of gsm8k's scoring."""

    @property
    def key(self) -> str:
        """The example's key: the same in every split, order and size."""
        return self.data.key

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1.0 if the model's last reply ends in the right number, else 0.0."""
        return scoring.score(trace.last_reply, self.data.answer)


class WordProblemConfig(vf.TasksetConfig):
    """Which examples. `split` has no default: every user of the taskset has to choose."""

    split: Literal["train", "validation"]
    size: int | None = Field(None, ge=1)
    """Number of examples; None = all."""
    seed: int = 0
    """Order of the train split: prime-rl keeps the order in which tasks are loaded."""


class GeneratedConfig(WordProblemConfig):
    """Which generated problems. `size` has no default: a generator has no end."""

    size: int = Field(ge=1)
    """Number of examples."""
    seed: int = 0
    """Which examples: another seed generates other problems."""


def word_problems(data: Any, config: WordProblemConfig, **named: Any) -> Iterator[WordProblemTask]:
    """Yield the configured examples of a package's `data`, with the prompts of the evaluation.

    `named`: further arguments of `data.load`. ValueError: the data is not prepared, or the split has no such size.
    """
    for index, example in enumerate(data.load(config.split, config.size, config.seed, **named)):
        problem = WordProblem(idx=index, prompt=data.messages(example), key=example.key, answer=example.answer)
        yield WordProblemTask(problem, config.task)


class Gsm8kTaskset(vf.Taskset[WordProblemTask, WordProblemConfig]):
    """GSM8K without its official test set."""

    def load(self) -> Iterator[WordProblemTask]:
        """Yield the configured examples."""
        return word_problems(data, self.config)

"""GSM8K as a verifiers v1 taskset, so that prime-rl can train on it; and what every word-problem taskset shares.

The test split cannot be loaded from here: nothing that trains has a way to see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from nightshift_gsm8k import data, scoring
from nightshift_gsm8k.harness import ChatHarness

__all__ = ["ChatHarness", "Gsm8kTaskset", "WordProblem", "WordProblemConfig", "WordProblemTask", "word_problems"]


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


class WordProblemConfig(vf.TasksetConfig):
    """`split` has no default: whoever trains says on what."""

    split: Literal["train", "validation"]
    size: int | None = Field(None, ge=1)
    """Number of examples; None = all."""
    seed: int = 0
    """Order of the train split: prime-rl keeps the order in which tasks are loaded."""


def word_problems(data: Any, config: WordProblemConfig, **named: Any) -> Iterator[WordProblemTask]:
    """The configured examples of a package's `data`, each asked exactly as the evaluation does. `named`: what its
    `load` takes besides.

    Raises ValueError, one line with its fix, for data that is not prepared or a size that the split does not hold.
    """
    for index, example in enumerate(data.load(config.split, config.size, config.seed, **named)):
        problem = WordProblem(idx=index, prompt=data.messages(example), key=example.key, answer=example.answer)
        yield WordProblemTask(problem, config.task)


class Gsm8kTaskset(vf.Taskset[WordProblemTask, WordProblemConfig]):
    """GSM8K without its official test set."""

    def load(self) -> Iterator[WordProblemTask]:
        """The configured examples."""
        return word_problems(data, self.config)

"""GSM8K and other word problems as verifiers v1 tasksets, which cannot load the test split."""

from collections.abc import Iterator
from contextlib import suppress
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


class WordProblemConfig(vf.TasksetConfig):
    """Which examples. `split` has no default: every user of the taskset has to choose."""

    split: Literal["train", "validation"]
    size: int | None = Field(None, ge=1)
    """Number of examples; None = all."""
    seed: int = 0
    """Order of the train split, because prime-rl keeps the order of loading; for generated problems: which problems."""


def taskset_of(data: Any, scoring: Any, kind: type[WordProblemConfig]) -> type[vf.Taskset[Any, Any]]:
    """Return the taskset of a package's modules, with the prompts of the evaluation. Further fields of the config class
    `kind` are further arguments of `data.load`."""
    more = kind.model_fields.keys() - WordProblemConfig.model_fields.keys()

    class WordProblemTask(vf.Task[WordProblem]):
        """A task whose reward is the score of `scoring`."""

        @property
        def key(self) -> str:
            """The example's key: the same in every split, order and size."""
            return self.data.key

        @vf.reward
        async def correct(self, trace: vf.Trace) -> float:
            """Return the score of the model's last reply; 0.0 also if scoring it takes too long."""
            with suppress(TimeoutError):
                return scoring.score(trace.last_reply, self.data.answer)
            return 0.0

    class WordProblems(vf.Taskset[WordProblemTask, kind]):
        """The examples of `data` without the test split."""

        def load(self) -> Iterator[WordProblemTask]:
            """Yield the configured examples. ValueError: the data is not prepared, or the split has no such size."""
            config = self.config
            named = {name: getattr(config, name) for name in more}
            for index, example in enumerate(data.load(config.split, config.size, config.seed, **named)):
                problem = WordProblem(idx=index, prompt=data.messages(example), key=example.key, answer=example.answer)
                yield WordProblemTask(problem, config.task)

    return WordProblems


Gsm8kTaskset = taskset_of(data, scoring, WordProblemConfig)

"""GSM8K and other word problems as verifiers v1 tasksets, which cannot load the test split."""

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field


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


def taskset_of(package: str, kind: type[WordProblemConfig] = WordProblemConfig) -> type[vf.Taskset[Any, Any]]:
    """Return the taskset of a package's `data` and `scoring`, with the prompts of the evaluation. The fields of the
    config class `kind` are the arguments of `data.load`."""
    data, scoring = import_module(f"{package}.data"), import_module(f"{package}.scoring")

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
        def load(self) -> Iterator[WordProblemTask]:
            """Yield the configured examples. ValueError: the data is not prepared, or the split has no such size."""
            arguments = self.config.model_dump(exclude={*vf.TasksetConfig.model_fields})
            for index, example in enumerate(data.load(**arguments)):
                problem = WordProblem(idx=index, prompt=data.messages(example), key=example.key, answer=example.answer)
                yield WordProblemTask(problem, self.config.task)

    return WordProblems


Gsm8kTaskset = taskset_of("nightshift_gsm8k")

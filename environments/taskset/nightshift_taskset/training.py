"""The training set of a taskset, for prime-rl: it reads a package that the installer writes, three lines that call
`training_set`. The validation and the test split never leave `load`."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf

from nightshift_taskset import tasks


class TrainingConfig(vf.TasksetConfig):
    """`seed`: order of the tasks; prime-rl keeps the order in which they are loaded."""

    seed: int = 0


def training_set(spec: Mapping[str, Any]) -> type[vf.Taskset[Any, Any]]:
    """A taskset of `spec`'s training tasks (as process.py reads it, with `module`), whose rewards are scores, 0..1."""
    inner = tasks.open_taskset(importlib.import_module(spec["module"]).__name__, spec["args"])
    kind: Any = type(inner).task_type()

    class TrainingTask(kind):  # type: ignore[misc]
        """The task with its own config, wherever it is rebuilt from its data."""

        def __init__(self, data: Any, config: Any = None) -> None:
            super().__init__(data, inner.config.task)

        async def score(self, trace: Any, runtime: Any = None) -> None:
            """As its own, and then one reward in place of all."""
            await super().score(trace, runtime)
            score = tasks.as_score(float(trace.reward), spec["reward_range"])
            trace.rewards.clear()
            trace.record_reward("score", score)

    class TrainingSet(vf.Taskset[Any, TrainingConfig]):
        """What is left to train on."""

        @classmethod
        def task_type(cls) -> type[vf.Task[Any]]:
            """Of the tasks that `load` yields."""
            return TrainingTask

        def load(self) -> Iterator[vf.Task[Any]]:
            """All of it, in the order of the seed."""
            found = tasks.split(inner, spec["num_validation"], spec["num_train"])["train"]
            random.Random(self.config.seed).shuffle(found)
            for task in found:
                yield TrainingTask(task.data)

    return TrainingSet

"""The training set of a taskset, for prime-rl: it reads a package that the installer writes, three lines that call
`training_set`. The validation and the test split never leave `load`."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf
from pydantic import create_model

from nightshift_taskset import rollouts, tasks, v0


def training_set(spec: Mapping[str, Any]) -> tuple[type[vf.Taskset[Any, Any]], type[vf.Env[Any]]]:
    """Return a taskset of `spec`'s training tasks (as process.py reads it, with `module`), and the package's own Env
    with rewards that are scores, 0..1."""
    name, spec = v0.adapted(importlib.import_module(spec["module"]).__name__, spec)
    inner = tasks.open_taskset(name, spec)
    kind: Any = type(inner).task_type()
    settings = inner.config.task
    # `seed`: order of the tasks; prime-rl keeps the order in which they are loaded.
    config: Any = create_model(
        "TrainingConfig", __base__=vf.TasksetConfig, seed=(int, 0), task=(type(settings), settings)
    )

    class TrainingTask(kind):  # type: ignore[misc]
        """The task with its own config, wherever it is rebuilt from its data."""

        def __init__(self, data: Any, config: Any = None) -> None:
            super().__init__(data, settings)

    class TrainingSet(vf.Taskset[Any, config]):  # type: ignore[valid-type]
        """What is left to train on."""

        @classmethod
        def task_type(cls) -> type[vf.Task[Any]]:
            """Of the tasks that `load` yields."""
            return TrainingTask

        @classmethod
        def toolsets(cls, config: Any) -> list[Any]:
            """The package's own."""
            return type(inner).toolsets(inner.config)

        def load(self) -> Iterator[vf.Task[Any]]:
            """All of it, in the order of the seed."""
            found = tasks.split(inner, spec)["train"]
            random.Random(self.config.seed).shuffle(found)
            for task in found:
                yield TrainingTask(task.data)

    class TrainingEnv(rollouts.environment_type(name, spec)):  # type: ignore[misc]
        """The package's own, with one reward in place of all."""

        async def finalize(self, task: vf.Task[Any], episode: vf.Episode) -> None:
            """As its own, and then scores. A reward that is no score fails the episode."""
            await super().finalize(task, episode)
            for trace in episode.traces if all(trace.ok for trace in episode.traces) else ():
                score = tasks.as_score(float(trace.reward), spec["reward_range"])
                trace.rewards.clear()
                trace.record_reward("score", score)

    return TrainingSet, TrainingEnv

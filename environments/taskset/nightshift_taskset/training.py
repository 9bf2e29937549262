"""The training set of a taskset for prime-rl. The installer writes a package of three lines that calls `training_set`.

Validation and test tasks never leave `load`.
"""

import importlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf
from pydantic import create_model

from nightshift_taskset import rollouts, tasks, v0


def training_set(spec: Mapping[str, Any]) -> tuple[type[vf.Taskset[Any, Any]], type[vf.Env[Any]]]:
    """Return a taskset of the training tasks of the package `module`, and its Env with scores, 0..1, as rewards."""
    name, spec = v0.adapted(importlib.import_module(spec["module"]).__name__, spec)
    inner = tasks.open_taskset(name, spec)
    kind: Any = type(inner).task_type()
    settings = inner.config.task
    fields: Any = {"seed": (int, 0), "task": (type(settings), settings)}  # prime-rl keeps the order of loading
    config: Any = create_model("TrainingConfig", __base__=vf.TasksetConfig, **fields)

    class TrainingTask(kind):  # type: ignore[misc]
        """The package's task, which keeps its config when prime-rl rebuilds it from its data."""

        def __init__(self, data: Any, config: Any = None) -> None:
            super().__init__(data, settings)

    class TrainingSet(vf.Taskset[TrainingTask, config]):  # type: ignore[valid-type]
        @classmethod
        def toolsets(cls, config: Any) -> list[Any]:
            return type(inner).toolsets(inner.config)

        def load(self) -> Iterator[vf.Task[Any]]:
            """Yield the training tasks in the order of the seed."""
            training = tasks.split(inner, spec)["train"]
            random.Random(self.config.seed).shuffle(training)
            yield from (TrainingTask(task.data) for task in training)

    class TrainingEnv(rollouts.environment_type(name, spec)):  # type: ignore[misc]
        async def finalize(self, task: vf.Task[Any], episode: vf.Episode) -> None:
            """Finalize as the package does; the score replaces all rewards. A reward outside its range is an error."""
            await super().finalize(task, episode)
            for trace in episode.traces if all(trace.ok for trace in episode.traces) else ():
                score = tasks.as_score(float(trace.reward), spec["reward_range"])
                trace.rewards.clear()
                trace.record_reward("score", score)

    return TrainingSet, TrainingEnv

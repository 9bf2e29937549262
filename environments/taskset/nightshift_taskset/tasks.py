"""Check verifiers tasksets, split their tasks into three sets, and score answers.

A task is accepted if its prompt is text and its reward is a function of the trace, without a judge or a container. With
`max_turns` = 1 a task is one question and one answer. With more turns a package may have its own Env, several seats and
local tools. Every other taskset is Refused. The split is by a hash of `Task.key`, so the order of loading has no
effect.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.trace import AgentInfo, VersionInfo
from verifiers.v1.types import content_text
from verifiers.v1.utils import loaders

MOST_TASKS = 5_000_000
ROUNDING = 1e-6  # error of a sum of weighted rewards
Message = dict[str, str]


class Refused(ValueError):
    """The taskset, or a reward, cannot be used. The message is one line with the cause and the fix."""


def import_package(place: Path) -> str:
    """Import a package, a folder or one file, from exactly this path. Return its name."""
    name, folder = place.stem, place if place.is_dir() else None
    source = place / "__init__.py" if folder else place
    inside = [str(folder)] if folder else None
    spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=inside)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return name


def open_taskset(name: str, spec: Mapping[str, Any]) -> vf.Taskset[Any, Any]:
    """Return the taskset of an imported package, with `args` of `spec` as its config."""
    environment, seats = loaders.environment_class(name), seats_of(name)
    for kind in (environment, loaders.taskset_class(name)):
        built_in = next((base for base in kind.__mro__ if base.__module__.startswith(_BUILT_IN)), vf.SingleAgentEnv)
        if built_in is not vf.SingleAgentEnv:
            raise Refused(_BUILT_ON.format(kind.__name__, built_in.__name__))
    for seat, agent in seats.items():
        if agent.model or agent.client:
            raise Refused(f"the seat {seat} of {name} is another model: {agent.model or agent.client}. {_NO_MODEL}")
    config = loaders.taskset_config_type(name)(id=name, **spec["args"])
    taskset = loaders.load_taskset(config)
    _check_kind(taskset.task_type(), config.task, spec)
    _check_tools(taskset, taskset.toolsets(config), spec)
    if environment is not vf.SingleAgentEnv and spec["max_turns"] == 1:
        raise Refused(f"{name} plays its own {environment.__name__}: several turns or several agents. {_SEVERAL}")
    if spec["seat"] not in (seats if [*seats] != ["agent"] else ("", "agent")):
        raise Refused(f'{name} has the seats {", ".join(seats)}. Write which one scores: seat = "{next(iter(seats))}".')
    return taskset


def seats_of(name: str) -> dict[str, vf.AgentConfig]:
    """Return the seats of a package's environment, by name."""
    fields = loaders.env_config_type(name).model_fields
    return {seat: field.default for seat, field in fields.items() if isinstance(field.default, vf.AgentConfig)}


_BUILT_IN = ("verifiers.v1.envs.", "verifiers.v1.tasksets.")
_BUILT_ON = (
    "{} is built on verifiers' {}, which is not accepted. Choose an environment that scores one policy and needs no"
    " other engine."
)
_SEVERAL = "Write max_turns = 8 (the most answers in an episode) in its table of rules.toml; the engine is prime-rl."
_NO_MODEL = "Choose an environment in which the trained policy has every seat."
_NO_BOX = "Choose a taskset whose reward is a function of the trace."


def _check_tools(owner: Any, servers: Sequence[Any], spec: Mapping[str, Any]) -> None:
    """Raise Refused for tools that run elsewhere, and for all tools if one answer is scored."""
    kind = (owner if isinstance(owner, type) else type(owner)).__name__
    for server in servers:
        name = type(server).__name__
        if server.config.url or server.config.runtime.type != "subprocess":
            place = server.config.url or f"in a {server.config.runtime.type} container"
            raise Refused(f"{kind} needs the tools {name} {place}. Choose a taskset whose tools run on this machine.")
        if spec["max_turns"] == 1:
            raise Refused(f"{kind} needs tools: {name}. {_SEVERAL}")
        if not spec["tool_parser"]:
            fix = 'Write vLLM\'s tool parser for the model: tool_parser = "hermes".'
            raise Refused(f"{kind} needs tools: {name}. {fix}")


def _check_kind(kind: type[vf.Task[Any]], config: vf.TaskConfig, spec: Mapping[str, Any]) -> None:
    """Raise Refused for a class of tasks that cannot be used. This check needs no data."""
    judges = [value for _, value in config if isinstance(value, vf.JudgeConfig)]
    for judge in (*config.judges, *judges):
        raise Refused(f"{kind.__name__} asks a judge: {judge.id or judge.model}. Choose a taskset without one.")
    if kind.NEEDS_CONTAINER:
        raise Refused(f"{kind.__name__} needs a container: NEEDS_CONTAINER. {_NO_BOX}")
    for hook in ("setup", "finalize"):
        if getattr(kind, hook) is not getattr(vf.Task, hook):
            raise Refused(f"{kind.__name__} prepares or reads a container in {hook}(). {_NO_BOX}")
    _check_tools(kind, kind.toolsets(config), spec)


def check(task: vf.Task[Any], spec: Mapping[str, Any]) -> None:
    """Raise Refused for a task that needs more than `spec` allows."""
    kind = type(task)
    _check_kind(kind, task.config, spec)
    if task.data.image:
        raise Refused(f"{kind.__name__} needs a container: {task.data.image}. {_NO_BOX}")
    rewards, several = task.hooks("reward"), spec["max_turns"] > 1
    for function in (*rewards, *task.hooks("metric")):
        parameter = inspect.signature(function).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise Refused(f"{kind.__name__}.{function.__name__} needs a runtime, which is a container. {_NO_BOX}")
    if not (rewards or several):  # an Env of its own may record them
        raise Refused(f"{kind.__name__} has no reward. Mark a method of it with @vf.reward.")
    if not chat(task) and not several:
        raise Refused(f"{kind.__name__} has a task without a prompt: a scripted user asks. {_SEVERAL}")


def chat(task: vf.Task[Any]) -> list[Message]:
    """Return the messages of the prompt, the system prompt first; [] without a prompt. Refused if a message is not
    text."""
    data, kind = task.data, type(task).__name__
    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or ())
    if not prompt:
        return []
    messages = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    for message in prompt:
        content = message.content
        is_text = isinstance(content, str) or all(part.type == "text" for part in content or ())
        if message.role not in ("system", "user", "assistant") or not is_text:
            cause = f"{kind} has a prompt with {message.role} content that is not text"
            raise Refused(f"{cause}. Choose a taskset whose prompts are text.")
        messages.append({"role": message.role, "content": content_text(content)})
    return messages


def key_of(task: vf.Task[Any]) -> str:
    """Return a task's own `key`, else its prompt, else its data. The default of verifiers, a hash of all data, includes
    the position of the task."""
    is_own = type(task).key is not vf.Task.key  # type: ignore[comparison-overlap]
    return task.key if is_own else json.dumps(chat(task) or _data(task), sort_keys=True)


def _data(task: vf.Task[Any]) -> dict[str, Any]:
    data: dict[str, Any] = task.data.model_dump(mode="json", exclude={"idx"})
    return data


def digest(*parts: str) -> str:
    """Return 64 hex digits over texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def identity(task: vf.Task[Any]) -> str:
    """Return 16 hex digits over the key and the data of a task: another answer makes another example."""
    return digest(key_of(task), json.dumps(_data(task), sort_keys=True))[:16]


def split(taskset: vf.Taskset[Any, Any], spec: Mapping[str, Any]) -> dict[str, list[vf.Task[Any]]]:
    """Return the tasks of `validation`, `test` (the same size) and `train`, in the order of the hash of their keys.

    Among tasks without a key of their own and with the same prompt, one is used. Refused for too few tasks, for a key
    that occurs twice, and for an infinite taskset without num_train.
    """
    num_validation, num_train = spec["num_validation"], spec["num_train"]
    if taskset.INFINITE and num_train is None:
        raise Refused(f"{type(taskset).__name__} has no end of tasks. Write num_train = 1000 below num_validation.")
    most = 2 * num_validation + (num_train or 0) if taskset.INFINITE else MOST_TASKS
    kept: dict[str, vf.Task[Any]] = {}
    for task in itertools.islice(taskset, MOST_TASKS):
        check(task, spec)
        other = kept.setdefault(key := key_of(task), task)
        if other is not task and type(task).key is not vf.Task.key:  # type: ignore[comparison-overlap]
            raise Refused(f"the key {key[:80]!r} occurs more than once. Give each task a `key` of its own.")
        kept[key] = min(other, task, key=identity)  # independent of the order of loading
        if len(kept) == most:
            break
    tasks = list(kept.values())
    if len(tasks) < 2 * num_validation + 1:
        cause = f"{len(tasks)} tasks are too few: validation and test need {2 * num_validation}, training needs one"
        raise Refused(f"{cause}. Lower num_validation, or name a taskset with more tasks.")
    tasks.sort(key=lambda task: digest(key_of(task)))
    train = tasks[2 * num_validation :]
    if num_train is not None and len(train) < num_train:
        raise Refused(f"num_train = {num_train}, and {len(train)} tasks are left to train on. Lower num_train.")
    return {
        "validation": tasks[:num_validation],
        "test": tasks[num_validation : 2 * num_validation],
        "train": train[:num_train],
    }


def reward_of(task: vf.Task[Any], text: str) -> float:
    """Return the task's own reward for a trace of its prompt and one answer. Errors of the reward are passed on."""
    prompt = [_MESSAGES[message["role"]](content=message["content"]) for message in chat(task)]
    messages = [*prompt, vf.AssistantMessage(content=text)]
    origin = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace: Any = vf.Trace(
        task=origin,
        agent=AgentInfo(config=vf.AgentConfig()),
        verifiers=VersionInfo(version=""),  # by default each trace starts a git process to find the commit
        nodes=[
            vf.MessageNode(parent=index - 1 if index else None, message=message, sampled=index == len(prompt))
            for index, message in enumerate(messages)
        ],
        is_completed=True,
        ok=True,
    )
    _loop().run_until_complete(task.score(trace))
    return float(trace.reward)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()  # for all answers: making a loop takes half the time of scoring


_MESSAGES = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}


def as_score(reward: float, reward_range: Sequence[float]) -> float:
    """Return the reward as a score, 0..1. Refused for a reward that is not finite or outside its range."""
    if not math.isfinite(reward):
        raise Refused(f"a reward is {reward}. Return a finite number from each reward.")
    low, high = reward_range
    score = (reward - low) / (high - low)
    if not -ROUNDING <= score <= 1 + ROUNDING:
        fix = "Write reward_range = [lowest, highest] for this environment."
        raise Refused(f"a reward of {reward:g} lies outside {low:g}..{high:g}. {fix}")
    return min(max(score, 0.0), 1.0)

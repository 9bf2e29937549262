"""Check verifiers tasksets, split their tasks into three sets, and score answers.

A task is accepted if its prompt is text and its reward is a function of the trace, without a judge or a container. With
`max_turns` = 1 a task is one question and one answer. With more turns a package may have its own Env, several seats and
local tools. The split is by a hash of `Task.key`, so the order of loading has no effect.
"""

import asyncio
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import parse_message
from verifiers.v1.trace import AgentInfo, VersionInfo
from verifiers.v1.types import content_text
from verifiers.v1.utils import loaders

ROUNDING = 1e-6  # error of a sum of weighted rewards
_DEFAULT_KEY: Any = vf.Task.key  # a hash of all data, with the position of the task
_BUILT_IN = ("verifiers.v1.envs.", "verifiers.v1.tasksets.")
_SEVERAL = "Write max_turns = 8 (the most answers in an episode) in its table of rules.toml; the engine is prime-rl"
_PARSER = 'Write vLLM\'s tool parser for the model: tool_parser = "hermes"'
_POLICY = "Choose an environment in which the trained policy plays every seat"
_ENV = "Choose an environment that scores one policy and needs no other engine"
_TRACE = "Choose a taskset whose reward is a function of the trace"
_LOCAL = "Choose a taskset whose tools run on this machine"


class Refused(ValueError):
    """The taskset, or a reward, cannot be used. The message is one line with the cause and the fix."""


def refuse(name: str, *reasons: tuple[Any, str, str]) -> None:
    """Raise Refused for the first of the reasons (condition, cause, fix) whose condition is true."""
    for condition, cause, fix in reasons:
        if condition:
            raise Refused(f"{name} {cause}. {fix}.")


def import_package(place: Path) -> str:
    """Import a package, a folder or one file, from exactly this path. Return its name."""
    source, inside = (place / "__init__.py", [str(place)]) if place.is_dir() else (place, None)
    spec: Any = importlib.util.spec_from_file_location(place.stem, source, submodule_search_locations=inside)
    sys.modules[place.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return place.stem


def open_taskset(name: str, spec: Mapping[str, Any]) -> vf.Taskset[Any, Any]:
    """Return the taskset of an imported package, with `args` of `spec` as its config."""
    environment, seats = loaders.environment_class(name), seats_of(name)
    bases = [base for kind in (environment, loaders.taskset_class(name)) for base in kind.__mro__]
    bases = [base for base in bases if base.__module__.startswith(_BUILT_IN) and base is not vf.SingleAgentEnv]
    models = [str(agent.model or agent.client) for agent in seats.values() if agent.model or agent.client]
    refuse(
        name,
        (bases, f"is built on verifiers' {bases and bases[0].__name__}, which is not accepted", _ENV),
        (models, f"has a seat with another model: {', '.join(models)}", _POLICY),
    )
    config = loaders.taskset_config_type(name)(id=name, **spec["args"])
    taskset = loaders.load_taskset(config)
    _check_class(taskset.task_type(), config.task, spec, taskset.toolsets(config))
    is_own = environment is not vf.SingleAgentEnv and spec["max_turns"] == 1
    is_unknown = spec["seat"] not in (seats if [*seats] != ["agent"] else ("", "agent"))
    refuse(
        name,
        (is_own, f"plays its own {environment.__name__}: several turns or several agents", _SEVERAL),
        (is_unknown, f"has the seats {', '.join(seats)}", f'Write which one scores: seat = "{next(iter(seats))}"'),
    )
    return taskset


def seats_of(name: str) -> dict[str, vf.AgentConfig]:
    """Return the seats of a package's environment, by name."""
    fields = loaders.env_config_type(name).model_fields
    return {seat: field.default for seat, field in fields.items() if isinstance(field.default, vf.AgentConfig)}


def _check_class(kind: type[vf.Task[Any]], config: Any, spec: Mapping[str, Any], shared: Sequence[Any] = ()) -> None:
    """Raise Refused for a class of tasks, or for `shared` tools, that cannot be used. This check needs no data."""
    judges = [*config.judges, *(value for _, value in config if isinstance(value, vf.JudgeConfig))]
    models = ", ".join(str(judge.id or judge.model) for judge in judges)
    hooks = [hook for hook in ("setup", "finalize") if getattr(kind, hook) is not getattr(vf.Task, hook)]
    tools = [(type(server).__name__, server.config) for server in (*shared, *kind.toolsets(config))]
    places = [(tool, config.url or config.runtime.type) for tool, config in tools]
    remote, names = [f"{tool} ({place})" for tool, place in places if place != "subprocess"], ", ".join(dict(tools))
    refuse(
        kind.__name__,
        (judges, f"asks a judge: {models}", _TRACE),
        (kind.NEEDS_CONTAINER, "needs a container: NEEDS_CONTAINER", _TRACE),
        (hooks, f"prepares or reads a container in {', '.join(hooks)}", _TRACE),
        (remote, f"needs the tools {', '.join(remote)}", _LOCAL),
        (tools and spec["max_turns"] == 1, f"needs tools: {names}", _SEVERAL),
        (tools and not spec["tool_parser"], f"needs tools: {names}", _PARSER),
    )


def check(task: vf.Task[Any], spec: Mapping[str, Any]) -> None:
    """Raise Refused for a task that needs more than `spec` allows."""
    _check_class(type(task), task.config, spec)
    rewards, metrics, is_single = task.hooks("reward"), task.hooks("metric"), spec["max_turns"] == 1
    runtimes = {hook.__name__: inspect.signature(hook).parameters.get("runtime") for hook in rewards + metrics}
    boxed = [name for name, runtime in runtimes.items() if runtime and runtime.default is runtime.empty]
    refuse(
        type(task).__name__,
        (task.data.image, f"needs a container: {task.data.image}", _TRACE),
        (boxed, f"needs a runtime, which is a container, in {', '.join(boxed)}", _TRACE),
        (is_single and not rewards, "has no reward", "Mark a method of it with @vf.reward"),  # an Env may record one
        (not chat(task) and is_single, "has a task without a prompt: a scripted user asks", _SEVERAL),
    )


def chat(task: vf.Task[Any]) -> list[dict[str, str]]:
    """Return the messages of the prompt, the system prompt first; [] without a prompt. Refused if one is not text."""
    data = task.data
    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else [*(data.prompt or ())]
    if prompt and data.system_prompt is not None:
        prompt.insert(0, vf.SystemMessage(content=data.system_prompt))
    for message in prompt:
        parts = message.content if isinstance(message.content, list) else ()
        is_other = message.role == "tool" or any(part.type != "text" for part in parts)
        cause = f"has a prompt with {message.role} content that is not text"
        refuse(type(task).__name__, (is_other, cause, "Choose a taskset whose prompts are text"))
    return [{"role": message.role, "content": content_text(message.content)} for message in prompt]


def key_of(task: vf.Task[Any]) -> str:
    """Return a task's own `key`, else its prompt, else its data."""
    has_key = type(task).key is not _DEFAULT_KEY
    return task.key if has_key else json.dumps(chat(task) or _data(task), sort_keys=True)


def _data(task: vf.Task[Any]) -> Any:
    return task.data.model_dump(mode="json", exclude={"idx"})


def identity(task: vf.Task[Any]) -> str:
    """Return 16 hex digits over the key and the data of a task: another answer makes another example."""
    text = f"{key_of(task)}\0{json.dumps(_data(task), sort_keys=True)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def split(taskset: vf.Taskset[Any, Any], spec: Mapping[str, Any]) -> dict[str, list[vf.Task[Any]]]:
    """Return the tasks of `validation`, `test` (the same size) and `train`, in the order of the hash of their keys.

    Among tasks without a key of their own and with the same prompt, one is used. Refused for too few tasks, for a key
    that occurs twice, and for an infinite taskset without num_train.
    """
    num_held_out, num_train, name = 2 * spec["num_validation"], spec["num_train"], type(taskset).__name__
    is_endless = taskset.INFINITE and num_train is None
    refuse(name, (is_endless, "has no end of tasks", "Write num_train = 1000 below num_validation"))
    kept: dict[str, vf.Task[Any]] = {}
    for task in taskset:
        check(task, spec)
        other = kept.setdefault(key := key_of(task), task)
        is_twice = other is not task and type(task).key is not _DEFAULT_KEY
        refuse(name, (is_twice, f"has the key {key[:80]!r} more than once", "Give each task a `key` of its own"))
        kept[key] = min(other, task, key=identity)  # independent of the order of loading
        if taskset.INFINITE and len(kept) == num_held_out + num_train:
            break
    tasks = [kept[key] for key in sorted(kept, key=lambda key: hashlib.sha256(key.encode()).digest())]
    num_left = len(tasks) - num_held_out
    needed = f"validation and test need {num_held_out}, training needs {num_train or 1}"
    fix = "Lower num_validation or num_train, or name a taskset with more tasks"
    refuse(name, (num_left < (num_train or 1), f"has too few tasks: {len(tasks)}; {needed}", fix))
    return {
        "validation": tasks[: num_held_out // 2],
        "test": tasks[num_held_out // 2 : num_held_out],
        "train": tasks[num_held_out:][:num_train],
    }


def reward_of(task: vf.Task[Any], text: str) -> float:
    """Return the task's own reward for a trace of its prompt and one answer. Errors of the reward are passed on."""
    messages = [*map(parse_message, chat(task)), vf.AssistantMessage(content=text)]
    nodes = [
        vf.MessageNode(parent=index - 1 if index else None, message=message, sampled=message is messages[-1])
        for index, message in enumerate(messages)
    ]
    origin = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent, version = AgentInfo(config=vf.AgentConfig()), VersionInfo(version="")  # by default git reports the version
    trace: Any = vf.Trace(task=origin, agent=agent, verifiers=version, nodes=nodes, is_completed=True, ok=True)
    _loop().run_until_complete(task.score(trace))
    return float(trace.reward)


_loop = functools.cache(asyncio.new_event_loop)  # for all answers: making a loop takes half the time of scoring


def as_score(reward: float, reward_range: Sequence[float]) -> float:
    """Return the reward as a score, 0..1. Refused for a reward that is not finite or outside its range."""
    low, high = reward_range
    score = (reward - low) / (high - low)
    is_outside = not -ROUNDING <= score <= 1 + ROUNDING
    refuse(
        f"a reward of {reward:g}",
        (not math.isfinite(reward), "is not a finite number", "Return a finite number from each reward"),
        (is_outside, f"lies outside {low:g}..{high:g}", "Write reward_range = [lowest, highest] for this environment"),
    )
    return min(max(score, 0.0), 1.0)

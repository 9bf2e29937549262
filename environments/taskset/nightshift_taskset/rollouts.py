"""Play episodes with verifiers' own rollouts, as prime-rl does in training.

Each seat gets this project's harness, the subprocess runtime, a limit of turns, and all of verifiers' timeouts.
Verifiers does not end code that blocks the event loop, so a signal handler raises Blocked in such code.
"""

import asyncio
import math
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import verifiers.v1 as vf
from nightshift_gsm8k.harness import CONNECT_SECONDS, TOOL_FAILED, ChatHarness
from pydantic import create_model
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.configs.env import TimeoutConfig
from verifiers.v1.runtimes import subprocess as local_runtime
from verifiers.v1.utils import loaders

from nightshift_taskset.tasks import Refused, as_score, seats_of

HARNESS = "nightshift_gsm8k"
SETUP_SECONDS = 60.0  # to start tool servers, also on a busy machine
SCORING_SECONDS = 10.0
BLOCKED_SECONDS = 10.0
PULSE_SECONDS = 1.0
_WAITED = Path("/proc/self/schedstat")  # second number: nanoseconds that the first thread waited for a core
# The message of verifiers with pydantic's words if the policy wrote half a character.
_HALF_CHARACTER = re.compile(r"malformed upstream response.*(hex escape|unicode code point)", re.DOTALL)

Send = Callable[[dict[str, Any]], None]


class Blocked(BaseException):
    """Code did not return to the event loop. A BaseException, so that no `except Exception` of a reward catches it."""


def environment_type(name: str, spec: Mapping[str, Any]) -> type[vf.Env[Any]]:
    """Return the Env class of a package, by default SingleAgentEnv, with the limits of `spec` for each seat."""
    base, config = loaders.environment_class(name), loaders.env_config_type(name)
    seconds, after = spec["episode_seconds"], {"finalize": SCORING_SECONDS}
    limits = {
        "harness": {"id": HARNESS},
        "runtime": {"type": "subprocess"},  # the default is a paid remote sandbox
        "timeout": {"setup": SETUP_SECONDS, "rollout": seconds, "scoring": SCORING_SECONDS, **after},
    }
    fields: dict[str, Any] = {"timeout": (TimeoutConfig, TimeoutConfig(episode=seconds + SETUP_SECONDS, **after))}
    for seat, default in seats_of(name).items():
        limits["max_turns"] = min(spec["max_turns"], default.max_turns or spec["max_turns"])
        # A seat's sampling would replace the greedy decoding of the evaluation.
        settings = default.model_dump(exclude_none=True, exclude={"sampling"}) | limits
        fields[seat] = (config.model_fields[seat].annotation, type(default)(**settings))
    bounded = create_model("BoundedConfig", __base__=config, **fields)

    class BoundedEnv(base, vf.Env[bounded]):  # type: ignore[misc, valid-type]
        """The package's Env with limits."""

    return BoundedEnv


def play(
    name: str, spec: Mapping[str, Any], tasks: Mapping[str, vf.Task[Any]], request: Mapping[str, Any], send: Send
) -> dict[str, Any]:
    """Play an episode of each task, `{key: task}`, of an imported package against a server.

    `send` gets each episode, and a pulse every second. `request`: `base_url`, `model`, `temperature` and `max_tokens`
    of the policy, `concurrency`, `stall_seconds`, the `seat` that scores and its `reward_range`. Refused: requests
    waited and none was answered for `stall_seconds`.
    """
    local_runtime.CACHE_DIR = local_runtime.Path.cwd()  # no folders of rollouts in the user's cache
    eval_client.DEFAULT_TIMEOUT = httpx.Timeout(None, connect=CONNECT_SECONDS)  # a busy machine exceeds verifiers' 5 s
    kind = environment_type(name, spec)
    config = loaders.concrete_type(kind, vf.EnvConfig, origin=vf.Env)
    asyncio.run(_play(kind(config(taskset={"id": name, **spec["args"]})), tasks, request, send))
    return {"finished": True}


class _Watch:
    """Raise Blocked in code that blocks the event loop, and report it at once: other episodes may block, too."""

    def __init__(self, send: Send) -> None:
        self._send = send
        signal.signal(signal.SIGALRM, self._ring)

    async def pulse(self, stall_seconds: float) -> None:
        """Send a sign of life each second. Refused if the server stalls: each episode would score 0 at its limit."""
        num_silent = num_answered = 0
        while True:
            self._began = _own_time()
            signal.setitimer(signal.ITIMER_REAL, BLOCKED_SECONDS, PULSE_SECONDS)
            self._send({})
            await asyncio.sleep(PULSE_SECONDS)
            is_silent = ChatHarness.waiting and ChatHarness.answered == num_answered
            num_silent, num_answered = num_silent + 1 if is_silent else 0, ChatHarness.answered
            if num_silent * PULSE_SECONDS >= stall_seconds:
                raise Refused(f"the server answered no request for {stall_seconds:g} s")

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if _own_time() - self._began >= BLOCKED_SECONDS:
            self._began = _own_time()
            cause = f"blocked the event loop for {BLOCKED_SECONDS:g} s"
            self._send({"blocked": cause})
            raise Blocked(cause)


def _own_time() -> float:
    """Return monotonic seconds without the time in which this thread waited for a core."""
    waited = int(_WAITED.read_text().split()[1]) / 1e9 if _WAITED.exists() else 0.0
    return time.monotonic() - waited


async def _play(env: vf.Env[Any], tasks: Mapping[str, vf.Task[Any]], request: Mapping[str, Any], send: Send) -> None:
    client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var="NO_KEY")
    sampling = vf.SamplingConfig(temperature=request["temperature"], max_tokens=request["max_tokens"])
    context = vf.ModelContext(model=request["model"], client=client, sampling=sampling)
    gate = asyncio.Semaphore(request["concurrency"])

    async def play_one(key: str, task: vf.Task[Any]) -> None:
        (slot,) = env.slots(task)
        try:
            result = _episode(await env.run_slot(slot, context, gate), request)
        except Blocked as error:
            result = {"failed": f"Blocked: {error}"}
        send({"episode": {"key": key, **result}})

    pulse = asyncio.create_task(_Watch(send).pulse(request["stall_seconds"]))
    try:
        async with env.serving():
            players = asyncio.gather(*(play_one(key, task) for key, task in tasks.items()))
            await asyncio.wait({pulse, players}, return_when=asyncio.FIRST_COMPLETED)
            if pulse.done():
                players.cancel()
                await pulse
            await players
    finally:
        pulse.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _episode(episode: vf.Episode, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of an episode for the seat that scores. An episode with an error has no score."""
    result: dict[str, Any] = {}
    traces = {trace.agent.name: trace for trace in reversed(episode.traces)}  # the first of each seat
    if trace := traces.get(request["seat"]):
        replies = [message.content or "" for message in trace.assistant_messages]
        answers = [str(message.content) for message in trace.tool_messages]
        result = {
            "text": "".join(replies) if trace.num_turns < 2 else trace.transcript,
            "num_tokens": trace.num_output_tokens,
            "truncated": trace.is_truncated or any(call.finish_reason == "length" for call in trace.calls),
            "turns": trace.num_turns,
            "tool_calls": len(answers),
            "tool_errors": sum(answer.startswith(TOOL_FAILED) for answer in answers),
        }
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        error = next(iter(errors), vf.Error(type="Episode", message="not ok"))
        is_server = error.type == "ProviderError" and (error.status_code or 0) >= 500
        is_server = is_server and not _HALF_CHARACTER.search(error.message)
        cause = f"{error.type}: {error.message or f'no answer, {error.status_code}'}"
        return result | {"failed": cause, "is_server_fault": is_server}
    if trace is None or len(traces) < len(episode.traces):  # a comparison of answers is not a score of one task
        times = Counter(trace.agent.name for trace in episode.traces)
        played = ", ".join(f"{seat} {num}" for seat, num in times.items()) or "none"
        return result | {"failed": f"each seat may play once in an episode; times played: {played}"}
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        return result | {"failed": f"a reward is missing: {', '.join(missing) or 'none is recorded'}"}
    try:
        return result | {"score": as_score(float(trace.reward), request["reward_range"])}
    except Refused as error:
        return result | {"refused" if math.isfinite(trace.reward) else "failed": str(error)}

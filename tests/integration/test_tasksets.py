"""The tasksets with the real verifiers package: ids, wire format, the real reward path, and whole rollouts.

The only stand-in is the model: a small OpenAI-compatible server on loopback that always gives one reply.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from nightshift_math import data as math
from pydantic import ValidationError

from tests.datasets import small_gsm8k, small_math

IDS = ("nightshift-gsm8k", "nightshift-arithmetic", "nightshift-countdown", "nightshift-math")
SIZE = 2  # as many as the fixture's validation split has


@pytest.fixture(scope="module", autouse=True)
def _verifiers() -> None:
    """Takes seconds to load, so that not every process of the suite should do so to collect its tests."""
    global loaders, vf
    import verifiers.v1 as vf
    from verifiers.v1.utils import loaders


@pytest.fixture
def trusted(tmp_path: Path) -> Iterator[None]:
    """Small data sets, prepared, in place of the official ones."""
    with small_gsm8k(), small_math(tmp_path) as copy:
        math.prepare(copy)
        yield


class StandIn(ThreadingHTTPServer):
    """Answers every chat completion with `reply` (or with `status`), and remembers what it was asked."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, reply: str | Callable[[dict[str, Any]], str], status: int = 200) -> None:
        self.reply, self.status = reply if callable(reply) else lambda body: reply, status
        self.requests: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    """One request to the stand-in."""

    server: StandIn

    def do_POST(self) -> None:
        """POST /v1/chat/completions, in OpenAI's format."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body | {"path": self.path})
        message = {"role": "assistant", "content": self.server.reply(body)}
        completion = {
            "id": "stand-in",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        content = json.dumps(completion).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def tasks_of(taskset_id: str, split: str = "train", size: int | None = SIZE, **options: Any) -> list[vf.Task]:
    config = loaders.taskset_config_type(taskset_id)(id=taskset_id, split=split, size=size, **options)
    return list(vf.load_taskset(config))


def episodes(stand_in: StandIn, config: dict[str, Any], most: int | None = None) -> list[vf.Episode]:
    """Run the first tasks by verifiers' own environment, agents, runtime and interception server."""
    import verifiers.v1 as vf
    from verifiers.v1.utils import loaders

    env = loaders.load_environment(loaders.resolve_env_config(config))
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{stand_in.server_port}/v1", api_key_var="UNSET")
    context = vf.ModelContext(model="the-policy", client=client, sampling=vf.SamplingConfig(temperature=0.25))

    async def run() -> list[vf.Episode]:
        async with env.serving():
            slots = [slot for task in islice(env.taskset, most) for slot in env.slots(task)]
            return await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))

    thread = Thread(target=stand_in.serve_forever)
    thread.start()
    try:
        return asyncio.run(run())
    finally:
        stand_in.shutdown()
        thread.join()
        stand_in.server_close()


def rollout(taskset_id: str, stand_in: StandIn, without: Sequence[str] = (), **taskset: Any) -> vf.Episode:
    """The episode of the first task."""
    settings = {"id": taskset_id, "split": "train", "size": SIZE} | taskset
    settings = {name: value for name, value in settings.items() if name not in without}
    config = {"taskset": settings, "agent": {"runtime": {"type": "subprocess"}}}
    (episode,) = episodes(stand_in, config, most=1)
    return episode


@pytest.fixture(params=IDS)
def taskset_id(request: pytest.FixtureRequest, trusted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each taskset, with the folders that verifiers makes for rollouts out of the user's cache."""
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path)
    chosen: str = request.param
    return chosen


def rewards(replies: list[tuple[vf.Task, str]]) -> list[dict[str, float]]:
    """What verifiers' own scoring gives traces that end in these replies, by the name of the reward."""
    import verifiers.v1 as vf
    from verifiers.v1.trace import AgentInfo

    async def reward(task: vf.Task, reply: str) -> dict[str, float]:
        origin = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = vf.Trace(task=origin, agent=AgentInfo(config=vf.AgentConfig()))
        trace.nodes.append(vf.MessageNode(message=vf.AssistantMessage(content=reply), sampled=True))
        await task.score(trace)
        return {name: found.value for name, found in trace.rewards.items()}

    async def gather() -> list[dict[str, float]]:
        return [await reward(task, reply) for task, reply in replies]

    return asyncio.run(gather())


def test_ids_resolve_to_one_taskset_and_its_own_harness(taskset_id: str) -> None:
    assert loaders.default_harness_id(taskset_id) == taskset_id
    harness = loaders.load_harness(vf.default_agent_harness(taskset_id))
    assert type(harness).__name__ == "ChatHarness"
    assert not harness.EXECUTES_CODE
    assert not harness.NEEDS_CONTAINER
    assert loaders.environment_class(taskset_id) is vf.SingleAgentEnv
    assert len(tasks_of(taskset_id)) == SIZE


@pytest.mark.parametrize("taskset_id", [*IDS, "nightshift-tictactoe"], indirect=True)
def test_tasks_survive_the_wire_and_those_of_the_test_split_cannot_be_loaded(taskset_id: str) -> None:
    for task in tasks_of(taskset_id):
        wire = json.loads(json.dumps(task.data.model_dump(mode="json")))
        rebuilt = type(task)(type(task).data_type().model_validate(wire), task.config)
        assert (rebuilt.key, rebuilt.hash) == (task.key, task.hash)
        assert rebuilt.data == task.data
    for split in ("test", "sealed", "", None):
        with pytest.raises(ValidationError, match="Input should be 'train' or 'validation'"):
            tasks_of(taskset_id, split=split)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"split\n  Field required"):
        loaders.taskset_config_type(taskset_id)(id=taskset_id, size=SIZE)
    with pytest.raises(ValidationError, match="Field required"):
        loaders.resolve_env_config({"taskset": {"id": taskset_id, "size": SIZE}})


def test_the_real_reward_path_pays_gold_answers_and_nothing_else(taskset_id: str) -> None:
    for split in ("train", "validation"):
        for task in tasks_of(taskset_id, split):
            answer = task.data.answer
            replies = [f"So it is.\n#### {answer}", f"#### {answer}9", ""]
            assert rewards([(task, reply) for reply in replies]) == [{"correct": score} for score in (1.0, 0.0, 0.0)]


@pytest.mark.parametrize("taskset_id", [IDS[0]], indirect=True)
def test_a_policy_that_cannot_answer_is_an_error_of_the_trace_not_a_zero(taskset_id: str) -> None:
    """All tasksets share the harness."""
    stand_in = StandIn("#### 0", status=500)
    episode = rollout(taskset_id, stand_in)
    (trace,) = episode.traces
    assert not episode.ok
    assert trace.errors
    assert not trace.rewards
    assert len(stand_in.requests) == 1


def test_a_rollout_ends_with_the_right_reward_and_starts_no_process(taskset_id, monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    task = tasks_of(taskset_id)[0]
    stand_in = StandIn(f"Thinking.\n#### {task.data.answer}")
    rollout(taskset_id, StandIn("#### 0"))  # the first of a process asks git for the commit of verifiers itself
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        patch.setattr(asyncio, "create_subprocess_exec", refuse)
        patch.setattr(asyncio, "create_subprocess_shell", refuse)
        episode = rollout(taskset_id, stand_in)
    assert not episode.errors
    (trace,) = episode.traces
    assert episode.ok
    assert trace.reward == 1.0
    assert trace.num_turns == 1
    assert (episode.task.key, episode.task.hash) == (task.key, task.hash)
    (request,) = stand_in.requests
    assert request["path"] == "/v1/chat/completions"
    assert request["model"] == "the-policy"
    assert request["temperature"] == 0.25  # the run's sampling, laid over the harness's request
    assert request["messages"] == [{"role": "user", "content": task.data.prompt_text}]

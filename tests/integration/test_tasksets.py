"""The tasksets with the real verifiers package: ids, wire format, and whole rollouts.

The only stand-in is the model.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from nightshift_math import data as math
from nightshift_tictactoe.board import START
from nightshift_tictactoe.game import Match
from pydantic import ValidationError

from tests.datasets import small_gsm8k, small_math
from tests.stand_in_server import StandInServer
from tests.unit.test_tictactoe_game import read

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


def stand_in_of(reply: str | Callable[[str], str]) -> StandInServer:
    """A model that gives this reply to the last message of every chat."""
    return StandInServer("the-policy", 0, None, reply if callable(reply) else lambda content: reply, 100_000)


def tasks_of(taskset_id: str, split: str = "train") -> list[vf.Task]:
    config = loaders.taskset_config_type(taskset_id)(id=taskset_id, split=split, size=SIZE)
    return list(vf.load_taskset(config))


def episodes(stand_in: StandInServer, config: dict[str, Any], most: int | None = None) -> list[vf.Episode]:
    """Run the first tasks by verifiers' own environment, agents, runtime and interception server."""
    import verifiers.v1 as vf
    from verifiers.v1.utils import loaders

    env = loaders.load_environment(loaders.resolve_env_config(config))
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{stand_in.port}/v1", api_key_var="UNSET")
    context = vf.ModelContext(model="the-policy", client=client, sampling=vf.SamplingConfig(temperature=0.25))

    async def run() -> list[vf.Episode]:
        async with env.serving():
            slots = [slot for task in islice(env.taskset, most) for slot in env.slots(task)]
            return await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))

    with stand_in:
        return asyncio.run(run())


def rollout(taskset_id: str, stand_in: StandInServer, without: Sequence[str] = (), **taskset: Any) -> vf.Episode:
    """The episode of the first task."""
    settings = {"id": taskset_id, "split": "train", "size": SIZE} | taskset
    settings = {name: value for name, value in settings.items() if name not in without}
    config = {"taskset": settings, "agent": {"runtime": {"type": "subprocess"}}}
    (episode,) = episodes(stand_in, config, most=1)
    return episode


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that verifiers makes for rollouts, out of the user's cache."""
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path)


@pytest.fixture(params=IDS)
def taskset_id(request: pytest.FixtureRequest, trusted: None) -> str:
    chosen: str = request.param
    return chosen


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


def test_a_rollout_by_its_own_harness_ends_with_the_right_reward_and_starts_no_process(taskset_id, monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    assert loaders.default_harness_id(taskset_id) == taskset_id
    harness = loaders.load_harness(vf.default_agent_harness(taskset_id))
    assert (type(harness).__name__, harness.EXECUTES_CODE, harness.NEEDS_CONTAINER) == ("ChatHarness", False, False)
    assert loaders.environment_class(taskset_id) is vf.SingleAgentEnv
    task, _ = tasks_of(taskset_id)
    stand_in = stand_in_of(f"Thinking.\n#### {task.data.answer}")
    wrong = rollout(taskset_id, stand_in_of("#### 999999"))  # the first of a process asks git for verifiers' own commit
    assert wrong.traces[0].reward == 0.0
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        patch.setattr(asyncio, "create_subprocess_exec", refuse)
        patch.setattr(asyncio, "create_subprocess_shell", refuse)
        episode = rollout(taskset_id, stand_in)
    assert not episode.errors
    (trace,) = episode.traces
    assert (episode.ok, trace.reward, trace.num_turns) == (True, 1.0, 1)
    assert (episode.task.key, episode.task.hash) == (task.key, task.hash)
    ((_, request),) = stand_in.requests
    assert request["model"] == "the-policy"
    assert request["temperature"] == 0.25  # the run's sampling, laid over the harness's request
    assert request["messages"] == [{"role": "user", "content": task.data.prompt_text}]


# Tic-tac-toe: whole games of two seats

GAME_ID = "nightshift-tictactoe"
NUM_GAMES = 30  # the first two draws are games 29 and 30


def says(content: str) -> str:
    """The first empty cell, or nonsense on every fourth board or so."""
    board = read(content)
    return "pass" if sum(map(ord, board)) % 4 == 0 else f"{next(cell for cell in board if cell in START)}\n"


def games(stand_in: StandInServer, played_by: str, split: str = "train", num_games: int = NUM_GAMES) -> list[Any]:
    """An episode each of the first tasks, by verifiers' own agents and interception server."""
    agent = {"harness": {"id": GAME_ID}, "runtime": {"type": "subprocess"}}
    opponent = agent | {"sampling": {"temperature": 1.5}}
    taskset = {"id": GAME_ID, "split": split, "size": num_games // 2, "seed": 7}
    config = {"taskset": taskset, "agent": agent, "opponent": opponent, "played_by": played_by}
    return episodes(stand_in, config)


def said(trace: Any) -> list[str]:
    return [node.message.content for node in trace.nodes if node.sampled]


@pytest.mark.slow
def test_games_against_itself_are_scored_as_they_went_forfeits_included() -> None:
    stand_in = stand_in_of(says)
    played = games(stand_in, "self")
    assert len(played) == NUM_GAMES
    forfeits = []
    for episode in played:
        assert episode.ok, episode.errors
        assert all(trace.num_turns for trace in episode.traces), "prime-rl counts a trace without a turn as an error"
        trainable = {"agent": True, "opponent": False}
        assert all(trace.agent.trainable is trainable[trace.agent.name] for trace in episode.traces)
        traces = {trace.agent.name: trace for trace in episode.traces}
        own, other = traces.get("agent"), traces.get("opponent")
        assert episode.traces[0] in (own, other if own is None else own)
        match = Match(episode.task.data.board, episode.task.data.seat, None, "self", None)  # type: ignore[arg-type]
        answers = iter(said(own) if own else ()), iter(said(other) if other else ())
        while (chat := match.ask()) is not None:
            text = next(answers[match.is_other_asked])
            assert says(chat[-1]["content"]) == text, "its seat was shown another board"
            match.answer(text)
        assert other is None or not other.rewards
        if own is None:
            assert said(other), "the other seat ended the game with its first answer"
            continue
        assert (own.reward, list(own.rewards)) == (match.score(), ["score"])
        assert own.metrics["forfeit"] == (match.details()["ended"] == "forfeit")
        forfeits.append(own.metrics["forfeit"])
    assert {episode.traces[0].reward for episode in played} == {0.0, 0.5, 1.0}
    assert any(len(episode.traces) == 1 for episode in played), "no seat forfeited before the other had moved"
    assert 0 < sum(forfeits) < NUM_GAMES
    traces = [trace for episode in played for trace in episode.traces]
    by_seat = [sum(len(said(t)) for t in traces if t.agent.name == name) for name in ("agent", "opponent")]
    asked = [request["temperature"] for _, request in stand_in.requests]
    assert [asked.count(temperature) for temperature in (0.25, 1.5)] == by_seat


def test_against_the_pool_nobody_else_is_asked() -> None:
    stand_in = stand_in_of(says)
    played = games(stand_in, "pool", "validation", num_games=8)
    assert all(episode.ok and len(episode.traces) == 1 for episode in played)
    assert {request["temperature"] for _, request in stand_in.requests} == {0.25}
    assert len({episode.traces[0].reward for episode in played}) > 1

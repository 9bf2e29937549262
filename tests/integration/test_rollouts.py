"""Environments of several turns, seats and tools, played by verifiers' own rollouts against a scripted server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nightshift.config.rules import Decoding
from nightshift.config.rules_toml import environments_named
from nightshift.errors import EngineError
from nightshift.evaluation import scorer as module
from nightshift.evaluation.environment import Conversation, Endpoint, VerifiersTaskset, figures_of, load
from tests.conftest import living_children
from tests.rules import ROOT
from tests.stand_in_server import StandInServer

pytestmark = pytest.mark.slow
NUM = 4  # examples of the validation split

# Two questions of a scripted user. What a reward does besides is in the question.
TURNS = """
import os, time
import verifiers.v1 as vf
__all__ = ["Turns", "TurnsEnv"]

class Data(vf.TaskData):
    numbers: list[int]
    fault: str = ""

class Task(vf.Task[Data]):
    @property
    def key(self): return str(self.data.idx)

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.fault == "raises": raise RuntimeError("no such row")
        if self.data.fault == "blocks": time.sleep(600)
        if self.data.fault == "exits": os._exit(7)
        replies = [message.content for message in trace.assistant_messages]
        return sum(reply == str(2 * number) for reply, number in zip(replies, self.data.numbers)) / 2

class Config(vf.TasksetConfig):
    rows: int = 12
    faults: list[str] = []

class TurnsEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            for number in task.data.numbers:
                if (await interaction.turn(f"twice {number}?")).terminated:
                    break

class Turns(vf.Taskset[Task, Config]):
    def load(self):
        for row in range(self.config.rows):
            fault = self.config.faults[row] if row < len(self.config.faults) else ""
            yield Task(Data(idx=row, prompt=None, numbers=[row, row + 1], fault=fault), self.config.task)
"""

# Two seats of one policy; the Env pays both.
SEATS = """
import verifiers.v1 as vf
__all__ = ["Seats", "SeatsEnv"]

class Config(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    second: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})

class SeatsEnv(vf.Env[Config]):
    async def run(self, task, agents):
        asked = [vf.Task(vf.TaskData(idx=task.data.idx, prompt=None)) for _ in range(2)]
        async with agents.first.interaction(asked[0]) as first, agents.second.interaction(asked[1]) as second:
            await second.turn("you are second")
            await first.turn("you are first")
        for payoff, seat in ((1.0, first), (-1.0, second)):
            seat.trace.record_reward("payoff", payoff)

class Seats(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True
    def load(self):
        number = 0
        while True:
            yield vf.Task(vf.TaskData(idx=number, name=f"hand {number}", prompt=None), self.config.task)
            number += 1
"""

# A tool server for each rollout: what it does is what it is asked.
TOOLS = """
import verifiers.v1 as vf
from their_env.server import Facts
__all__ = ["Tools"]

class TaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()

class Task(vf.Task[vf.TaskData, vf.State, TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Facts(config.tools)]

    @vf.reward
    async def told(self, trace: vf.Trace) -> float:
        return float("42" in trace.last_reply)

class Config(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()
    words: list[str] = [f"word{number}" for number in range(10)]

class Tools(vf.Taskset[Task, Config]):
    def load(self):
        for idx, word in enumerate(self.config.words):
            yield Task(vf.TaskData(idx=idx, prompt=f"look up {word}"), self.config.task)
"""
SERVER = """
import os
import time
import verifiers.v1 as vf

class Facts(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "facts"

    @vf.tool
    def lookup(self, name: str) -> str:
        name = name.strip()
        if name == "raises": raise ValueError("no such name")
        if name == "sleeps": time.sleep(600)
        if name == "exits": os._exit(3)
        return "42"

if __name__ == "__main__":
    Facts.run()
"""


class ScriptedServer(StandInServer):
    """Answers `twice N?` rightly, and where there are tools calls the first of them once, then repeats its answer."""

    def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and answer of a chat."""
        last = body["messages"][-1]
        if body.get("tools") and last["role"] == "user":
            arguments = json.dumps({"name": last["content"].removeprefix("look up ")})
            function = {"name": body["tools"][0]["function"]["name"], "arguments": arguments}
            answer = self._completion(body["model"], "", False, 5)
            answer["choices"][0]["message"]["tool_calls"] = [{"id": "call", "type": "function", "function": function}]
            answer["choices"][0]["finish_reason"] = "tool_calls"
            return 200, answer
        return super().chat(body)


def answer(content: str) -> str:
    words = content.split()
    return str(2 * int(words[1].rstrip("?"))) if words[0] == "twice" else content


class Session:
    """The part of a prime-rl session that plays episodes."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"

    def endpoint(self, progress: Any) -> Endpoint:
        """Return the scripted server."""
        return Endpoint(self.url, "the-policy", lambda num_done: None)


Open = Callable[..., VerifiersTaskset]


@pytest.fixture
def open_(tmp_path: Path) -> Iterator[Open]:
    """The environment of a package's text under a table of rules.toml; afterwards nothing of it is left."""
    opened: list[VerifiersTaskset] = []

    def open_one(text: str, more: str = "", **files: str) -> VerifiersTaskset:
        (tmp_path / "environments").symlink_to(ROOT / "environments")
        (tmp_path / "their_env").mkdir()
        for name, source in {"__init__": text, **files}.items():
            (tmp_path / "their_env" / f"{name}.py").write_text(source)
        table = f'[environment.mine]\npackage = "their_env"\nnum_validation = {NUM}\nmax_turns = 4\n{more}'
        (tmp_path / "rules.toml").write_text(table)
        (environment,) = load(tmp_path, environments_named(tmp_path, ["mine"]))
        assert isinstance(environment, VerifiersTaskset)
        opened.append(environment)
        return environment

    yield open_one
    for environment in opened:
        environment.scorer.close()
    assert living_children() == []


def play(environment: VerifiersTaskset, fault: str | None = None) -> list[Conversation]:
    """Play the validation split. `fault`: of the server."""
    examples = environment.examples("validation")
    assert len(examples) == NUM
    with ScriptedServer("the-policy", 0, fault, answer, 100_000) as server:
        played = environment.play(examples, Session(server.port), Decoding(64), lambda reading: None)  # type: ignore[arg-type]
    return [episode for (episode,) in played if isinstance(episode, Conversation)]


def told(episodes: list[Conversation], field: str) -> list[Any]:
    return [getattr(episode.played, field) for episode in episodes]


def test_a_scripted_user_asks_twice_and_two_evaluations_are_equal(open_: Open) -> None:
    environment = open_(TURNS)
    first, second = play(environment), play(environment)
    assert [episode.score() for episode in first] == [1.0] * NUM
    assert told(first, "turns") == [2] * NUM
    assert [episode.played for episode in first] == [episode.played for episode in second]
    assert "twice" in first[0].completion.text
    assert not first[0].completion.truncated
    tasks = [(environment, example) for example in environment.examples("validation")]
    means = {"turns_mean": 2.0, "tool_calls_mean": 0.0, "tool_errors": 0, "failed": 0}
    assert figures_of(tasks, [(episode,) for episode in first]) == {"mine": means}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raises", "RuntimeError: no such row"),
        ("blocks", "Blocked: blocked the event loop for 10 s"),
        ("exits", "the process ended: exit code 7"),
    ],
)
def test_a_fault_of_a_reward_is_named_and_the_other_examples_are_scored(open_, fault, cause, monkeypatch):
    monkeypatch.setattr(module, "CONCURRENCY", 8)
    environment = open_(TURNS, f"args = {{ faults = {json.dumps([''] * 8 + [fault])} }}")
    episodes = play(environment)
    failed = [reason for reason in told(episodes, "failed") if reason is not None]
    assert len(failed) == 1
    assert cause in failed[0]
    assert sorted(episode.score() for episode in episodes) == [0.0] + [1.0] * (NUM - 1)
    assert f"the reward of 1 of {NUM} answers failed and counts 0; the first: " in environment.scorer.failures()


@pytest.mark.parametrize(("seat", "score"), [("first", 1.0), ("second", 0.0)])
def test_the_seat_that_counts_is_found_by_its_name(open_: Open, seat: str, score: float) -> None:
    table = f'num_train = 9\nreward_range = [-1.0, 1.0]\nseat = "{seat}"\n'
    episodes = play(open_(SEATS, table))
    assert [episode.score() for episode in episodes] == [score] * NUM
    assert told(episodes, "text") == [f"you are {seat}"] * NUM


@pytest.mark.parametrize(
    ("word", "score", "errors"), [("word", 1.0, 0), *((word, 0.0, 1) for word in ("raises", "exits", "sleeps"))]
)
def test_tools_are_called_and_their_errors_are_answers(open_: Open, word: str, score: float, errors: int) -> None:
    environment = open_(TOOLS.replace('f"look up {word}"', 'f"look up {word}" + " " * idx'), server=SERVER)
    environment.scorer._spec["args"] = {"words": [word] * 10}
    episodes = play(environment)
    assert [episode.score() for episode in episodes] == [score] * NUM
    assert told(episodes, "tool_calls") == [1] * NUM
    assert told(episodes, "tool_errors") == [errors] * NUM


@pytest.mark.parametrize(
    ("text", "more", "cause"),
    [
        (SEATS, "num_train = 9", 'has the seats first, second. Write which one scores: seat = "first"'),
        (TURNS, 'seat = "solver"', 'has the seats agent. Write which one scores: seat = "agent"'),
        (TOOLS, "", "Task needs tools: Facts. Write vLLM's tool parser for the model"),
    ],
)
def test_what_is_missing_in_rules_toml_is_one_line(open_: Open, text: str, more: str, cause: str) -> None:
    environment = open_(text, more, server=SERVER)
    environment.scorer._spec["tool_parser"] = ""
    with pytest.raises(EngineError) as raised:
        environment.examples("validation")
    assert cause in str(raised.value)
    assert "\n" not in str(raised.value)


# One of the older kind: a rubric of weighted functions with a parser.
V0 = """
import verifiers as vf
from datasets import Dataset

def load_environment(rows: int = 12, system_prompt: str = "Reply in tags."):
    parser = vf.XMLParser(["answer"])
    data = Dataset.from_list([{"question": f"twice {n}?", "answer": str(2 * n)} for n in range(rows)])

    def right(completion, answer, **kwargs):
        return float(parser.parse_answer(completion) == answer)

    def short(completion, parser):
        return 1.0 if len(completion[-1]["content"]) < 40 else 0.0

    rubric = vf.Rubric(funcs=[right, short, parser.get_format_reward_func()], weights=[0.5, 0.25, 0.25], parser=parser)
    return vf.SingleTurnEnv(dataset=data, system_prompt=system_prompt, parser=parser, rubric=rubric)
"""
SEVERAL = """
class Several(vf.MultiTurnEnv):
    async def env_response(self, messages, state): return []

def load_environment"""
V0_TURNS = V0.replace("vf.SingleTurnEnv(", "Several(").replace("def load_environment", SEVERAL)
V0_TOOLS = V0.replace("vf.SingleTurnEnv(", "vf.ToolEnv(tools=[], ")
V0_JUDGE = V0.replace("rubric=rubric)", 'rubric=vf.JudgeRubric(judge_model="gpt", judge_client=object()))')


# Its own rollouts of the rows with these prompts, by verifiers alone.
V0_ROLLOUTS = """
import asyncio, json, sys
import verifiers as vf
env = vf.load_environment("their_env")
rows = {row["prompt"][-1]["content"]: row for row in env.get_eval_dataset()}
config = vf.ClientConfig(api_key_var="PATH", api_base_url=f"http://127.0.0.1:{sys.argv[1]}/v1")

async def rewards():
    return [(await env.run_rollout(rows[text], config, "the-policy", {}))["reward"] for text in json.loads(sys.argv[2])]

print(json.dumps(asyncio.run(rewards())))
"""


def tagged(content: str) -> str:
    return f"<answer>{4 if '2?' in content else content}</answer>"


def test_a_v0_environment_scores_as_its_own_rollout_does(tmp_path: Path) -> None:
    place = tmp_path / "their_env"
    place.mkdir()
    (place / "their_env.py").write_text(V0)  # the layout of v0's own template
    (place / "pyproject.toml").write_text('[project]\nname = "their-env"\ndependencies = ["verifiers"]\n')
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    (tmp_path / "rules.toml").write_text('[environment.mine]\npackage = "their_env"\nnum_validation = 4\n')
    (environment,) = load(tmp_path, environments_named(tmp_path, ["mine"]))
    assert isinstance(environment, VerifiersTaskset)
    examples = environment.examples("validation")
    replies = [tagged(example.messages[-1]["content"]) for example in examples]  # type: ignore[attr-defined]
    scores = [environment.scorer.score(reply, example.key) for reply, example in zip(replies, examples, strict=True)]
    with ScriptedServer("the-policy", 0, None, tagged, 100_000) as server:
        played = environment.play(examples, Session(server.port), Decoding(64), lambda reading: None)  # type: ignore[arg-type]
        asked = [example.messages[-1]["content"] for example in examples]  # type: ignore[attr-defined]
        command = [sys.executable, "-c", V0_ROLLOUTS, str(server.port), json.dumps(asked)]
        process = subprocess.run(command, cwd=place, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == scores
    assert [episode.score() for (episode,) in played] == scores
    environment.scorer.close()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (V0_TURNS, "their_env is a v0 environment with several turns or several environments (Several). Choose"),
        (V0_TOOLS, "their_env is a v0 environment with tools (ToolEnv). "),
        (V0_JUDGE, "their_env is a v0 environment that asks a judge: gpt. "),
    ],
)
def test_a_v0_environment_that_the_adapter_cannot_carry_is_named(open_: Open, text: str, cause: str) -> None:
    with pytest.raises(EngineError) as raised:
        open_(text).examples("validation")
    assert cause in str(raised.value)


def test_a_server_that_stalls_ends_the_evaluation_before_waiting_episodes_score_0(open_: Open, monkeypatch) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 3.0)
    with pytest.raises(EngineError, match="environment mine: the server answered no request for 3 s"):
        play(open_(TURNS), "chat_hang")

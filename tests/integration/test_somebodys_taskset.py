"""Tasksets of others with the real verifiers: accepted or refused, split, scored, and trained on by prime-rl."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nightshift.config.rules_toml import rules_here
from nightshift.engines.prime_rl.install import environment_files
from nightshift.evaluation import environment as environments
from tests.integration.test_tasksets import rollout, stand_in_of
from tests.rules import ROOT

# As verifiers' own reverse_text: a system prompt, a stop, a reward of the trace; the rows are in the package.
HEAD = """
import itertools, json
import verifiers.v1 as vf
from difflib import SequenceMatcher
__all__ = ["Reverse"]

class Data(vf.TaskData):
    answer: str

class Task(vf.Task[Data]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def ratio(self, trace: vf.Trace) -> float:
        return SequenceMatcher(None, trace.last_reply, self.data.answer).ratio()

class Config(vf.TasksetConfig):
    rows: int = 20
    backwards: bool = False

class Reverse(vf.Taskset[Task, Config]):
    def load(self):
        numbers = range(self.config.rows)
        for idx, number in enumerate(reversed(numbers) if self.config.backwards else numbers):
            text = f"word{number}"
            yield Task(Data(idx=idx, prompt=text, system_prompt="Reverse.", answer=text[::-1]), self.config.task)
"""
RULES = 'environments = ["mine"]\n[environment.mine]\npackage = "their_env"\nnum_validation = 5\n'
SPEC = {"args": {}, "num_validation": 5, "num_train": None, "max_turns": 1, "seat": "", "tool_parser": "hermes"}
Open = Callable[..., Any]
_names = (f"their_env_{number}" for number in itertools.count())


@pytest.fixture(scope="module", autouse=True)
def _verifiers() -> None:
    """Takes seconds to load."""
    global tasks
    from nightshift_taskset import tasks


@pytest.fixture
def open_(tmp_path: Path) -> Open:
    """The taskset of a package with HEAD, changed, as it is opened there."""

    def opened(change: tuple[str, str] = ("", ""), more: str = "", **arguments: Any) -> Any:
        place = tmp_path / next(_names)
        place.mkdir()
        assert change[0] in HEAD
        (place / "__init__.py").write_text(HEAD.replace(*change, 1) + more)
        return tasks.open_taskset(tasks.import_package(place), SPEC | {"args": arguments})

    return opened


def keys(taskset: Any, num_train: int | None = None) -> dict[str, list[str]]:
    found = tasks.split(taskset, SPEC | {"num_train": num_train})
    return {name: [task.data.prompt for task in each] for name, each in found.items()}


def test_the_split_is_by_the_key_and_not_by_the_order(open_: Open) -> None:
    found = keys(open_())
    assert {name: len(each) for name, each in found.items()} == {"validation": 5, "test": 5, "train": 10}
    assert len({key for each in found.values() for key in each}) == 20
    assert keys(open_(backwards=True)) == found
    assert {*keys(open_(), num_train=4)["train"]} < {*found["train"]}
    assert keys(open_(rows=21))["validation"] != found["train"][:5]
    with pytest.raises(ValueError, match="difficulty"):
        open_(difficulty="easy")
    endless = keys(open_(above("    def load(self)", "INFINITE = True"), rows=10**12), num_train=7)
    assert {name: len(each) for name, each in endless.items()} == {"validation": 5, "test": 5, "train": 7}
    with pytest.raises(tasks.Refused, match="too few tasks: 20; validation and test need 10, training needs 11"):
        tasks.split(open_(), SPEC | {"num_train": 11})


def test_those_that_ask_the_same_are_one(open_: Open) -> None:
    change = ('f"word{number}"', 'f"word{number // 2}"')
    found = tasks.split(open_(change, rows=40), SPEC)
    again = tasks.split(open_(change, rows=40, backwards=True), SPEC)
    for name, size in {"validation": 5, "test": 5, "train": 10}.items():
        assert len(found[name]) == size
        assert [*map(tasks.identity, found[name])] == [*map(tasks.identity, again[name])]


def test_an_example_is_all_that_its_task_holds(open_: Open) -> None:
    (one,), (other,), (moved,) = (
        [task for task in taskset if task.data.prompt == "word3"]
        for taskset in (open_(), open_(("text[::-1]", "text")), open_(backwards=True))
    )
    assert tasks.identity(one) == tasks.identity(moved) != tasks.identity(other)
    assert tasks.key_of(one) == tasks.key_of(other)
    assert tasks.chat(one) == [{"role": "system", "content": "Reverse."}, {"role": "user", "content": "word3"}]
    assert [tasks.reward_of(one, text) for text in ("3drow", "", "3d")] == [1.0, 0.0, pytest.approx(4 / 7)]


@pytest.mark.parametrize(
    ("reward", "reward_range", "score"),
    [(0.25, (0, 1), 0.25), (-1, (-1, 1), 0.0), (0, (-1, 1), 0.5), (1 + 1e-9, (0, 1), 1.0), (5, (0, 10), 0.5)],
)
def test_a_reward_becomes_a_score(reward: float, reward_range: tuple[float, float], score: float) -> None:
    assert tasks.as_score(reward, reward_range) == score
    with pytest.raises(tasks.Refused, match=r"a reward of nan is not a finite number"):
        tasks.as_score(float("nan"), reward_range)


def above(line: str, more: str) -> tuple[str, str]:
    return line, f"    {more}\n{line}"


TOOLS = "@classmethod\n    def toolsets(cls, config): return [vf.Toolset(vf.ToolsetConfig())]"
JUDGE = "vf.TaskConfig.model_construct(judges=[type('J', (), {'id': 'gpt'})])) "


@pytest.mark.parametrize(
    ("change", "more", "cause"),
    [
        (("", ""), "class Own(vf.SingleAgentEnv): pass\n__all__ += ['Own']", "plays its own Own: several turns or"),
        (("    @vf.reward(weight=1.0)\n", ""), "", "Task has no reward. Mark a method"),
        (
            ("self, trace: vf.Trace) -> float", "self, trace, runtime) -> float"),
            "",
            "Task needs a runtime, which is a container, in ratio",
        ),
        (("prompt=text", "prompt=None"), "", "has a task without a prompt: a scripted user asks"),
        (above("    @vf.stop", "NEEDS_CONTAINER = True"), "", "Task needs a container: NEEDS"),
        (above("    @vf.stop", TOOLS), "", "Task needs tools: "),
        (("self.config.task)", JUDGE), "", "Task asks a judge: gpt"),
        (above("    @vf.stop", "key = 'one for all'"), "", "has the key 'one for all' more than once. Give each task"),
        (above("    def load(self)", "INFINITE = True"), "", "has no end of tasks. Write num_train"),
    ],
)
def test_what_no_single_turn_decides_is_refused_in_one_line(open_, change, more, cause):
    with pytest.raises(tasks.Refused) as raised:
        tasks.split(open_(change, more), SPEC)
    assert cause in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    (tmp_path / "their_env").mkdir()
    (tmp_path / "their_env" / "__init__.py").write_text(HEAD)
    (tmp_path / "rules.toml").write_text(RULES + "reward_range = [-1.0, 1.0]\nargs = { rows = 30 }\n")
    return tmp_path


@pytest.mark.slow
def test_prime_rl_trains_on_the_training_set_alone_and_pays_scores(root, tmp_path, monkeypatch):
    (environment,) = environments.load(root, rules_here(root, "trl", 1).environments)
    wanted = {one.key for one in environment.examples("train")}
    assert environment.scorer is not None
    environment.scorer.close()
    copy = tmp_path / "copy"
    for name, data in environment_files(root, rules_here(root, "prime-rl", 2)).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(data)
    monkeypatch.setattr(sys, "path", [str(copy), *sys.path])
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path)
    for name in ("their_env", "nightshift_mine"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that what this test imports is forgotten after it
        del sys.modules[name]
    from verifiers.v1.utils import loaders

    config = loaders.taskset_config_type("nightshift_mine")(id="nightshift_mine", seed=3)
    found = list(loaders.load_taskset(config))
    assert {tasks.identity(task) for task in found} == wanted
    wire = found[0].data.model_dump(mode="json")
    rebuilt = type(found[0])(type(found[0]).data_type().model_validate(wire), SimpleNamespace())
    assert tasks.identity(rebuilt) == tasks.identity(found[0])
    for reply, least, most in (("no idea", 0.51, 0.99), (lambda asked: asked[::-1], 1.0, 1.0)):
        stand_in = stand_in_of(reply)
        episode = rollout("nightshift_mine", stand_in, without=("split", "size"))
        assert episode.ok
        assert least <= episode.traces[0].reward <= most
    assert [message["role"] for message in stand_in.requests[0][1]["messages"]] == ["system", "user"]

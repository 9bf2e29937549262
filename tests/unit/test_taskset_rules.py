"""[environment.NAME] with a package: what is found, hashed and refused, without importing any of it."""

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, rules_elsewhere, rules_here, rules_of
from nightshift.config.train_toml import parse
from nightshift.engines.prime_rl.config import effective
from nightshift.engines.prime_rl.install import environment_files
from nightshift.errors import ConfigError, UsageError
from tests.rules import GSM8K_PRIME_RL, ROOT

BOMB = "raise AssertionError('imported')\n"
LINES = '[environment.mine]\npackage = "their_env"\nnum_validation = 5\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "environments", tmp_path / "environments", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "nightshift", tmp_path / "nightshift", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture
def links(tmp_path: Path) -> Path:
    """A checkout in which nothing is hashed."""
    for name in ("environments", "nightshift"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def package(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(BOMB)
    return folder


def rules(root: Path, engine: str = "trl", **table: Any) -> Rules:
    mine = {"package": "their_env", "num_validation": 5} | table
    chosen = {"environments": ["mine"], "environment": {"mine": mine}}
    return rules_of(root, msgspec.convert(chosen, Chosen), engine, 1 if engine == "trl" else 2)


@pytest.mark.parametrize("place", ["their_env", "their_env/their_env", "their_env/src/their_env"])
def test_a_folder_of_the_checkout_is_hashed_as_a_whole(root: Path, place: str) -> None:
    found = package(root / place)
    before = rules(root)
    (environment,) = before.environments
    assert (environment.taskset.place(root), environment.taskset.module) == (found, "their_env")
    assert "verifiers==0.3.1.dev62" in environment.versions
    hashes = [before.hash(root)]
    for change in ("their_env/rows.jsonl", f"{place}/__init__.py", "environments/taskset/nightshift_taskset/tasks.py"):
        with (root / change).open("a") as file:
            file.write("\n")
        hashes.append(before.hash(root))
    assert len({*hashes}) == 4


def test_an_installed_package_is_hashed_by_its_bytes_wherever_it_lies(root, tmp_path_factory, monkeypatch):
    hashes = []
    for text in ("", "", "x = 1"):
        site = tmp_path_factory.mktemp("site")
        (package(site / "their_env") / "scoring.py").write_text(text)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(site))
            found = rules(root)
            hashes.append(found.hash(root))
    assert hashes[0] == hashes[1]
    assert hashes[2] != hashes[0]


def test_every_key_of_the_table_is_part_of_the_hash(root: Path) -> None:
    package(root / "their_env")
    changes: list[dict[str, Any]] = [
        {}, {"args": {"level": 2}}, {"reward_range": [-1, 1]}, {"num_train": 9}, {"num_validation": 6},
        {"prompt_tokens": 99},
    ]  # fmt: skip
    assert len({rules(root, **change).hash(root) for change in changes}) == len(changes)


def test_prime_rl_gets_the_package_and_what_is_left_to_train_on(root: Path) -> None:
    package(root / "their_env" / "their_env")
    package(root / "their_env" / "beside")
    (root / "rules.toml").write_text('environments = ["mine"]\n' + LINES)
    files = environment_files(root, rules_here(root, "prime-rl", 2))
    elsewhere = environment_files(root, rules_elsewhere(root, GSM8K_PRIME_RL, ["countdown"], 2))
    assert "nightshift_countdown/data.py" in elsewhere
    assert not {name for name in elsewhere if "their_env" in name or "mine" in name}
    names = {"their_env/__init__.py", "beside/__init__.py", "nightshift_taskset/training.py"}
    assert {*files} >= names | {"nightshift_gsm8k/harness.py", "nightshift_mine/__init__.py"}
    tree = effective(parse(b"[orchestrator]\nbatch_size = 8\ngroup_size = 4\n"), rules_here(root, "prime-rl", 2), 64)
    (source,) = tree["orchestrator"]["train"]["source"]
    assert source["env"]["taskset"] == {"id": "nightshift_mine"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LINES.replace("num_validation = 5", ""), "a package needs num_validation, the size of the split"),
        (LINES.replace("their_env", "no such"), "package no such is neither a folder of this checkout nor installed"),
        (LINES.replace("mine", "arithmetic"), "environments/arithmetic exists. Use another name"),
        (LINES + "args = { x = 1979-05-27 }", "got `date` - at `$.environment[...].args[...]`"),
        (LINES + "args = { x = [nan] }", "Out of range float values"),
        (LINES + "args = { x = [1979-05-27] }", "args: Object of type date is not JSON serializable"),
        (LINES.replace("their_env", "a\\u0000b"), "Expected `str` matching regex"),
        (
            LINES.replace("their_env", "no_toml"),
            "no_toml/pyproject.toml: Expected `array`, got `str`. Correct [project]",
        ),
        (LINES + "reward_range = [1, 1]", "reward_range = [1, 1] is not [lowest, highest]"),
        (LINES + "judge = true", "unknown field `judge`"),
        ("[environment.gsm8k]\nnum_validation = 5", "num_validation needs package"),
    ],
)
def test_what_does_not_fit_is_one_line(links: Path, text: str, expected: str) -> None:
    package(links / "their_env")
    (package(links / "no_toml") / "pyproject.toml").write_text('project.dependencies = "x"')
    name = re.findall(r"environment\.\"?([^\"\]]+)", text)[0]
    (links / "rules.toml").write_text(f'environments = ["{name}"]\n{text}\n')
    with pytest.raises(UsageError) as raised:
        rules_here(links, "trl", 1)
    assert expected in str(raised.value)


def test_trl_refuses_several_turns_and_names_the_engine_that_accepts_them(links: Path) -> None:
    package(links / "their_env")
    with pytest.raises(UsageError) as raised:
        rules(links, max_turns=4)
    line = "rules.toml: [environment.mine]: max_turns = 4: engine trl has one turn only. Use --engine prime-rl"
    assert str(raised.value).startswith(line)


@pytest.mark.parametrize(
    ("table", "seq_len", "refusal"),
    [
        ({"prompt_tokens": 100}, 1124, ""),
        ({"prompt_tokens": 100}, 1123, "may have 1124 tokens. Write seq_len = 1124"),
        ({"conversation_tokens": 900}, 899, "may have 900 tokens. Write seq_len = 900"),
    ],
)
def test_a_row_holds_the_whole_conversation_or_is_refused(links, table, seq_len, refusal):
    package(links / "their_env")
    found = rules(links, "prime-rl", max_turns=4, **table)
    source = f"seq_len = {seq_len}\n[orchestrator]\nbatch_size = 8\ngroup_size = 4\n"
    config = parse(f"{source}[orchestrator.train.sampling]\nmax_completion_tokens = 256\n".encode())
    if refusal:
        with pytest.raises(ConfigError, match=re.escape(refusal)):
            effective(config, found, 100)
        return
    tree = effective(config, found, 100)
    assert tree["inference"]["vllm"]["max_model_len"] == 100 + 4 * 2048
    assert tree["inference"]["vllm"]["tool_call_parser"] == "hermes"
    assert tree["orchestrator"]["renderer"] == {"name": "default", "tool_parser": "qwen3"}
    assert tree["orchestrator"]["train"]["source"][0]["env"] == {"taskset": {"id": "nightshift_mine"}}


def test_a_model_calls_tools_in_one_way(links: Path) -> None:
    package(links / "their_env")
    config = parse(b"seq_len = 9000\n[orchestrator]\nbatch_size = 8\ngroup_size = 4\n")
    with pytest.raises(ConfigError, match=r"tool_parser is pythonic\. Write one of: hermes, qwen3_coder, glm45, "):
        effective(config, rules(links, "prime-rl", max_turns=4, tool_parser="pythonic"), 100)

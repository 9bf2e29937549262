"""fuzz_config.py, cheats.py and SECURITY.md: a small part of each run, teeth included, and what the page names."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.cli import commands

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import cheats  # noqa: E402
import fuzz_config  # noqa: E402
from cheat_attempt import Attempt  # noqa: E402
from cheats_by_python import own_program  # noqa: E402
from fuzz_config import Answer, Tally, try_one  # noqa: E402
from toml_mutants import SHIPPED  # noqa: E402
from toml_oracle import doubts, doubts_of_values  # noqa: E402

PAGE = (ROOT / "SECURITY.md").read_text()
# A dozen, of every setting and kind, that are quick.
NAMES = (
    *("dotted keys", "no plain file", "edited scorer", "git replace", "core.worktree", "package over a module"),
    *("forged bytecode", "PYTHONPATH: environment package", "weakened incumbent", "forged results.tsv"),
    *("forged record", "library of the environment"),
)


def run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / script, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def names_no_place(path: Path) -> bool:
    text = path.read_text()
    return not any(place in text for place in (str(ROOT), str(path.parent), str(Path.home())))


# -- fuzz_config.py


def test_ten_mutants_and_a_whole_process(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = run("fuzz_config.py", "--cases", "10", "--processes", "1", "--output", str(output))
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert [row["cases"] for row in result["classes"]] == [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert result["num_wrong"] == 0
    assert result["command"] == "uv run benchmarks/fuzz_config.py --cases 10 --processes 1 --seed 0"
    assert names_no_place(output)
    assert "whole processes" in done.stdout


def touch(root: Path) -> Answer:
    (root / "new").touch()
    return 2, "", "train.toml is empty. Restore it: git checkout train.toml\n"


def rewrite(root: Path) -> Answer:
    (root / "train.toml").write_bytes(b"")
    return 2, "", "train.toml is empty. Restore it: git checkout train.toml\n"


@pytest.mark.parametrize(
    ("ask", "cause"),
    [
        (
            lambda root: (1, "", "Traceback (most recent call last):\n  ...\nValueError: x\n"),
            "traceback: ValueError: x",
        ),
        (lambda root: (1, "", "train.toml is wrong somehow. Mend it.\n"), "exit code 1"),
        (lambda root: (2, "", "train.toml is wrong. Mend it.\nThe end.\n"), "not one printable line"),
        (lambda root: (2, "", "train.toml is wrong \x1b[2J. Mend it.\n"), "not one printable line"),
        (lambda root: (2, "---\n", "train.toml is wrong. Mend it.\n"), "not one printable line"),
        (lambda root: (2, "", "\n"), "not one printable line"),
        (touch, "changed new"),
        (rewrite, "changed train.toml"),
        (lambda root: (0, "", ""), "model.name is no open key"),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, ask: Callable[[Path], Answer], cause: str) -> None:
    root, tally = tmp_path / "checkout", Tally("teeth")
    fuzz_config.make_checkout(root)
    try_one(root, tally, ask, b"[model]\nname = 'x'\n")
    assert [found.partition(": '")[0] for found, _ in tally.wrong] == [cause]


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        ("model.name = 'x'", "model is locked"),
        ("trainer.optim.lr = 2.0", "trainer.optim.lr = 2.0 is not what the key takes"),
        ("trainer.optim.lr = 0", "trainer.optim.lr = 0 is not what the key takes"),
        ("max_steps = true", "max_steps = True is not what the key takes"),
        ("trainer.optim.type = 'adam'", "trainer.optim.type = 'adam' is not what the key takes"),
        ("trainer.model.lora.target_modules = []", "trainer.model.lora.target_modules = [] is not what the key takes"),
        ("orchestrator.env_vars.A = 'x'", "env_vars is locked"),
        ("trainer.max_steps = 3", "trainer.max_steps is locked"),
        ("'trainer.optim'.lr = 0.1", "trainer.optim.lr is no open key"),
        ("orchestrator.batch_size = 3\norchestrator.group_size = 2", "groups of 2 do not divide a batch of 3"),
        ("seq_len = 64\norchestrator.train.sampling.max_completion_tokens = 64", "completions of 64 do not fit"),
    ],
)
def test_the_second_opinion_doubts_what_is_refused(text: str, doubt: str) -> None:
    assert doubt in list(doubts_of_values(text.encode()))


def test_the_second_opinion_has_no_doubts_about_the_shipped_file() -> None:
    assert list(doubts(SHIPPED.encode())) == []


# -- cheats.py


def test_a_dozen_attempts_come_to_what_is_expected_and_one_that_succeeds_is_seen(tmp_path: Path) -> None:
    chosen = [next(attempt for attempt in cheats.ATTEMPTS if attempt.name == name) for name in NAMES]
    assert {attempt.setting for attempt in chosen} == {"train.toml", "checkout", "night"}
    wished = Attempt(
        "wished away", "checkout", "as `a program of its own`", "refused", "score and verdict", own_program
    )
    rows = cheats.attempt_all([*chosen, wished], tmp_path)
    assert [row["name"] for row in rows if not row["holds"]] == ["wished away"], rows
    assert rows[-1]["measured"] == "not defended"
    assert {row["measured"] for row in rows} == {"refused", "harmless", "named", "not defended"}
    assert not any(str(tmp_path) in row["evidence"] for row in rows)
    assert "1 not as expected" in cheats.table(rows)


def test_the_script_writes_its_result(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = run("cheats.py", "--only", "arrays of tables", "--output", str(output))
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert (result["num_attempts"], result["num_as_expected"]) == (1, 1)
    assert result["attempts"][0]["measured"] == "refused"
    assert names_no_place(output)


def test_there_are_many_attempts_and_each_has_a_name_of_its_own() -> None:
    assert len(cheats.ATTEMPTS) >= 100
    assert len({(attempt.setting, attempt.name) for attempt in cheats.ATTEMPTS}) == len(cheats.ATTEMPTS)


# -- SECURITY.md


def test_the_page_is_short_and_names_files_that_exist() -> None:
    assert len(PAGE.splitlines()) <= 80
    named = set(re.findall(r"`([\w./-]+)`", PAGE))
    assert len(named) >= 12
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not {name for name in missing if not name.startswith("benchmarks/results/")}


def test_the_commands_of_the_page_exist() -> None:
    found = re.findall(r"uv run ([^`\n]+)", PAGE) + re.findall(r"`(nightshift [^`]+)`", PAGE)
    assert found
    for command in found:
        program, *rest = shlex.split(command)
        if program == "nightshift":
            assert rest[0] in commands.commands
        else:
            assert (ROOT / program).is_file()


def test_the_page_names_every_attempt_that_is_known_to_succeed() -> None:
    quoted = set(re.findall(r'"([^"]+)"', PAGE.partition("## Not defended")[2].partition("Nor is defended")[0]))
    assert quoted == {attempt.name for attempt in cheats.ATTEMPTS if attempt.expected == "not defended"}


@pytest.mark.parametrize("name", ["cheats", "fuzz_config"])
def test_the_recorded_results_are_of_these_attempts_and_hold(name: str) -> None:
    path = BENCHMARKS / "results" / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path.name} is not recorded yet")
    result = json.loads(path.read_text())
    if name == "fuzz_config":
        assert result["num_wrong"] == 0
        assert sum(row["cases"] for row in result["classes"]) == 1030
    else:
        assert all(row["holds"] for row in result["attempts"])
        recorded = [(row["setting"], row["name"], row["expected"]) for row in result["attempts"]]
        here = [(attempt.setting, attempt.name, attempt.expected) for attempt in cheats.ATTEMPTS]
        assert set(here) - set(recorded) <= {("checkout", "other hardware", "refused")}  # needs two cores
    assert names_no_place(path)

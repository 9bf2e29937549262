"""A dozen of the attempts, with one that must be found out; what SECURITY.md names; and the whole, marked slow."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from nightshift.cli import commands
from tests.cheats import __main__ as cheats
from tests.cheats.attempt import Attempt
from tests.cheats.by_python import own_program
from tests.checkouts import ROOT, names_no_place

PAGE = (ROOT / "SECURITY.md").read_text()
# Of every setting and kind, those that are quick.
NAMES = (
    "dotted keys", "no plain file", "edited scorer", "git replace", "core.worktree", "package over a module",
    "forged bytecode", "PYTHONPATH: environment package", "weakened incumbent", "forged results.tsv",
    "forged record", "library of the environment",
)  # fmt: skip


def test_a_dozen_attempts_come_to_what_is_expected_and_one_that_succeeds_is_seen(tmp_path: Path) -> None:
    chosen = [next(attempt for attempt in cheats.ATTEMPTS if attempt.name == name) for name in NAMES]
    assert {attempt.setting for attempt in chosen} == {"train.toml", "checkout", "night"}
    action = "as `a program of its own`"
    wished = Attempt("wished away", "checkout", action, "refused", "score and verdict", own_program)
    rows = cheats.attempt_all([*chosen, wished], tmp_path)
    assert [row["name"] for row in rows if not row["holds"]] == ["wished away"], rows
    assert rows[-1]["measured"] == "not defended"
    assert {row["measured"] for row in rows} == {"refused", "harmless", "named", "not defended"}
    assert not any(str(tmp_path) in row["evidence"] for row in rows)
    assert "1 not as expected" in cheats.table(rows)


def run(output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.cheats", *flags, "--output", str(output)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_writes_its_result(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = run(output, "--only", "arrays of tables")
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert (result["num_attempts"], result["num_as_expected"]) == (1, 1)
    assert result["attempts"][0]["measured"] == "refused"
    assert names_no_place(output)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_attempt_comes_to_what_is_expected(tmp_path: Path) -> None:
    done = run(tmp_path / "result.json")
    assert done.returncode == 0, done.stdout


def test_there_are_many_attempts_and_each_has_a_name_of_its_own_and_says_what_it_does() -> None:
    assert len(cheats.ATTEMPTS) >= 108
    assert len({(attempt.setting, attempt.name) for attempt in cheats.ATTEMPTS}) == len(cheats.ATTEMPTS)
    assert all(re.fullmatch(r"\S.*\.", attempt.action) for attempt in cheats.ATTEMPTS)


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
        elif program == "python":
            assert rest[0] == "-m"
            assert find_spec(f"{rest[1]}.__main__")
        else:
            assert (ROOT / program).is_file()


def test_the_page_names_every_attempt_that_is_known_to_succeed() -> None:
    quoted = set(re.findall(r'"([^"]+)"', PAGE.partition("## Not defended")[2].partition("Nor is defended")[0]))
    assert quoted == {attempt.name for attempt in cheats.ATTEMPTS if attempt.expected == "not defended"}


def test_the_recorded_result_is_of_these_attempts_and_holds() -> None:
    path = ROOT / "benchmarks" / "results" / "cheats.json"
    result = json.loads(path.read_text())
    assert all(row["holds"] for row in result["attempts"])
    recorded = [(row["setting"], row["name"], row["expected"]) for row in result["attempts"]]
    here = [(attempt.setting, attempt.name, attempt.expected) for attempt in cheats.ATTEMPTS]
    assert set(here) - set(recorded) <= {("checkout", "other hardware", "refused")}  # needs two cores
    assert names_no_place(path)

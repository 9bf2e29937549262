"""SECURITY.md: what it names exists, and it names every attempt to cheat that is known to succeed."""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec

from nightshift.cli.main import commands
from tests.cheats.__main__ import ATTEMPTS
from tests.checkouts import ROOT, names_no_place

PAGE = (ROOT / "SECURITY.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_is_short_and_names_files_that_exist() -> None:
    assert len(PAGE.splitlines()) <= 80
    named = set(re.findall(r"`([\w./-]+)`", PAGE))
    assert len(named) >= 12
    assert not {name for name in named if not (ROOT / name).exists()}


def test_the_commands_of_the_page_exist() -> None:
    found = re.findall(r"uv run (?:--group dev )?([^`\n]+)", PAGE) + re.findall(r"`(nightshift [^`]+)`", PAGE)
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
    assert quoted == {attempt.name for attempt in ATTEMPTS if attempt.expected == "not defended"}


def test_the_recorded_attempts_are_these_and_came_to_what_is_expected() -> None:
    attempts = json.loads((RESULTS / "cheats.json").read_text())["attempts"]
    assert all(row["holds"] for row in attempts)
    recorded = {(row["setting"], row["name"], row["expected"]) for row in attempts}
    here = {(attempt.setting, attempt.name, attempt.expected) for attempt in ATTEMPTS}
    assert here - recorded <= {("checkout", "other hardware", "refused")}  # needs two cores


def test_the_recorded_fuzzing_is_of_the_whole_and_nothing_was_wrong() -> None:
    result = json.loads((RESULTS / "fuzz_config.json").read_text())
    assert result["num_wrong"] == 0
    assert sum(row["cases"] for row in result["classes"]) == 1030
    assert all(names_no_place(RESULTS / f"{name}.json") for name in ("cheats", "fuzz_config"))

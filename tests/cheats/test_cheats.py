"""A dozen of the attempts, with one that must be found out; and the whole, marked slow."""

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cheats import __main__ as cheats
from tests.cheats.attempt import Attempt
from tests.cheats.by_python import own_program
from tests.checkouts import names_no_place, run_module

# Of every setting and kind, those that are quick.
NAMES = (
    "dotted keys", "no plain file", "edited scorer", "git replace", "core.worktree", "edited decision",
    "usercustomize in the home folder", "PYTHONPATH: environment package", "weakened incumbent", "forged results.tsv",
    "forged record", "HEAD of the checkout",
)  # fmt: skip


@pytest.mark.timeout(1200)  # thirteen attempts, each with a limit of its own
def test_a_dozen_attempts_come_to_what_is_expected_and_one_that_succeeds_is_seen(tmp_path, monkeypatch):
    chosen = [next(attempt for attempt in cheats.ATTEMPTS if attempt.name == name) for name in NAMES]
    assert {attempt.setting for attempt in chosen} == {"train.toml", "checkout", "none"}
    wished = Attempt("wished away", "checkout", "", "As `a program of its own`.", "refused", own_program)
    passed_over = replace(wished, name="no such word")
    monkeypatch.setattr(cheats, "ATTEMPTS", [*chosen, wished, passed_over])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    output = tmp_path / "results" / "result.json"
    done = CliRunner().invoke(cheats.main, ["--only", "e", "--side-by-side", "2", "--output", str(output)])
    assert done.exit_code == 1, done.output
    result = json.loads(output.read_text())
    rows = result["attempts"]
    assert [row["name"] for row in rows] == [*NAMES, "wished away"]
    assert [row["name"] for row in rows if not row["holds"]] == ["wished away"], rows
    assert rows[-1]["measured"] == "not defended"
    assert {row["measured"] for row in rows} >= {"refused", "harmless", "not defended"}
    assert "--sandbox none, " in done.stdout
    assert (result["num_attempts"], result["num_as_expected"]) == (len(rows), len(rows) - 1)
    assert result["command"] == "uv run --group dev python -m tests.cheats --only e"
    assert not any(str(tmp_path) in row["evidence"] for row in rows)
    assert names_no_place(output)
    assert f"{len(rows)} attempts, 1 not as expected" in done.stdout
    assert list(tmp_path.iterdir()) == [output.parent], "the checkout is cleared away"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_attempt_comes_to_what_is_expected(tmp_path: Path) -> None:
    done = run_module("tests.cheats", "--output", str(tmp_path / "result.json"))
    assert done.returncode == 0, done.stdout


def test_there_are_many_attempts_and_each_has_a_name_of_its_own_and_says_what_it_does() -> None:
    assert len(cheats.ATTEMPTS) >= 130
    assert len({(attempt.setting, attempt.name) for attempt in cheats.ATTEMPTS}) == len(cheats.ATTEMPTS)
    assert all(re.fullmatch(r"\S.*\.", attempt.action) for attempt in cheats.ATTEMPTS)

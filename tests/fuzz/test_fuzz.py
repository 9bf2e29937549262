"""Ten mutants and a whole process; that what is wrong would be found; and the whole, marked slow."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkouts import names_no_place, run_module
from tests.fuzz.__main__ import Answer, Tally, make_checkout, try_one


def test_ten_mutants_and_a_whole_process(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = run_module("tests.fuzz", "--cases", "10", "--processes", "1", "--output", str(output))
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert [row["cases"] for row in result["classes"]] == [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert result["num_wrong"] == 0
    careful = result["classes"][0]
    assert careful["accepted"] > 0  # else everything is refused, whatever it holds
    assert result["command"] == "uv run --group dev python -m tests.fuzz --cases 10 --processes 1 --seed 0"
    assert names_no_place(output)
    assert "whole processes" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_mutants(tmp_path: Path) -> None:
    done = run_module("tests.fuzz", "--output", str(tmp_path / "result.json"))
    assert done.returncode == 0, done.stderr


REFUSED = (2, "", "train.toml is empty. Restore it: git checkout train.toml\n")


def touch(root: Path) -> Answer:
    (root / "new").touch()
    return REFUSED


def rewrite(root: Path) -> Answer:
    (root / "train.toml").write_bytes(b"")
    return REFUSED


def say(code: int, stderr: str, stdout: str = "") -> Callable[[Path], Answer]:
    return lambda root: (code, stdout, stderr)


@pytest.mark.parametrize(
    ("ask", "cause"),
    [
        (say(1, "Traceback (most recent call last):\n  ...\nValueError: x\n"), "traceback: ValueError: x"),
        (say(1, "train.toml is wrong somehow. Correct it.\n"), "exit code 1"),
        (say(2, "train.toml is quite wrong. Correct it.\nThis is the end of it.\n"), "not printable lines"),
        (say(2, "train.toml is wrong \x1b[2J. Correct it.\n"), "not printable lines"),
        (say(2, "train.toml is wrong. Correct it.\n", "---\n"), "not printable lines"),
        (say(2, "\n"), "not printable lines"),
        (touch, "changed new"),
        (rewrite, "changed train.toml"),
        (say(0, ""), "model.name is no open key"),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, ask: Callable[[Path], Answer], cause: str) -> None:
    root, tally = tmp_path / "checkout", Tally("teeth")
    make_checkout(root)
    try_one(root, tally, ask, b"[model]\nname = 'x'\n")
    assert [found.partition(": '")[0] for found, _ in tally.wrong] == [cause]

"""Ten mutants and a whole process; that what is wrong would be found; and the whole, marked slow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkouts import names_no_place, run_module
from tests.fuzz.__main__ import Answer, Tally, make_checkout, try_one
from tests.fuzz.mutants import SHIPPED
from tests.fuzz.oracle import doubts, doubts_of_values


def test_ten_mutants_and_a_whole_process(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = run_module("tests.fuzz", "--cases", "10", "--processes", "1", "--output", str(output))
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert [row["cases"] for row in result["classes"]] == [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert result["num_wrong"] == 0
    careful = result["classes"][0]
    assert careful["accepted"] == careful["cases"]  # else everything is refused, whatever it holds
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
        (say(2, "train.toml is wrong. Correct it.\nThe end.\n"), "not one printable line"),
        (say(2, "train.toml is wrong \x1b[2J. Correct it.\n"), "not one printable line"),
        (say(2, "train.toml is wrong. Correct it.\n", "---\n"), "not one printable line"),
        (say(2, "\n"), "not one printable line"),
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

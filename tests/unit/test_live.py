"""Progress: what a line shows of a run, and what a pipe gets."""

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nightshift.campaign.records import JOB_NAME, Job, Phase, Progress
from nightshift.cli import progress
from nightshift.cli.progress import TerminalReporter, describe_run
from nightshift.files import write_json
from nightshift.waiting import waiting
from tests.rules import ARITHMETIC_TRL

JOB = Job(replace(ARITHMETIC_TRL, budget_seconds=100.0), "hash", {}, 1, 100.0, token="1f")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run. The clock stands still."""
    folder, now = tmp_path / "0007", time.time()
    monkeypatch.setattr(progress, "time", SimpleNamespace(time=lambda: now, monotonic=lambda: 0.0))
    monkeypatch.setattr("nightshift.waiting.time", SimpleNamespace(monotonic=lambda: 0.0))
    folder.mkdir()
    write_json(folder / JOB_NAME, JOB)
    return folder


def test_an_evaluation_counts_its_examples(run: Path) -> None:
    total = sum(environment.num_validation for environment in JOB.rules.environments)
    assert describe_run(run, None) == ("not started yet, 0 s", None)
    line = describe_run(run, Progress(Phase.EVALUATING, 9, num_done=1200))
    assert line == (f"evaluating 1,200 of {total:,}, 0 s", 1200 / total)
    (run / JOB_NAME).write_text("null")
    assert describe_run(run, Progress(Phase.EVALUATING, 9, num_done=3)) == ("evaluating 3 examples, 0 s", None)


def test_a_pipe_gets_plain_lines_and_no_code(run: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "_PLAIN_SECONDS", 0.0)
    with closing(TerminalReporter("looking")) as reporter, waiting(lambda: "waiting for a \x1b[31mfriend", 7.0):
        reporter.show({run: Progress(Phase.TRAINING, 37, 60.0, 0.512, slot="\x1b[31m日本")})
    friend = "waiting for a friend, 0 s of at most 7 s"
    training = "experiment 0007: 日本: training, step 37, reward 0.51, 0 s, 60 CPU s left"
    assert capsys.readouterr().err.splitlines() == ["looking", friend, f"{friend}  |  {training}"]


def test_a_pipe_gets_no_line_of_what_is_over_soon(run: Path, capsys) -> None:
    with closing(TerminalReporter()) as reporter, waiting("waiting for a friend"):
        reporter.show({})
    assert capsys.readouterr().err == ""

"""The live line: what it says of a run, and what comes of it where nobody has a terminal."""

import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nightshift.campaign.records import JOB_NAME, Job, Phase, Progress
from nightshift.cli import progress
from nightshift.cli.progress import TerminalReporter, describe_run
from nightshift.errors import Interrupted
from nightshift.executors.process import interruptible
from nightshift.files import write_json
from nightshift.waiting import look, waiting
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL

RULES = replace(ARITHMETIC_TRL, budget_seconds=100.0, budget_clock="wall")
JOB = Job(RULES, "hash", {}, 1, "validation", 100.0, token="1f")
NUM_EXAMPLES = sum(environment.num_validation for environment in RULES.environments)


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts here do not depend on the time that a test takes."""
    at = time.time()
    monkeypatch.setattr(progress, "time", SimpleNamespace(time=lambda: at, monotonic=lambda: 0.0))
    monkeypatch.setattr("nightshift.waiting.time", SimpleNamespace(monotonic=lambda: 0.0))


def a_run(folder: Path, job: Job = JOB, name: str = "0007") -> Path:
    """A folder that a controller has made."""
    folder = folder / name
    folder.mkdir(parents=True)
    write_json(folder / JOB_NAME, job)
    return folder


def test_an_evaluation_counts_its_examples(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert describe_run(run, None) == "experiment 0007: waiting to start, 0 s"
    text = describe_run(run, Progress(Phase.EVALUATING, 9, num_done=1200), "run")
    assert text == f"run: evaluating 1,200 of {NUM_EXAMPLES:,}, 0 s"
    (run / JOB_NAME).write_text("null")
    assert describe_run(run, Progress(Phase.EVALUATING, 9, num_done=3), "run") == "run: evaluating 3 examples, 0 s"


def test_a_certificates_run_and_another_engine_are_named(tmp_path: Path) -> None:
    run = a_run(tmp_path, replace(JOB, rules=GSM8K_PRIME_RL), "baseline-1000")
    assert describe_run(run, Progress(Phase.STARTING, 0, slot="node \x1b[31m7")).startswith(
        "baseline 1000: node 7: starting, 0 s of at most "
    )


def test_a_pipe_gets_plain_lines_and_news_and_no_code(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "_PLAIN_SECONDS", 0.0)
    run = a_run(tmp_path)
    with closing(TerminalReporter("looking")) as reporter:
        with waiting(lambda: "waiting for a \x1b[31mfriend", 7.0):
            reporter.show({run: Progress(Phase.TRAINING, 37, 60.0, 0.512, slot="日本")})
        with pytest.raises(Interrupted, match="stopped by SIGINT"), interruptible("this is all"):
            signal.raise_signal(signal.SIGINT)
    with waiting("nobody shows this"):
        look()
    friend = "waiting for a friend, 0 s of at most 7 s"
    training = "experiment 0007: 日本: training, step 37, reward 0.51, 0 s, 60 s of the budget left"
    assert capsys.readouterr().err.splitlines() == [
        *("looking", friend, f"{friend}  |  {training}", "SIGINT: this is all")
    ]


def test_a_pipe_gets_no_line_of_what_is_over_soon(capsys) -> None:
    with closing(TerminalReporter()) as reporter, waiting("waiting for a friend"):
        reporter.show({})
    assert capsys.readouterr().err == ""

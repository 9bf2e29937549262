"""The live line: what it says of a run, how it ticks where nobody has a terminal, and that its thread ends."""

import re
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nightshift.campaign.records import JOB_NAME, Job, Phase, Progress
from nightshift.cli import progress, running
from nightshift.cli.progress import TerminalReporter, live_line
from nightshift.cli.running import describe_run
from nightshift.errors import Interrupted
from nightshift.executors.process import interruptible
from nightshift.files import write_json
from nightshift.waiting import Wait, innermost, waiting
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL
from tests.waiting import wait_for

RULES = replace(ARITHMETIC_TRL, budget_seconds=100.0, budget_clock="wall")
JOB = Job(RULES, "hash", {}, 1, "validation", 100.0, token="1f")
NUM_EXAMPLES = sum(environment.num_validation for environment in RULES.environments)


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts here do not depend on the time that a test takes."""
    at = time.time()
    monkeypatch.setattr(running, "time", SimpleNamespace(time=lambda: at))
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
        "baseline 1000: node 7: starting: starting the inference server and the trainer, 0 s of at most "
    )


@pytest.mark.parametrize("width", [30, 60, 79, 119])
def test_a_line_is_never_wider_than_its_terminal(tmp_path: Path, width: int) -> None:
    run, reading = a_run(tmp_path), Progress(Phase.TRAINING, 37, 60.0, 0.512, slot="日本")
    line = live_line(None, {run: reading}, width)
    assert len(line) <= width
    assert line.isascii()
    assert ("budget left" in line) == (width >= 79)
    both = live_line(
        Wait(lambda: "claude is at work", 900.0), {run: reading, a_run(tmp_path, name="0008"): None}, width
    )
    assert both.startswith("claude is at work, 0 s of ")
    assert len(both) <= width


class Pipe:
    """All that came of stderr, which is no terminal."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._said = capsys, ""

    @property
    def said(self) -> str:
        self._said += self._capsys.readouterr().err
        return self._said


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Pipe:
    """With intervals that a test can wait for."""
    for name, seconds in (("_TICK_SECONDS", 0.02), ("_PLAIN_SECONDS", 0.1)):
        monkeypatch.setattr(progress, name, seconds)
    return Pipe(capsys)


def test_a_pipe_gets_whole_lines_again_and_again_and_no_code(pipe: Pipe) -> None:
    with closing(TerminalReporter()):
        with waiting("waiting for a friend", 7.0):
            wait_for(lambda: len(re.findall(r"^waiting for a friend, \d+ s of at most 7 s$", pipe.said, re.M)) >= 3)
        assert innermost() is None
        wait_for(lambda: re.search(r"^starting, \d+ s$", pipe.said, re.M))
    assert not re.search("[\r\x1b]", pipe.said)
    assert not [thread for thread in threading.enumerate() if thread.name == "live line"]


def test_a_signal_is_told_by_the_thread_which_takes_none(pipe: Pipe) -> None:
    with closing(TerminalReporter()) as reporter:
        status = Path(f"/proc/self/task/{reporter._ticker.native_id}/status")
        blocked = wait_for(lambda: int(re.findall(r"SigBlk:\s+(\w+)", status.read_text())[0], 16))
        assert blocked >> (signal.SIGINT - 1) & 1
        with pytest.raises(Interrupted, match="stopped by SIGINT"), interruptible("this is all"):
            signal.raise_signal(signal.SIGINT)
        wait_for(lambda: "SIGINT: this is all\n" in pipe.said)

"""The live line: what it says of a run, how it ticks where nobody has a terminal, and that its thread ends."""

import os
import re
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from nightshift.campaign.metrics import PROGRESS_NAME
from nightshift.campaign.records import JOB_NAME, Job, Phase, Progress
from nightshift.cli import progress, running
from nightshift.cli.progress import TerminalReporter, live_line
from nightshift.cli.running import RunLine
from nightshift.errors import Interrupted
from nightshift.executors.process import interruptible
from nightshift.files import write_json
from nightshift.waiting import Wait, innermost, waiting
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL
from tests.waiting import wait_for

RULES = replace(ARITHMETIC_TRL, budget_seconds=100.0, budget_clock="wall")
JOB = Job(RULES, "hash", {}, 1, "validation", 100.0, token="1f")
NUM_EXAMPLES = sum(environment.num_selection for environment in RULES.environments)


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is worded here: a busy machine is no part of it."""
    at = time.time()
    monkeypatch.setattr(running, "time", SimpleNamespace(time=lambda: at))
    monkeypatch.setattr("nightshift.waiting.time", SimpleNamespace(monotonic=lambda: 0.0))


def a_run(folder: Path, job: Job = JOB, name: str = "0007") -> RunLine:
    """In a folder that a controller has made."""
    folder = folder / name
    folder.mkdir(parents=True)
    write_json(folder / JOB_NAME, job)
    return RunLine(folder)


def told(run: RunLine, reading: Progress, at: float) -> str:
    """What is said of a reading that was written at that time."""
    path = run._folder / PROGRESS_NAME
    path.write_bytes(msgspec.json.encode(reading))
    os.utime(path, (at, at))
    run.read(reading)
    return run.text()


def end_of(text: str) -> float:
    """Seconds from now to the end that is told."""
    found = re.search(r"ends (\d\d):(\d\d):(\d\d)", text)
    assert found, text
    now = time.localtime(running.time.time())
    seconds = 3600 * (int(found[1]) - now.tm_hour) + 60 * (int(found[2]) - now.tm_min) + int(found[3]) - now.tm_sec
    return seconds % 86_400


def test_training_ends_when_its_budget_does(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert run.text().startswith("experiment 0007: waiting to start, 0 s")
    text = told(run, Progress(Phase.TRAINING, 37, 60.0, 0.512), time.time())
    assert text.startswith("experiment 0007: training, step 37, reward 0.51, 0 s, ends ")
    assert 55 <= end_of(text) <= 60


def test_a_budget_of_cpu_time_ends_later_beside_neighbours(tmp_path: Path) -> None:
    run = a_run(tmp_path, replace(JOB, rules=replace(RULES, budget_clock="cpu"), incumbent={}))
    told(run, Progress(Phase.TRAINING, 1, 90.0), time.time() - 20)
    text = told(run, Progress(Phase.TRAINING, 2, 80.0), time.time())  # 10 s of it took 20
    assert 150 <= end_of(text) <= 161


def test_an_evaluation_ends_as_fast_as_it_goes_and_never_goes_back(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    share = NUM_EXAMPLES // 4
    text = told(run, Progress(Phase.EVALUATING, 9, num_done=share), time.time() - 10)
    assert f"evaluating {share:,} of {NUM_EXAMPLES:,}, " in text
    assert "ends" not in text  # nobody knows yet how fast
    text = told(run, Progress(Phase.EVALUATING, 9, num_done=2 * share), time.time())
    assert 16 <= end_of(text) <= 21
    assert f"evaluating {2 * share:,} of" in told(run, Progress(Phase.EVALUATING, 9, num_done=3), time.time())


def test_a_certificates_run_and_another_engine_are_named(tmp_path: Path) -> None:
    run = a_run(tmp_path, replace(JOB, rules=GSM8K_PRIME_RL), "baseline-1000")
    assert told(run, Progress(Phase.STARTING, 0, slot="node \x1b[31m7"), time.time()).startswith(
        "baseline 1000: node 7: starting: starting the inference server and the trainer, 0 s of at most "
    )


@pytest.mark.parametrize("width", [30, 60, 79, 119])
def test_a_line_is_never_wider_than_its_terminal_and_says_when_it_ends_if_it_can(tmp_path: Path, width: int) -> None:
    run = a_run(tmp_path)
    told(run, Progress(Phase.TRAINING, 37, 60.0, 0.512, slot="日本"), time.time())
    line = live_line(None, [run], width)
    assert len(line) <= width
    assert line.isascii()
    assert ("ends " in line) == (width >= 60)
    both = live_line(Wait(lambda: "claude is at work", 900.0), [run, run], width)
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

"""The pipes between harness and trainer, with trainers of a few lines: long messages, deaths, silence, odd events."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from nightshift.campaign.records import Outcome, Progress
from nightshift.config.rules import Decoding
from nightshift.engines.standstill import Standstill
from nightshift.engines.trl import session as trl_session
from nightshift.engines.trl.session import TrlSession
from nightshift.errors import EngineError, Failure
from nightshift.executors.process import engine_environment
from tests.conftest import living_children

READY = 'import json, os, sys, time\nprint(\'{"event": "ready"}\', flush=True)\n'
ECHO = READY + (
    "for line in sys.stdin.buffer:\n"
    "    for prompt in json.loads(line)['prompts']:\n"
    "        one = {'text': prompt[0]['content'][::-1], 'num_tokens': 1, 'truncated': False}\n"
    "        print(json.dumps({'event': 'completions', 'completions': [one]}), flush=True)\n"
    '    print(\'{"event": "completed"}\', flush=True)\n'
)
STEP = '{"event": "step", "row": {"step": 1, "time": 0.1, "reward_mean": 0.5}}'
# Ten times what a pipe holds.
PROMPTS = [[{"role": "user", "content": f"{n} pens à 3 € " * 200}] for n in range(400)]
DECODING = Decoding(max_completion_tokens=8)
Start = Callable[[str], TrlSession]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Opens sessions with a trainer of the given source."""
    with ExitStack() as opened:

        def begin(source: str) -> TrlSession:
            trainer = tmp_path / "trainer.py"
            trainer.write_text(source)
            environment = engine_environment(os.environ, {})
            session = TrlSession([str(trainer)], tmp_path, environment, math.inf, math.inf)
            opened.callback(session.close)
            return session

        yield begin
    assert living_children() == []


def complete(session: TrlSession) -> list[str]:
    return [answer.text for answer in session.complete(PROMPTS, DECODING, lambda reading: None)]


def test_long_messages_pass_both_ways_and_touch_no_file(start: Start, tmp_path: Path) -> None:
    session = start(ECHO)
    readings: list[Progress] = []
    answers = session.complete(PROMPTS, DECODING, readings.append)
    assert [answer.text for answer in answers] == [prompt[0]["content"][::-1] for prompt in PROMPTS]
    assert [reading.num_done for reading in readings] == list(range(1, len(PROMPTS) + 1))
    assert {path.name for path in tmp_path.iterdir()} == {"trainer.py", "trainer.log"}


def test_a_trainer_that_talks_before_it_listens_is_no_deadlock(start: Start) -> None:
    """It fills its pipe before it reads: whoever only writes until all is written waits for it for ever."""
    session = start(ECHO.replace("for line in", f"print('{STEP}\\n' * 5000, end='', flush=True)\nfor line in", 1))
    assert len(complete(session)) == len(PROMPTS)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(3)", "os.close(0); time.sleep(600)"])
def test_a_trainer_that_is_gone_or_deaf_is_one_error(start, end, monkeypatch):
    monkeypatch.setattr(trl_session, "GRACE_SECONDS", 0.1)
    session = start(READY + f"sys.stdin.buffer.read(100000)\n{end}\n")
    with pytest.raises(
        EngineError, match=r"the connection to the trainer broke: (killed by SIGKILL|exit code 3|still running)"
    ):
        complete(session)


def test_a_trainer_that_does_not_listen_meets_the_deadline(start, tmp_path):
    session = start(READY + "time.sleep(600)\n")
    session._deadline = time.monotonic() + 0.2
    with pytest.raises(EngineError, match="did not finish `complete` within 0 s \\(load of the machine: "):
        complete(session)
    assert session.train(1.0, lambda reading: None).outcome is Outcome.DEADLINE
    with pytest.raises(EngineError, match="did not start within 0 s"):
        TrlSession(["-c", "import time; time.sleep(600)"], tmp_path, {}, time.monotonic() + 0.2, math.inf)


@pytest.mark.parametrize(
    ("more", "failure"), [("", Failure.CONFIG), (", 'is_infrastructure': True", Failure.INFRASTRUCTURE)]
)
def test_an_environment_that_cannot_score_is_no_fault_of_the_config(start: Start, more: str, failure: Failure) -> None:
    said = f"print(json.dumps({{'event': 'error', 'cause': 'no score'{more}}}), flush=True)"
    session = start(f"{READY}for line in sys.stdin.buffer:\n    {said}\n")
    training = session.train(60.0, lambda reading: None)
    assert (training.outcome, training.cause, training.failure) == (Outcome.CRASHED, "no score", failure)
    assert training.log == "trainer.log"


def test_a_trainer_that_stands_still_is_shown_ended_and_no_fault_of_the_config(start: Start, monkeypatch) -> None:
    ten_times = partial(Standstill, seconds=30.0, clock=lambda: 10 * time.monotonic())
    monkeypatch.setattr(trl_session, "Standstill", ten_times)
    monkeypatch.setattr(trl_session, "LOOK_SECONDS", 0.1)
    session = start(f"{READY}sys.stdin.readline()\nprint('{STEP}', flush=True)\nos.kill(os.getpid(), 19)\n")  # SIGSTOP
    readings: list[Progress] = []
    training = session.train(math.inf, readings.append)
    assert (training.outcome, training.failure, training.num_steps) == (Outcome.CRASHED, Failure.INFRASTRUCTURE, 1)
    assert (training.cause or "").startswith("the run stood still: no step, no CPU time and no GPU time for ")
    assert readings[0].note == ""
    assert readings[-1].note.startswith("standing still for ")


@pytest.mark.parametrize("line", [b"\xff\xfe", b'{"event": "retired"}', b"[" * 100_000])
def test_anything_else_is_one_line_about_the_trainer(start: Start, line: bytes) -> None:
    session = start(f"{READY}sys.stdout.buffer.write({line!r} + b'\\n'); sys.stdout.flush()\nsys.stdin.read()\n")
    with pytest.raises(EngineError, match="the trainer sent b'") as caught:
        complete(session)
    assert len(str(caught.value)) < 1000

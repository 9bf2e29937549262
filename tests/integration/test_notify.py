"""`--notify`: commands that hang, fail or read nothing. None delays a night, and none leaves a process."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nightshift.errors import Interrupted
from nightshift.night import observers
from nightshift.night.observers import END, KEEP, Notifier
from tests.night_checkout import good_night, records, whole_night
from tests.waiting import HANG_SECONDS, wait_for

SCRIPT = """
import json, os, signal, subprocess, sys, time
folder, kind = sys.argv[1:]
if kind == "works":
    with open(f"{folder}/heard", "a") as file:
        file.write(json.dumps([json.load(sys.stdin), os.environ.get("STAND_IN_TOKEN")]) + chr(10))
if kind == "fails":
    sys.exit("no route to the phone")
if kind == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", folder], start_new_session=True)
    time.sleep(600)
"""


def command(folder: Path, kind: str) -> str:
    (folder / "notify.py").write_text(SCRIPT)
    return shlex.join([sys.executable, str(folder / "notify.py"), str(folder), kind])


def left(folder: Path) -> list[int]:
    """Return the commands that hang, with their children."""
    return [each.pid for each in psutil.process_iter(["cmdline"]) if str(folder) in (each.info["cmdline"] or ())]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the stand-in command of --notify lies, and what it got."""
    folder = tmp_path / "notify"
    folder.mkdir()
    yield folder
    for pid in left(folder):
        os.kill(pid, signal.SIGKILL)


def test_a_command_that_reads_nothing_and_fails_is_a_line_and_the_next_one_is_sent(folder: Path) -> None:
    notes = list[str]()
    notifier = Notifier(command(folder, "fails"), notes.append, folder / "notify.log")
    with notifier.running():
        notifier.send(KEEP, {"why": "x" * 20_000})
        notifier.send(END, {})
    assert notes == [f"--notify: the notification of {event} failed: exit code 1" for event in (KEEP, END)]
    assert (folder / "notify.log").read_text() == 2 * "no route to the phone\n"


@pytest.mark.slow
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_command_that_hangs_is_ended_with_the_night_after_ctrl_c_at_once(folder, is_interrupted, monkeypatch) -> None:
    notes = list[str]()
    monkeypatch.setattr(observers, "END_SECONDS", 10 * HANG_SECONDS if is_interrupted else 2.0)
    notifier = Notifier(command(folder, "hangs"), notes.append, folder / "notify.log")
    with suppress(Interrupted), notifier.running():
        notifier.send(END, {})
        wait_for(lambda: left(folder))
        if is_interrupted:
            raise Interrupted("stopped by SIGINT")
    assert notes == ["--notify: the notification of end failed: killed by SIGKILL"]
    assert left(folder) == []


def test_a_night_whose_command_is_missing_does_not_begin(root: Path) -> None:
    code, stdout, stderr = whole_night(root, agent="lr", proposer="lr", experiments=3, notify="no-such-program")
    assert (code, stdout) == (2, "")
    assert stderr == (
        "--notify 'no-such-program': no program 'no-such-program' on PATH. "
        "Install the program, give its path, or omit --notify.\n"
    )
    assert not (root / "runs" / "night.json").exists()


@pytest.mark.slow
def test_a_night_tells_of_its_keeps_and_its_end_with_your_environment_and_stores_no_command(root, folder, monkeypatch):
    monkeypatch.setenv("STAND_IN_TOKEN", "secret")
    good_night(root, agent="lr", proposer="lr", experiments=3, notify=command(folder, "works"))
    heard = [json.loads(line) for line in (folder / "heard").read_text().splitlines()]
    messages, ours = [message for message, _ in heard], records(root)
    assert {token for _, token in heard} == {"secret"}
    keeps = [record for record in ours if record.is_keep and record.parent is not None]
    assert keeps
    assert [message["event"] for message in messages] == ["keep"] * len(keeps) + ["end"]
    for message, record in zip(messages, keeps, strict=False):
        expected = {"version": 2, "event": "keep", "campaign": "autoresearch/test", "experiment": record.number}
        expected |= {"verdict": "keep", "effect_at_decision": record.decision.effect, "why": record.judgement.why}
        assert message == {**expected, "counts": message["counts"], "page": str(root / "runs" / "report.html")}
    last = messages[-1]
    assert (last["why"], last["experiment"], last["verdict"]) == ("3 experiments are done", None, None)
    assert last["counts"]["line"].startswith("3 experiments: 1 baseline, ")
    assert (sum(last["counts"]["verdict"].values()), last["counts"]["verdict"].get("keep", 0)) == (3, len(keeps))
    for path in (root / "runs").rglob("*"):
        assert not path.is_file() or str(folder).encode() not in path.read_bytes(), path

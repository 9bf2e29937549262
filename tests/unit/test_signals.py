"""A signal ends what waits, none is lost, and no child inherits a blocked one. Each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkouts import ROOT

BEGIN = """
import os, re, signal, subprocess, sys, threading, time
from pathlib import Path
from nightshift.errors import Interrupted
from nightshift.executors.process import ProcessGroup, interruptible
from nightshift.files import remove_tree

def blocked_in(pid):
    mask = int(re.search(r"SigBlk:\\s*(\\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
    return [signal.Signals(n).name for n in (1, 2, 15) if mask >> (n - 1) & 1]

def say(*words):
    print(*words, flush=True)
"""
WAITING = """
try:
    with interruptible():
        say("ready")
        WAIT
except Interrupted as error:
    say(error)
"""
WAITS = {
    "sleep": "time.sleep(60)",
    "a lock": "threading.Event().wait()",
    "a join": "t = threading.Thread(target=time.sleep, args=(60,), daemon=True); t.start(); t.join()",
    # It reads this process's stdin, and so ends when the test closes that, even if the signal came as it was started.
    "a child": 'subprocess.run(["cat"], stdout=subprocess.DEVNULL)',
    "computing": "while True: pass",
}


def program(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", BEGIN + code], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)


def first_line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def ended(process: subprocess.Popen[str]) -> list[str]:
    stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return stdout.splitlines()


@pytest.mark.parametrize(
    ("wait", "number"),
    [*((wait, signal.SIGINT) for wait in WAITS), ("sleep", signal.SIGTERM), ("sleep", signal.SIGHUP)],
)
def test_a_signal_ends_what_waits(wait: str, number: signal.Signals) -> None:
    process = program(WAITING.replace("WAIT", WAITS[wait]))
    assert first_line(process) == "ready"
    began = time.monotonic()
    process.send_signal(number)
    # The child ends when stdin is closed: without the first line that could be before the signal is received.
    lines = [first_line(process), *ended(process)]
    assert lines == [f"stopped by {number.name}"]
    assert time.monotonic() - began < 20


def test_a_second_signal_is_ignored_and_one_to_come_is_not_lost() -> None:
    code = """
try:
    with interruptible():
        try:
            say("ready")
            time.sleep(60)
        finally:
            say("cleaning")
            sys.stdin.read()
except Interrupted as error:
    say(error)
signal.signal(signal.SIGINT, lambda number, frame: say("default"))
say("over")
signal.pause()
"""
    with program(code) as process:
        assert first_line(process) == "ready"
        process.send_signal(signal.SIGINT)
        assert first_line(process) == "cleaning"
        for _ in range(5):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        process.stdin.close()
        assert first_line(process) == "stopped by SIGINT"
        assert first_line(process) == "over"
        process.send_signal(signal.SIGINT)
        assert first_line(process) == "default"


def test_children_inherit_no_blocked_signal(tmp_path: Path) -> None:
    code = f"""
from nightshift.campaign.git import Repo
from nightshift.executors import process as processes
group = ProcessGroup("test-{os.getpid()}", 1.0)
seen = {{}}
real = subprocess.Popen.__init__
def init(self, *arguments, **keywords):
    real(self, *arguments, **keywords)
    seen[" ".join(map(str, arguments[0]))[-20:]] = blocked_in(self.pid)
subprocess.Popen.__init__ = init
with interruptible():
    say("main", blocked_in("self"))
    child = group.start("sleep", ["sleep", "60"], log_path=Path({str(tmp_path / "log")!r}), env={{}}, cwd=Path("/"))
    Repo(Path({str(ROOT)!r})).head()
    Path({str(tmp_path / "x")!r}).mkdir()
    remove_tree(Path({str(tmp_path / "x")!r}))
    group.stop()
    say("main", blocked_in("self"))
say(len(seen), [blocked for blocked in seen.values() if blocked])
"""
    process = program(code)
    lines = ended(process)
    assert lines[:2] == ["main []"] * 2
    assert lines[2] == "5 []"  # watchdog, child, git twice, rm


def test_an_ignored_signal_stays_ignored() -> None:
    code = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with interruptible():
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(0.1)
say("over")
"""
    assert ended(program(code)) == ["over"]


def test_a_command_ends_in_one_line_whatever_threads_its_libraries_start(tmp_path: Path) -> None:
    """numpy's, which are started when it is imported."""
    (tmp_path / "run.py").write_text(
        "from nightshift.startup import begin\nbegin()\n"
        "import numpy, sys, threading, time\n"
        "from nightshift.cli.shell import in_one_line\nfrom nightshift.executors.process import interruptible\n"
        "def command():\n"
        "    with interruptible():\n"
        "        print('ready', flush=True)\n        time.sleep(60)\n"
        "sys.exit(in_one_line(command)())\n"
    )
    command = [sys.executable, str(tmp_path / "run.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert first_line(process) == "ready"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == "stopped by SIGINT\n"

"""Stand-ins for what a person gives as --notify: commands that work, fail, hang or flood."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from nightshift.executors.watchdog import is_alive

# Each notes its process id, so that a test knows that it ran and is gone.
SCRIPT = """
import json, os, signal, subprocess, sys, time
folder, kind = sys.argv[1:]
message = None if kind == "deaf" else json.load(sys.stdin)
with open(f"{folder}/heard", "a") as file:
    file.write(json.dumps([os.getpid(), message, os.environ.get("STAND_IN_TOKEN"), os.getcwd()]) + chr(10))
if kind == "fails":
    print("first")
    sys.exit("no route to the phone")
if kind == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(f"{folder}/children", "a") as file:
        file.write(f"{child.pid}" + chr(10))
    time.sleep(600)
while kind == "floods":
    sys.stdout.write("all work and no play" * 5000 + chr(10))
    sys.stderr.write("all play" * 5000 + chr(10))
"""


@contextmanager
def notify_folder(tmp_path: Path) -> Iterator[Path]:
    """Where the stand-in command lies and writes; at the end nothing that it started is left."""
    folder = tmp_path / "notify"
    folder.mkdir()
    (folder / "notify.py").write_text(SCRIPT)
    yield folder
    for pid in pids(folder):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def command(folder: Path, kind: str) -> str:
    return shlex.join([sys.executable, str(folder / "notify.py"), str(folder), kind])


def heard(folder: Path) -> list[Any]:
    path = folder / "heard"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pids(folder: Path) -> list[int]:
    children = (folder / "children").read_text().split() if (folder / "children").exists() else []
    return [*(row[0] for row in heard(folder)), *map(int, children)]


def left(folder: Path) -> list[int]:
    return [pid for pid in pids(folder) if psutil.pid_exists(pid) and is_alive(psutil.Process(pid))]

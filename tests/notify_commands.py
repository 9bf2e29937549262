"""Stand-ins for the command of --notify: commands that work, fail or hang."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import psutil

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


def heard(folder: Path) -> list[Any]:
    path = folder / "heard"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def left(folder: Path) -> list[int]:
    """Return the commands that hang, with their children."""
    return [
        process.pid for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or ())
    ]

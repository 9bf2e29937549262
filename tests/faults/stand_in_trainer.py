"""A stand-in for the trl engine's trainer.py that trains nothing and strikes once, at a moment that an order names.

The order is `fault.json` in the checkout's root: {"event": "step 2", "victim": "trainer", "failure": "SIGKILL"}.
It is taken away when it is carried out, just before the event is told: so what is left of it was never struck.
Events are those of the trainer's protocol, and `start` before the first of them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

NUM_VALIDATION = 100  # of the rules in head.py
FOREVER = 600.0
# Ignores SIGTERM, has a session of its own, and forgets who started it.
DAEMON = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"


def strike(failure: str, victims: Callable[[], list[int]]) -> None:
    """Do what the order says; returns where the trainer lives on."""
    if failure.startswith("SIG"):
        for pid in victims():
            os.kill(pid, signal.Signals[failure])
        time.sleep(0.05)  # what was killed is dead before the next event
    elif failure.startswith("exit "):
        os._exit(int(failure.removeprefix("exit ")))
    elif failure == "silence":
        time.sleep(FOREVER)
    elif failure == "daemon":
        subprocess.Popen([sys.executable, "-c", DAEMON], start_new_session=True, env={}, cwd="/")
    else:
        raise ValueError(f"no such failure: {failure}")


def pids_of(victim: str, root: Path) -> list[int]:
    """Process ids of `trainer`, `worker`, `run.py`, `watchdog`, or of two of them: `watchdog and run.py`.

    run.py is the topmost process above this one that works in the checkout's root; the watchdogs, its own and the
    worker's, are known by script.
    """
    head = psutil.Process()
    for process in head.parents():
        with suppress(psutil.AccessDenied):
            head = process if process.cwd() == str(root) else head
    watchdogs = [p.pid for p in head.children(recursive=True) if any("watchdog.py" in word for word in p.cmdline())]
    pids = {"trainer": [os.getpid()], "worker": [os.getppid()], "run.py": [head.pid], "watchdog": watchdogs}
    return [pid for name in victim.split(" and ") for pid in pids[name]]


def main() -> None:
    root = next(p.parent for p in Path(sys.argv[1]).resolve().parents if p.name == "runs")
    path = root / "fault.json"
    order: dict[str, str] = json.loads(path.read_text()) if path.exists() else {"event": "never"}
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests import stand_in_trainer

    emit = stand_in_trainer.emit

    def reached(event: str) -> None:
        if order["event"] == event and path.exists():
            path.unlink()
            strike(order["failure"], lambda: pids_of(order["victim"], root))

    def watched(**event: Any) -> None:
        reached(f"step {event['step']}" if event["event"] == "step" else event["event"])
        emit(**event)

    stand_in_trainer.emit = watched
    reached("start")
    stand_in_trainer.main()


if __name__ == "__main__":
    main()

"""A stand-in for the trl engine's trainer.py that trains nothing and strikes once, at a moment that an order names.

The order is `fault.json` in the checkout's root: {"event": "step 2", "victim": "worker", "failure": "SIGKILL"}.
It is taken away when it is carried out, just before the event is told: so what is left of it was never struck.
Events are those of the worker's protocol, and `start` before the first of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

STAND_IN = Path(__file__).resolve().parents[1] / "tests" / "stand_in_worker.py"
NUM_SELECTION = 100  # of the rules in fault_scene.py
FOREVER = 600.0
# Ignores SIGTERM, has a session of its own, and forgets who started it.
DAEMON = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
TALK = {
    "no JSON": "Loading checkpoint shards: 100%",
    "no object": "17",
    "no event": "{}",
    "unknown event": '{"event": "hello"}',
    "event without its fields": '{"event": "trained"}',
    "wrong types": '{"event": "step", "step": "two", "time": null, "reward_mean": []}',
    "not a number": '{"event": "step", "step": 2, "time": NaN, "reward_mean": NaN}',
}


def strike(order: dict[str, str]) -> None:
    """Do what the order says; returns where the worker lives on."""
    failure = order["failure"]
    if failure.startswith("SIG"):
        for pid in _pids(order["victim"]):
            os.kill(pid, signal.Signals[failure])
        time.sleep(0.05)  # what was killed is dead before the next event
    elif failure.startswith("exit "):
        os._exit(int(failure.removeprefix("exit ")))
    elif failure in TALK:
        print(TALK[failure], flush=True)
    elif failure == "half a line":
        sys.stdout.write('{"event": "st')
        sys.stdout.flush()
        os._exit(1)
    elif failure == "line without end":
        sys.stdout.write("x" * 8_000_000)
        sys.stdout.flush()
        os._exit(1)
    elif failure == "closed pipe":
        os.close(1)
        time.sleep(FOREVER)
    elif failure == "silence":
        time.sleep(FOREVER)
    elif failure == "daemon":
        subprocess.Popen([sys.executable, "-c", DAEMON], start_new_session=True, env={}, cwd="/")
    else:
        raise ValueError(f"no such failure: {failure}")


def _pids(victim: str) -> list[int]:
    """Process ids of `worker`, `run.py`, `watchdog`, or of the last two: `watchdog and run.py`."""
    harness = psutil.Process(os.getppid())
    watchdogs = [p.pid for p in harness.children() if any("watchdog.py" in word for word in p.cmdline())]
    pids = {"worker": [os.getpid()], "run.py": [harness.pid], "watchdog": watchdogs}
    return [pid for name in victim.split(" and ") for pid in pids[name]]


def main() -> None:
    path = Path(sys.argv[1]).resolve().parents[3] / "fault.json"
    order: dict[str, str] | None = json.loads(path.read_text()) if path.exists() else None
    spec = importlib.util.spec_from_file_location("stand_in_worker", STAND_IN)
    assert spec is not None
    assert spec.loader is not None
    worker: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    from nightshift_arithmetic import data

    load, emit = data.load, worker.emit
    data.load = lambda split, size: load(split, min(size, NUM_SELECTION))

    def reached(event: str) -> None:
        nonlocal order
        if order is not None and order["event"] == event:
            path.unlink()
            now, order = order, None
            strike(now)

    def sabotaged(**event: Any) -> None:
        reached(f"step {event['step']}" if event["event"] == "step" else event["event"])
        emit(**event)

    worker.emit = sabotaged
    reached("start")
    worker.main()


if __name__ == "__main__":
    main()

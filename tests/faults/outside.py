"""Strikes from outside at run.py's processes and files, once the files of the experiment say that the moment came."""

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from nightshift.campaign.ledger import read_progress
from nightshift.campaign.records import Phase
from nightshift.executors.watchdog import is_alive
from tests.faults.actions import damage, last_run, place
from tests.faults.matrix import Fault

LOADING_SECONDS = 1.5  # after the trainer's start: in the middle of its imports
# How words of a process's command line end; prime-rl's programs are the stand-ins of the tests.
SCRIPTS = {"watchdog": ("watchdog.py",), "trainer": ("trl.trainer",)}
WORKERS = ("experiment.worker", "faults/worker.py")  # the real one, and the one with stand-ins


def strike(fault: Fault, root: Path, pid: int) -> bool:
    """Wait for the moment and act; False if run.py, whose process id is `pid`, ended before."""
    earlier, head = last_run(root), psutil.Process(pid)
    while is_alive(head):
        last = last_run(root)
        with suppress(FileNotFoundError, psutil.NoSuchProcess):  # what was there a moment ago may not be any more
            if last not in (None, earlier) and _is_there(fault.moment, last) and _act(fault, root, head):
                return True
        time.sleep(0.01)
    return False


def _is_there(moment: str, run_dir: Path) -> bool:
    """By the files of the run, however deep they lie."""
    found = {path.name: path for path in run_dir.rglob("*")}
    match moment.split():
        case ["starting"]:
            return any(name.endswith(".log") for name in found.keys() - {"worker.log"})
        case ["loading"]:
            return "trainer.log" in found and time.time() - found["spec.json"].stat().st_mtime > LOADING_SECONDS
        case ["step", number]:
            if any(run_dir.glob(f"**/broadcasts/step_{number}/STABLE")):
                return True
            of_trl = {"spec.json", "metrics.jsonl"} <= found.keys()
            return of_trl and found["metrics.jsonl"].read_bytes().count(b"\n") >= int(number)
        case ["weights"]:
            return any(name.startswith("weights") for name in found)
        case ["evaluating"]:
            reading = read_progress(run_dir)
            return reading is not None and reading.phase is Phase.EVALUATING
        case _:
            raise ValueError(f"no such moment: {moment}")


def _act(fault: Fault, root: Path, head: psutil.Process) -> bool:
    """False if there is nothing to strike at (yet)."""
    if not fault.failure.startswith("SIG"):
        path = place(root, fault.victim)
        return path is not None and damage(path, fault.failure)
    victims = [head] if fault.victim == "run.py" else _children(head, fault.victim)
    for process in victims:
        process.send_signal(signal.Signals[fault.failure])
    return bool(victims)


def _children(head: psutil.Process, victim: str) -> Sequence[psutil.Process]:
    endings = SCRIPTS.get(victim, ("stand_in_prime_rl.py", victim))
    below = [(p, p.cmdline()) for p in head.children(recursive=True) if is_alive(p)]
    if victim == "worker":
        return [p for p, words in below if any(word.endswith(WORKERS) for word in words)]
    return [p for p, words in below if all(any(word.endswith(end) for word in words) for end in endings)]

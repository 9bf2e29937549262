"""Faults against the real trl engine: whole processes of run.py in a clone of this checkout, watched by their files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from nightshift.processes.watchdog import is_alive
from tests import checkouts
from tests.checkouts import git
from tests.faults.actions import damage, last_run, place
from tests.faults.head import heed_all_signals
from tests.faults.matrix import Fault
from tests.faults.scenario import BRANCH, RATES, REAL_FLAGS, config_of

TAKES_SECONDS = 400.0  # a start of torch on a machine with other work takes a minute
LOADING_SECONDS = 1.5  # after the trainer's start: in the middle of its imports
SCRIPTS = {"watchdog": "watchdog.py", "trainer": "trl/trainer.py"}


def make_template(folder: Path) -> None:
    """A clone in mid-campaign: its baseline is measured."""
    if (folder / "results.tsv").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    checkouts.clone(folder, BRANCH)
    (folder / "train.toml").write_bytes(config_of(RATES["baseline"]))
    git(folder, "commit", "--quiet", "--all", "-m", "baseline config")
    if complete(folder, REAL_FLAGS) != 0:
        sys.exit(f"the baseline of the real engine failed: {(folder.parent / 'stderr').read_text()}")


def set_up(template: Path, root: Path) -> None:
    """A copy of the template with a changed config in it."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root, symlinks=True)
    (root / "train.toml").write_bytes(config_of(RATES["better"]))


def complete(root: Path, flags: tuple[str, ...]) -> int | None:
    """One run.py from start to end; None if it hangs, and is killed."""
    return _finish(_start(root, flags))


def strike(fault: Fault, root: Path) -> tuple[list[int | None], bool]:
    """Run an experiment and strike when its files say that the moment is there."""
    process = _start(root, REAL_FLAGS)
    is_struck = _wait_for(fault.moment, root, process) and _act(fault, root, process)
    return [_finish(process)], is_struck


def _start(root: Path, flags: tuple[str, ...]) -> subprocess.Popen[bytes]:
    with (root.parent / "stdout").open("wb") as out, (root.parent / "stderr").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "run.py", *flags], cwd=root, stdout=out, stderr=err, start_new_session=True,
            preexec_fn=heed_all_signals,
        )  # fmt: skip


def _finish(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(TAKES_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _wait_for(moment: str, root: Path, process: subprocess.Popen[bytes]) -> bool:
    """False if run.py ended before the moment came."""
    while process.poll() is None:
        last = last_run(root)
        with suppress(FileNotFoundError):  # what was there a moment ago may not be any more
            if last is not None and last.name != "0001" and _is_there(moment, last / "run-1"):
                return True
        time.sleep(0.01)
    return False


def _is_there(moment: str, run_dir: Path) -> bool:
    """By the files of the run, however deep they lie."""
    found = {path.name: path for path in run_dir.rglob("*")}
    match moment.split():
        case ["starting"]:
            return "worker.log" in found
        case ["loading"]:
            return "worker.log" in found and time.time() - found["spec.json"].stat().st_mtime > LOADING_SECONDS
        case ["step", number]:
            return "metrics.jsonl" in found and found["metrics.jsonl"].read_bytes().count(b"\n") >= int(number)
        case ["weights"]:
            return any(name.startswith("weights") for name in found)
        case ["evaluating"]:
            return "trained" in found  # see below
        case _:
            raise ValueError(f"no such moment: {moment}")


def _act(fault: Fault, root: Path, process: subprocess.Popen[bytes]) -> bool:
    if not fault.failure.startswith("SIG"):
        path = place(root, fault.victim)
        return path is not None and damage(path, fault.failure)
    pids = [process.pid]
    if fault.victim != "run.py":
        below = [p for p in psutil.Process(process.pid).children(recursive=True) if is_alive(p)]
        pids = [p.pid for p in below if any(SCRIPTS[fault.victim] in word for word in p.cmdline())]
    for pid in pids:
        os.kill(pid, signal.Signals[fault.failure])
    return bool(pids)

"""Faults against the real trl engine: whole processes of run.py in a clone of this checkout, watched by their files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fault_scene as scenes
import psutil
from fault_deeds import BRANCH, damage, git, last_run
from fault_matrix import Fault

from nightshift.processes.watchdog import is_alive

FLAGS = ("--engine", "trl", "--budget-seconds", "20", "--max-runs", "1")
TAKES_SECONDS = 400.0  # a start of torch on a machine with other work takes a minute
LOADING_SECONDS = 1.5  # after the worker's start: in the middle of its imports


def make_template(folder: Path) -> None:
    """A clone in mid-campaign: its baseline is measured."""
    if (folder / "results.tsv").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(scenes.ROOT), str(folder)], check=True)
    git(folder, "switch", "--quiet", "--create", BRANCH)
    (folder / "train.toml").write_bytes(scenes.config_of(scenes.RATES["baseline"]))
    git(folder, "commit", "--quiet", "--all", "-m", "baseline config")
    if run(folder, FLAGS) != 0:
        sys.exit(f"the baseline of the real engine failed: {(folder.parent / 'stderr').read_text()}")


def set_up(template: Path, root: Path) -> None:
    """A copy of the template with a changed config in it."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root, symlinks=True)
    (root / "train.toml").write_bytes(scenes.config_of(scenes.RATES["better"]))


def run(root: Path, flags: tuple[str, ...]) -> int | None:
    """One run.py from start to end; None if it hangs, and is killed."""
    return _finish(_start(root, flags))


def strike(fault: Fault, root: Path) -> tuple[list[int | None], bool]:
    """Run an experiment and strike when its files say that the moment is there."""
    process = _start(root, FLAGS)
    is_struck = _wait_for(fault.moment, root, process) and _act(fault, root, process)
    return [_finish(process)], is_struck


def _start(root: Path, flags: tuple[str, ...]) -> subprocess.Popen[bytes]:
    with (root.parent / "stdout").open("wb") as out, (root.parent / "stderr").open("wb") as err:
        command = [sys.executable, "run.py", *flags]
        return subprocess.Popen(
            command, cwd=root, stdout=out, stderr=err, start_new_session=True, preexec_fn=_heed_all_signals
        )


def _heed_all_signals() -> None:
    """A shell's background job ignores some, and so would what it starts."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


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
        if last is not None and last.name != "0001" and _is_there(moment, last / "run-1"):
            return True
        time.sleep(0.01)
    return False


def _is_there(moment: str, folder: Path) -> bool:
    match moment.split():
        case ["starting"]:
            return (folder / "worker.log").exists()
        case ["loading"]:
            return (folder / "worker.log").exists() and (
                time.time() - (folder / "spec.json").stat().st_mtime > LOADING_SECONDS
            )
        case ["step", number]:
            metrics = folder / "metrics.jsonl"
            return metrics.exists() and metrics.read_bytes().count(b"\n") >= int(number)
        case ["weights"]:
            return any(folder.glob("weights*"))
        case ["evaluating"]:
            return (folder / "prompts.json").exists()
        case _:
            raise ValueError(f"no such moment: {moment}")


def _act(fault: Fault, root: Path, process: subprocess.Popen[bytes]) -> bool:
    if not fault.failure.startswith("SIG"):
        last = last_run(root)
        return last is not None and damage(root / fault.victim.replace("LAST", last.name), fault.failure)
    pids = [process.pid]
    if fault.victim != "run.py":
        script = "watchdog.py" if fault.victim == "watchdog" else "trl/trainer.py"
        children = [p for p in psutil.Process(process.pid).children() if is_alive(p)]
        pids = [p.pid for p in children if any(script in word for word in p.cmdline())]
    for pid in pids:
        os.kill(pid, signal.Signals[fault.failure])
    return bool(pids)

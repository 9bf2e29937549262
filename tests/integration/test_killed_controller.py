"""Controllers that are killed leave no process, and the same command resumes; a second controller is refused."""

import subprocess
from pathlib import Path

import psutil
import pytest

from nightshift.errors import Failure
from nightshift.executors.process import MARKER_NAME, WATCHDOG, digest_of
from tests.integration.test_commands import start as start_experiment
from tests.night_checkout import finish, is_running, leftovers, problems, records, start_run, until_training
from tests.stand_ins import fault
from tests.waiting import wait_for


def kill(controller: subprocess.Popen[str], root: Path) -> None:
    """SIGKILL, while workers train; fails if a process is left."""
    controller.kill()
    controller.communicate()
    wait_for(lambda: not leftovers(root))


def test_a_killed_run_py_leaves_no_process_and_the_same_command_resumes(root: Path) -> None:
    fault(root, "hold", once=False)
    controller = start_experiment(root, "--budget-seconds", "1")
    until_training(root, controller)
    kill(controller, root)
    (root / "stand-in.json").unlink()
    assert records(root)[-1].status == "started"
    code, _, stderr = finish(start_experiment(root, "--budget-seconds", "1"))
    assert code == 0, stderr
    assert "0001 was interrupted" in stderr
    assert [record.failure for record in records(root)] == [Failure.INTERRUPTED, None]
    assert records(root)[-1].is_keep
    assert problems(root) == []


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_a_sweep_at_the_start_ends_what_was_killed_together_with_its_watchdog_and_nothing_else(root: Path) -> None:
    """Controller, its watchdog and the worker's watchdog are killed at once: a suspended trainer is left."""
    marks: tuple[dict[str, str], ...] = ({}, {MARKER_NAME: f"{digest_of(root.parent / 'other')}/worker"})
    foreign = [subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env=mark) for mark in marks]
    fault(root, "hold", once=False)
    controller = start_experiment(root, "--budget-seconds", "1")
    until_training(root, controller)
    everything = leftovers(root)
    trainers = [process for process in everything if any("stand_in_trainer" in word for word in process.cmdline())]
    assert trainers
    others = [process for process in everything if process not in trainers]
    for process in everything:
        process.suspend()
    ours = {str(process.pid) for process in everything}
    commands = {p: p.info["cmdline"] or [""] for p in psutil.process_iter(["cmdline"])}
    dogs = [p for p, words in commands.items() if WATCHDOG[1] in " ".join(words) and words[-1] in ours]
    for process in (*dogs, *others):
        process.kill()
    controller.communicate()
    (root / "stand-in.json").unlink()
    code, _, stderr = finish(start_experiment(root, "--budget-seconds", "1"))
    assert code == 0, stderr
    [line] = [line for line in stderr.splitlines() if line.startswith("ended processes that an earlier start")]
    assert all(f"pid {process.pid} " in line for process in trainers)
    assert leftovers(root) == []
    assert [process.poll() for process in foreign] == [None, None]
    for process in foreign:
        process.kill()
        process.wait()


def test_an_experiment_runs_without_what_only_linux_has_and_a_kill_leaves_nothing(root: Path) -> None:
    """No affinity, no control groups, no /proc, no prctl: as on macOS."""
    flags = ("--engine", "trl", "--budget-seconds", "1", "--stand-in", "mac")
    code, _, stderr = finish(start_run(root, *flags))
    assert code == 0, stderr
    assert records(root)[-1].hardware.startswith("cpu ")
    fault(root, "hold", once=False)
    controller = start_run(root, *flags, "--again")
    wait_for(lambda: is_running(root, 2))
    for process in leftovers(root):
        if process.pid != controller.pid:
            process.suspend()
    kill(controller, root)

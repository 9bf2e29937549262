"""Controllers that are killed leave no process, and the same command resumes; a second controller is refused."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.errors import Failure
from nightshift.executors import process as module
from nightshift.executors.process import CHECKOUT_NAME, digest_of, end_leftovers
from nightshift.executors.watchdog import is_alive
from tests.integration.test_commands import start as start_experiment
from tests.night_checkout import (
    finish,
    is_running,
    leftovers,
    problems,
    records,
    start,
    start_run,
    until_training,
)
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


@pytest.mark.slow
def test_what_cannot_end_by_itself_is_ended(root: Path) -> None:
    """A worker and a trainer that are suspended when their controller is killed."""
    fault(root, "hold", once=False)
    controller = start_experiment(root, "--budget-seconds", "1")
    until_training(root, controller)
    for process in leftovers(root):
        if process.pid != controller.pid:
            process.suspend()
    kill(controller, root)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_a_sweep_at_the_start_ends_what_was_killed_together_with_its_watchdog(root: Path) -> None:
    """Controller, its watchdog and the worker's watchdog are killed at once: a suspended trainer is left."""
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
    dogs = [p for p, words in commands.items() if "watchdog.py" in " ".join(words) and words[-1] in ours]
    for process in (*dogs, *others):
        process.kill()
    controller.communicate()
    (root / "stand-in.json").unlink()
    code, _, stderr = finish(start_experiment(root, "--budget-seconds", "1"))
    assert code == 0, stderr
    [line] = [line for line in stderr.splitlines() if line.startswith("processes of an earlier start")]
    assert all(f"pid {process.pid} " in line for process in trainers)
    assert leftovers(root) == []


@pytest.mark.slow
@pytest.mark.parametrize(("what", "make_anew"), [("run.py", False), ("night", True)])
def test_runs_that_is_moved_away_ends_the_controller_in_one_line(root: Path, what: str, make_anew: bool) -> None:
    fault(root, "hold", once=False)
    first = start_run(root, "--engine", "trl") if what == "run.py" else start(root, agent="lr", proposer="lr")
    wait_for(lambda: is_running(root, 1))
    (root / "runs").rename(root.parent / "moved")
    if make_anew:
        (root / "runs").mkdir()
    (root / "stand-in.json").unlink()
    code, _, stderr = finish(first)
    assert code == 2
    others = ("branch ", "comparing", "experiment 0001", "0001", "this machine may fall asleep")
    told = [line for line in stderr.splitlines() if not line.startswith(others)]
    assert len(told) == 1, stderr
    assert told[0].startswith(f"{root}/runs or its .lock was moved away or replaced while this process worked in it. ")
    assert not make_anew or list((root / "runs").iterdir()) == []
    assert leftovers(root) == []


def test_an_experiment_runs_without_what_only_linux_has_and_a_kill_leaves_nothing(root: Path) -> None:
    """No affinity, no control groups, no /proc, no prctl, no environment of a process: as on macOS."""
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


STUBBORN = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., psutil.Process]]:
    """A process in a session of its own, without a terminal."""
    monkeypatch.setattr(module, "_checkout", "")
    monkeypatch.setattr(module, "LEFTOVERS_GRACE_SECONDS", 0.1)
    started = []

    def make(env: dict[str, str] | None = None, code: str = STUBBORN) -> psutil.Process:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, start_new_session=True, env=env or {}, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return psutil.Process(process.pid)

    yield make
    for process in started:
        process.kill()
        process.communicate()


def test_only_what_belongs_to_the_checkout_is_ended(tmp_path: Path, sleeper: Callable[..., psutil.Process]) -> None:
    told: list[str] = []
    ours, foreign, bare = (
        sleeper({CHECKOUT_NAME: digest_of(tmp_path)}),
        sleeper({CHECKOUT_NAME: digest_of(tmp_path / "other")}),
        sleeper(),
    )
    end_leftovers(tmp_path, told.append)
    wait_for(lambda: not is_alive(ours))
    assert all(map(is_alive, (foreign, bare)))
    assert len(told) == 1
    assert f"pid {ours.pid} " in told[0]

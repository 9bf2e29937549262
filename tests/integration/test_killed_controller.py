"""Controllers that are killed leave no process, and the same command resumes; a second controller is refused."""

import subprocess
from pathlib import Path

import psutil
import pytest

from nightshift.campaign.records import Failure
from tests.integration.test_commands import start as start_experiment
from tests.night_checkout import (
    finish,
    is_running,
    leftovers,
    nightshift,
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
    """Controller, its watchdog and the worker's watchdog are killed at once: the trainer is left."""
    fault(root, "hold", once=False)
    controller = start_experiment(root, "--budget-seconds", "1")
    until_training(root, controller)
    everything = leftovers(root)
    trainers = [process for process in everything if any("stand_in_trainer" in word for word in process.cmdline())]
    assert trainers
    others = [process for process in everything if process not in trainers]
    for process in others:
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
    assert leftovers(root) == []


@pytest.mark.slow
def test_deleting_or_replacing_the_file_that_names_the_holder_lets_no_second_controller_in(root: Path) -> None:
    fault(root, "hold", once=False)
    first = start_run(root, "--engine", "trl")
    until_training(root, first)
    file = root / "runs" / ".controller"
    assert f'"pid":{first.pid}' in file.read_text()
    for damage, holder in ((lambda: None, f": process {first.pid} "), (file.unlink, ". Wait"), (file.touch, ". Wait")):
        damage()
        for second in (start_run(root, "--engine", "trl"), start(root, agent="lr", proposer="lr", experiments=1)):
            code, stdout, stderr = finish(second)
            assert (code, stdout) == (2, "")
            assert stderr.startswith(f"another controller works in this checkout{holder}")
            assert len(stderr.splitlines()) == 1
    (root / "stand-in.json").unlink()
    assert finish(first)[0] == 0
    assert nightshift(root, "status")[1].startswith("running:  nothing")


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

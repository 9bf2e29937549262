"""What an executor does when those that it asks do not answer; without workers and without SLURM."""

from __future__ import annotations

import base64
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from nightshift.campaign.ledger import SUBMITTED_NAME
from nightshift.campaign.records import JOB_NAME, Job, Outcome, Result, Signed, Training, signed_bytes
from nightshift.engines.prime_rl.launch import PRIME_DIR
from nightshift.engines.prime_rl.remains import TRACE_NAME, Remains, sweep
from nightshift.errors import EngineError, Interrupted
from nightshift.executors import local, slurm
from nightshift.executors.base import Submitted, announce, job_of, verified
from nightshift.executors.local import LocalExecutor
from nightshift.executors.process import interruptible
from nightshift.executors.slots import Slot
from nightshift.executors.slurm import SlurmConfig, SlurmExecutor
from nightshift.executors.watchdog import is_alive
from nightshift.files import write_json
from tests.rules import ARITHMETIC_TRL

JOB = Job(ARITHMETIC_TRL, "rules", "harness", {"lr": 1}, 1, "selection", 100.0, outlives=True)


class Controller:
    """A stand-in for SLURM's commands: its jobs by name, and what of it is out of order."""

    def __init__(self) -> None:
        self.jobs, self.scripts = dict[str, str](), dict[str, bytes]()
        self.is_away, self.loses_replies = False, False

    def ask(self, command: list[str], stdin: bytes = b"") -> str:
        if self.is_away:
            raise EngineError(f"{command[0]}: Unable to contact slurm controller")
        names = [word.partition("=")[2] for word in command if re.match("--(job-)?name=", word)]
        match command[0]:
            case "sbatch":
                self.jobs[names[0]], self.scripts[names[0]] = "RUNNING", stdin
                if self.loses_replies:
                    self.is_away = True
                    raise EngineError("sbatch did not answer in 30 s")
            case "scancel":
                self.jobs.pop(names[0], None)
            case "squeue":
                if "--me" in command:
                    return "".join(f"17 {name}\n" for name in self.jobs)
                asked = names[0].split(",")
                return "".join(f"{name} {state}\n" for name, state in self.jobs.items() if name in asked)
        return ""


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller()
    monkeypatch.setattr(slurm, "_ask", made.ask)
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.0)
    return made


@pytest.fixture
def executor(tmp_path: Path, controller: Controller) -> SlurmExecutor:
    return SlurmExecutor(
        tmp_path, dict(os.environ), SlurmConfig(pairs=4, gpus=0, cpus_per_run=2, mem_gb=2, time_minutes=10)
    )


def folder_of(root: Path, number: int = 1) -> Path:
    folder = root / "runs" / f"{number:04d}" / "run-1"
    folder.mkdir(parents=True)
    return folder


def leave_result(folder: Path, key: bytes, job: Job, attempt: int = 0) -> Result:
    """As the worker of that key does."""
    result = Result(job.seed, Training(Outcome.FINISHED, 3), attempt=attempt)
    raw = msgspec.json.encode(result)
    signature = Ed25519PrivateKey.from_private_bytes(key).sign(signed_bytes(raw, job)).hex()
    (folder / f"attempt-{attempt}").mkdir()
    write_json(folder / f"attempt-{attempt}" / "result.json", Signed(signature, msgspec.Raw(raw)))
    return result


def enter() -> None:
    """No chain here."""


# -- what is believed ---------------------------------------------------------------------------------


def test_the_first_start_that_signed_counts_whatever_lies_beside_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    key, told = announce(folder, JOB, "name", "local")
    with pytest.raises(FileNotFoundError):
        verified(folder, JOB, told.public_key)
    leave_result(folder, Ed25519PrivateKey.generate().private_bytes_raw(), JOB)
    with pytest.raises(EngineError, match=r"attempt-0/result\.json was not signed by the worker that was started"):
        verified(folder, JOB, told.public_key)
    mine = leave_result(folder, key, JOB, attempt=1)
    assert verified(folder, JOB, told.public_key) == mine
    with pytest.raises(EngineError, match="was not signed by"):
        verified(folder, replace(JOB, seed=2), told.public_key)
    (folder / "attempt-1").rename(folder / "attempt-2")
    with pytest.raises(EngineError, match=r"was copied from attempt-1|was not signed"):
        verified(folder, JOB, told.public_key)


def test_a_job_that_somebody_wrote_meanwhile_is_none_of_the_worker_s(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    _, told = announce(folder, JOB, "name", "local")
    assert job_of(folder, told) == JOB
    write_json(folder / JOB_NAME, replace(JOB, seed=77, rules_hash="other"))
    assert job_of(folder, told) is None
    (folder / JOB_NAME).unlink()
    assert job_of(folder, told) is None


def test_what_is_started_was_entered_before(tmp_path: Path, executor: SlurmExecutor, controller: Controller) -> None:
    folder, seen = folder_of(tmp_path), []
    executor.submit(folder, JOB, lambda: seen.append((len(controller.jobs), (folder / SUBMITTED_NAME).is_file())))
    assert seen == [(0, True)]
    here, seen = LocalExecutor(tmp_path, {}), []

    def refuse() -> None:
        seen.append((folder_2 / SUBMITTED_NAME).is_file())
        raise EngineError("the disk is full")

    folder_2 = folder_of(tmp_path, 2)
    with pytest.raises(EngineError):
        here.submit(folder_2, JOB, refuse)
    assert (seen, here.in_flight()) == ([True], {})


# -- a controller that does not answer ----------------------------------------------------------------


def test_a_job_whose_submission_was_not_answered_is_cancelled_or_looked_for(
    tmp_path: Path, executor: SlurmExecutor, controller: Controller
) -> None:
    controller.loses_replies = True
    folder = folder_of(tmp_path)
    executor.submit(folder, JOB, enter)  # neither sbatch nor scancel answered
    assert len(controller.jobs) == 1
    assert [*executor.in_flight()] == [folder]
    controller.is_away, (name,) = False, controller.jobs
    assert not executor.is_over(folder)
    mine = leave_result(folder, _key(controller, name), executor.in_flight()[folder])
    controller.jobs[name] = "COMPLETED"
    assert executor.is_over(folder)
    assert executor.result(folder) == mine


def test_a_refused_job_is_nowhere(tmp_path: Path, executor: SlurmExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], stdin: bytes = b"") -> str:
        if command[0] == "sbatch":
            raise EngineError("sbatch: error: invalid partition specified: nowhere")
        return ""

    monkeypatch.setattr(slurm, "_ask", refuse)
    with pytest.raises(EngineError, match="invalid partition"):
        executor.submit(folder_of(tmp_path), JOB, enter)
    assert executor.in_flight() == {}


def test_a_signed_result_counts_and_its_job_is_cancelled_later_where_the_controller_is_away(
    tmp_path: Path, executor: SlurmExecutor, controller: Controller
) -> None:
    folder = folder_of(tmp_path)
    executor.submit(folder, JOB, enter)
    (name,) = controller.jobs
    mine = leave_result(folder, _key(controller, name), executor.in_flight()[folder])
    controller.is_away = True
    assert executor.result(folder) == mine
    assert executor.in_flight() == {}
    controller.is_away = False
    other = folder_of(tmp_path, 2)
    executor.submit(other, JOB, enter)
    assert name in controller.jobs
    executor.is_over(other)
    assert name not in controller.jobs
    assert len(controller.jobs) == 1


def test_what_is_not_cancelled_now_is_cancelled_when_the_controller_answers(
    tmp_path: Path, executor: SlurmExecutor, controller: Controller
) -> None:
    folders = [folder_of(tmp_path, number) for number in (1, 2)]
    for folder in folders:
        executor.submit(folder, JOB, enter)
    controller.is_away = True
    executor.cancel(folders)
    assert (executor.in_flight(), len(controller.jobs)) == ({}, 2)
    controller.is_away = False
    assert executor.other_jobs() == [], "they are ours until they are gone"
    executor.cancel([])
    assert controller.jobs == {}


def test_a_job_that_completed_has_longer_to_be_seen_than_one_that_failed(
    tmp_path: Path, executor: SlurmExecutor, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "OTHERWISE_SECONDS", 0.0)
    folders = [folder_of(tmp_path, number) for number in (1, 2)]
    for folder in folders:
        executor.submit(folder, JOB, enter)
    controller.jobs.update(zip(controller.jobs, ("COMPLETED", "NODE_FAIL"), strict=True))
    executor.is_over(folders[0])
    time.sleep(0.01)
    assert [executor.is_over(folder) for folder in folders] == [False, True]
    with pytest.raises(EngineError, match=r"ended without a result: .*NODE_FAIL"):
        executor.result(folders[1])


def _key(controller: Controller, name: str) -> bytes:
    found = re.search(rb"<<< (\S+)", controller.scripts[name])
    assert found
    return base64.b64decode(found[1])


# -- this machine -------------------------------------------------------------------------------------


class Ended:
    """A stand-in for a worker."""

    def __init__(self, is_over: bool) -> None:
        self.is_over, self.fds = is_over, os.pipe()

    def has_ended(self) -> bool:
        return self.is_over


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[LocalExecutor, list[Ended]]]:
    """One that ended before its turn to be collected, and one that runs."""
    from nightshift.executors.local import _Worker

    executor, workers = LocalExecutor(tmp_path, {}, (Slot(0), Slot(1))), [Ended(True), Ended(False)]
    os.close(workers[0].fds[1])  # readable from now on, as the pidfd of an ended process is
    for number, worker in enumerate(workers):
        executor._workers[tmp_path / str(number)] = _Worker(worker, "", JOB, Slot(number), float("inf"), worker.fds[0])  # type: ignore[arg-type]
    yield executor, workers
    for descriptor in (workers[0].fds[0], *workers[1].fds):
        os.close(descriptor)


def test_a_run_that_waits_for_its_turn_does_not_keep_the_head_busy(two: tuple[LocalExecutor, list[Ended]]) -> None:
    began = time.monotonic()
    two[0].wait(0.3)
    assert time.monotonic() - began >= 0.25


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="what the signal comes at is Linux's")
def test_a_worker_that_a_stop_comes_at_the_start_of_is_not_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, started, pidfd_open = tmp_path / "worker.py", list[psutil.Process](), os.pidfd_open

    def stopped(pid: int) -> int:
        started.append(psutil.Process(pid))
        os.kill(os.getpid(), signal.SIGINT)
        return pidfd_open(pid)

    program.write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(local, "PROGRAM", (str(program),))
    monkeypatch.setattr(os, "pidfd_open", stopped)
    executor = LocalExecutor(tmp_path, dict(os.environ), outlives=True)
    with pytest.raises(Interrupted), interruptible():
        executor.submit(folder_of(tmp_path), JOB, enter)
    executor.cancel([*executor.in_flight()])
    left = [process for process in started if is_alive(process)]
    for process in left:
        process.kill()
    assert (left, len(started)) == ([], 1)


def test_only_who_fits_a_free_slot_is_adopted(tmp_path: Path) -> None:
    was = Submitted("name", "local", "", "")
    executor = LocalExecutor(tmp_path, {}, (Slot(0, cores=(0,)), Slot(1, cores=(1,))), outlives=True)
    assert not executor.adopt(tmp_path / "a", was, replace(JOB, cores=(7,)))
    assert not executor.adopt(tmp_path / "a", was, replace(JOB, cores=(0,), outlives=False))
    assert not executor.adopt(tmp_path / "a", was, replace(JOB, cores=(1,))), "it was never begun"
    leave_result(folder_of(tmp_path), bytes(32), JOB)
    assert executor.adopt(tmp_path / "runs/0001/run-1", was, replace(JOB, cores=(1,)))
    assert not executor.adopt(tmp_path / "b", was, replace(JOB, cores=(1,))), "it is taken"
    assert [slot.number for slot in executor.free_slots] == [0]


def test_what_lies_below_a_run_of_another_node_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares the folder, and its process ids are not ours."""
    prime_dir = folder_of(tmp_path) / "attempt-0" / PRIME_DIR
    (prime_dir / "broadcasts").mkdir(parents=True)
    Remains(prime_dir, False, time.monotonic).begin()
    trace = prime_dir.parent / TRACE_NAME
    told = msgspec.json.decode(trace.read_bytes())
    dead = told | {"pid": 2**30}
    write_json(trace, dead | {"node": "elsewhere", "boot": "another"})
    sweep(tmp_path / "runs", PRIME_DIR)
    assert (prime_dir / "broadcasts").is_dir()
    write_json(trace, dead | {"boot": "the one before"})  # a machine that was started again
    sweep(tmp_path / "runs", PRIME_DIR)
    assert not (prime_dir / "broadcasts").exists()

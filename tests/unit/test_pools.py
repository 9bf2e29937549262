"""What an executor does when those that it asks do not answer; without workers and without SLURM."""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nightshift.campaign.records import STARTED_NAME, Job, Outcome, Result, Training
from nightshift.errors import EngineError, Interrupted
from nightshift.executors import base, slurm
from nightshift.executors.base import read_result
from nightshift.executors.local import LocalExecutor
from nightshift.executors.process import Child, ProcessGroup, interruptible, is_alive
from nightshift.executors.slurm import SlurmConfig, SlurmExecutor
from nightshift.files import write_json
from tests.rules import ARITHMETIC_TRL

JOB = Job(ARITHMETIC_TRL, "rules", {"lr": 1}, 1, 100.0, token="1f")


class Controller:
    """A stand-in for SLURM's commands: its jobs by name, and what of it is out of order."""

    def __init__(self) -> None:
        self.jobs, self.scripts = dict[str, str](), dict[str, bytes]()
        self.is_away, self.loses_replies = False, False

    def ask(self, command: list[str], stdin: bytes = b"", *_: object) -> str:
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
                asked = names[0].split(",")
                return "".join(f"{name}|{state}|n1|None\n" for name, state in self.jobs.items() if name in asked)
        return ""


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller()
    monkeypatch.setattr(slurm, "_ask", made.ask)
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.0)
    return made


@pytest.fixture
def executor(tmp_path: Path, controller: Controller) -> SlurmExecutor:
    config = SlurmConfig(pairs=4, gpus=0, cpus_per_run=2, mem_gb=2, time_minutes=10)
    return SlurmExecutor(tmp_path, dict(os.environ), config)


def folder_of(root: Path, number: int = 1) -> Path:
    folder = root / "runs" / f"{number:04d}"
    folder.mkdir(parents=True)
    return folder


def leave_result(folder: Path, job: Job) -> Result:
    """As the worker of that job does."""
    result = Result(job.seed, Training(Outcome.FINISHED, 3), token=job.token, job_sha256=job.sha256)
    write_json(folder / "result.json", result)
    return result


def enter() -> None:
    """No journal here."""


def test_a_result_counts_where_its_token_and_its_seed_are_those_of_the_job(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_result(folder, JOB)
    for edited in ({"settings": {"lr": 9}}, {"token": "another"}, {"seed": 2}):  # settings: in job.json
        leave_result(folder, replace(JOB, **edited))
        with pytest.raises(EngineError, match=r"0001/result\.json has another token, seed or sha256 than its job: "):
            read_result(folder, JOB)
    assert leave_result(folder, JOB) == read_result(folder, JOB)


@pytest.mark.parametrize("data", [b"", b'{"seed": 1}', b"[" * 100_000])
def test_what_is_no_result_is_named(tmp_path: Path, data: bytes) -> None:
    folder = folder_of(tmp_path)
    (folder / "result.json").write_bytes(data)
    with pytest.raises(EngineError, match=r"0001/result\.json is not the result of a worker"):
        read_result(folder, JOB)


def test_a_job_that_slurm_never_got_is_submitted_only_after_sbatch_could_have_answered(
    tmp_path: Path, executor: SlurmExecutor, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path)
    executor.take_over(folder, replace(JOB, name="nightshift-1"))
    assert not executor.is_over(folder)
    assert controller.jobs == {}
    monkeypatch.setattr(slurm, "ANSWER_SECONDS", 0.0)
    for _ in range(2):  # the second time sbatch has returned, and slurmctld died before it wrote the job down
        assert not executor.is_over(folder)
        assert controller.jobs == {"nightshift-1": "RUNNING"}
        del controller.jobs["nightshift-1"]
    (folder / STARTED_NAME).touch()
    monkeypatch.setattr(slurm, "RESULT_SECONDS", -1.0)
    assert executor.is_over(folder)
    assert controller.jobs == {}


def test_a_job_whose_submission_was_not_answered_is_cancelled_or_looked_for(tmp_path, executor, controller):
    controller.loses_replies = True
    folder = folder_of(tmp_path)
    executor.submit(folder, JOB, enter)  # neither sbatch nor scancel answered
    assert len(controller.jobs) == 1
    assert [*executor.in_flight()] == [folder]
    controller.is_away, (name,) = False, controller.jobs
    assert not executor.is_over(folder)
    mine = leave_result(folder, executor.in_flight()[folder])
    controller.jobs[name] = "COMPLETED"
    assert executor.is_over(folder)
    assert executor.result(folder) == mine


def test_a_job_above_the_limit_of_the_cluster_is_sent_again(tmp_path, executor, controller, monkeypatch):
    def refuse(command: list[str], stdin: bytes = b"", *_: object) -> str:
        if command[0] == "sbatch":
            raise EngineError("sbatch: error: AssocMaxSubmitJobLimit x")
        return controller.ask(command, stdin)

    monkeypatch.setattr(slurm, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "_ask", refuse)
    folder = folder_of(tmp_path)
    executor.submit(folder, JOB, enter)
    assert not executor.is_over(folder)
    monkeypatch.setattr(slurm, "_ask", controller.ask)
    assert not executor.is_over(folder)
    assert [*controller.jobs] == [executor.in_flight()[folder].name]


def test_an_avoided_node_is_excluded_with_those_of_slurm_toml(tmp_path, monkeypatch) -> None:
    made = SlurmExecutor(tmp_path, dict(os.environ), SlurmConfig(1, 0, 1, 1, 5, sbatch=("--exclude=n2",)))
    sent: list[str] = []
    monkeypatch.setattr(slurm, "_ask", lambda command, *_: sent.extend(command))
    made.avoided = ("n9",)
    made.submit(folder_of(tmp_path), JOB, enter)
    assert [word for word in sent if "exclude" in word] == ["--exclude=n2", "--exclude=n2,n9"]  # sbatch uses the last


def test_a_result_counts_and_jobs_are_cancelled_later_where_the_controller_is_away(tmp_path, executor, controller):
    folder = folder_of(tmp_path)
    executor.submit(folder, JOB, enter)
    (name,) = controller.jobs
    mine = leave_result(folder, executor.in_flight()[folder])
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
    controller.is_away = True
    executor.cancel([other])
    assert (executor.in_flight(), len(controller.jobs)) == ({}, 1)
    controller.is_away = False
    executor.cancel([])
    assert controller.jobs == {}


def test_a_worker_that_a_stop_comes_at_the_start_of_is_not_left_running(tmp_path, monkeypatch):
    program, started, start = tmp_path / "worker.py", list[psutil.Process](), ProcessGroup.start

    def stopped(*arguments: Any, **named: Any) -> Child:
        child = start(*arguments, **named)
        started.append(psutil.Process(child.pid))
        os.kill(os.getpid(), signal.SIGINT)
        return child

    program.write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(base, "PROGRAM", (str(program),))
    monkeypatch.setattr(ProcessGroup, "start", stopped)
    executor = LocalExecutor(tmp_path, dict(os.environ))
    with pytest.raises(Interrupted), interruptible():
        executor.submit(folder_of(tmp_path), JOB, enter)
    executor.cancel([*executor.in_flight()])
    left = [process for process in started if is_alive(process)]
    for process in left:
        process.kill()
    assert (left, len(started)) == ([], 1)

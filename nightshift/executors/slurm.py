"""Workers as jobs of a SLURM cluster, by sbatch, squeue and scancel; never sacct, which many clusters lack.

job.json has the name of its job before sbatch is called, so a later controller finds the job, also after a kill during
sbatch. What SLURM does not answer is unknown, not lost. SLURM may start a job twice, whatever --no-requeue says: the
second start finds `worker.started` and ends.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from nightshift.campaign.ledger import STARTED, Ledger
from nightshift.campaign.records import JOB_NAME, LATE_SECONDS, LOG_NAME, RUN_NAME, STARTED_NAME, Job, Result
from nightshift.errors import EngineError, UsageError, listed
from nightshift.executors.local import PROGRAM, Slot, read_result
from nightshift.executors.process import engine_environment, mark, python_command, python_path, tail
from nightshift.files import read_file, read_json, write_json
from nightshift.waiting import waiting

Positive = Annotated[int, Meta(ge=1, le=100_000)]


class SlurmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of slurm.toml. `pairs`: how many runs at once; `gpus`: of each; `gres`: where another name than
    `gpu:N` is needed; `setup`: shell lines before the worker starts; `queue_minutes`: how long a job may wait."""

    pairs: Positive
    gpus: Annotated[int, Meta(ge=0, le=16)]
    cpus_per_run: Positive
    mem_gb: Positive
    time_minutes: Positive
    partition: str = ""
    account: str = ""
    constraint: str = ""
    gres: str = ""
    setup: tuple[str, ...] = ()
    queue_minutes: Positive = 600

    @property
    def layout(self) -> str:
        """What the hardware of a run is followed by: what it was given of its node, and whatever `setup` changes."""
        digest = hashlib.sha256("\n".join(self.setup).encode()).hexdigest()[:8]
        return f", job of {self.cpus_per_run} CPUs, {self.mem_gb} GB" + (f", setup {digest}" if self.setup else "")

    @property
    def options(self) -> list[str]:
        """For sbatch. Memory and cores are always said: a job without --mem may take a whole node."""
        values = {
            "nodes": 1,
            "ntasks": 1,
            "cpus-per-task": self.cpus_per_run,
            "mem": f"{self.mem_gb}G",
            "time": self.time_minutes,
            "partition": self.partition,
            "account": self.account,
            "constraint": self.constraint,
            "gres": self.gres or (self.gpus and f"gpu:{self.gpus}"),
        }
        return [f"--{name}={value}" for name, value in values.items() if value]


def read(path: Path) -> SlurmConfig:
    """Return the contents of a slurm.toml. Raises UsageError."""
    try:
        return msgspec.toml.decode(read_file(path), type=SlurmConfig)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}", f"Its keys: {', '.join(SlurmConfig.__struct_fields__)}.") from None


_LOOK_SECONDS = 0.2
POLL_SECONDS = 2.0  # between two questions to slurmctld, for all jobs at once
ANSWER_SECONDS = 30.0  # a slurmctld that is away answers after nine, with an error
# Until a file that another node wrote is seen here. A job that completed wrote one: acdirmax of NFS is 60 s (nfs(5)).
COMPLETED_SECONDS = 75.0
OTHERWISE_SECONDS = 10.0
CANCEL_SECONDS = 90.0  # SLURM's own KillWait is 30
_QUEUE, _ALL_STATES = ("squeue", "--noheader"), "--states=all"
_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
# What another node has of its own.
_OWN_OF_A_NODE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TMPDIR", "TMP", "TEMP")


@dataclass(slots=True)
class _Work:
    """A job that was submitted and not collected. `state`: as slurmctld last told it, "" before; `gone_at`: since
    when nothing of it is left there."""

    job: Job
    ends_at: float  # on the monotonic clock
    state: str = ""
    gone_at: float | None = None


@dataclass(slots=True)
class SlurmExecutor:
    """Jobs of one person on one cluster, whose checkout lies on a folder that all nodes share."""

    root: Path
    environ: Mapping[str, str]
    config: SlurmConfig
    free_slots: Sequence[Slot] = ()  # none on this machine
    _works: dict[Path, _Work] = field(default_factory=dict)
    _unwanted: set[str] = field(default_factory=set)  # names of jobs that are to be cancelled yet
    _asked_at: float = -POLL_SECONDS

    @property
    def num_slots(self) -> int:
        return self.config.pairs

    def hardware(self, of_engine: str) -> str:
        return ""

    def submit(self, folder: Path, job: Job, enter: Callable[[], None], command: str = "") -> None:
        """As LocalExecutor. A job without an answer of sbatch is waited for.

        `command`: a shell command, in place of the worker.
        """
        name = f"nightshift-{uuid.uuid4().hex}"
        job = replace(job, layout=self.config.layout, name=name)
        write_json(folder / JOB_NAME, job)
        enter()
        options = ["--parsable", "--no-requeue", "--export=NONE", "--open-mode=append", *self.config.options]
        options += [f"--job-name={name}", f"--output={folder / LOG_NAME}", f"--chdir={self.root}"]
        variables = engine_environment(self.environ, {}).items()
        exports = [f"export {key}={shlex.quote(value)}" for key, value in variables if key not in _OWN_OF_A_NODE]
        command = command or f"exec {shlex.join(python_command(*PROGRAM, str(self.root), str(folder)))}"
        # Last: `module load` among the lines of setup sets PYTHONPATH.
        lines = [*exports, *self.config.setup, f"export PYTHONPATH={shlex.quote(python_path())}", command]
        script = "\n".join(["#!/bin/bash", *lines]) + "\n"
        self.take_over(folder, job)
        try:
            _ask(["sbatch", *options], script.encode())
        except BaseException as error:
            self.cancel([folder])
            if name in self._unwanted and isinstance(error, EngineError):
                self._unwanted.discard(name)
                self.take_over(folder, job)
                return
            raise

    def take_over(self, folder: Path, job: Job) -> None:
        """Wait for the result of a job that was submitted, by this controller or an earlier one."""
        seconds = job.deadline_seconds + LATE_SECONDS + 60.0 * self.config.queue_minutes
        self._works[folder] = _Work(job, time.monotonic() + seconds)

    def is_over(self, folder: Path) -> bool:
        """True where there is a result, or slurmctld says that none will come, or far too late."""
        work = self._works.get(folder)
        if work is None or time.monotonic() > work.ends_at:
            return True
        self._poll()
        if work.gone_at is None:
            return False
        # A job that was never seen may be one that sbatch has not handed over yet.
        patience = {"": ANSWER_SECONDS, "COMPLETED": COMPLETED_SECONDS}.get(work.state, OTHERWISE_SECONDS)
        with suppress(FileNotFoundError, EngineError):
            read_result(folder, work.job)
            return True
        return time.monotonic() - work.gone_at > patience

    def _poll(self) -> None:
        """Ask for the state of all jobs, now and then. A job that is not in the answer was forgotten by slurmctld."""
        if time.monotonic() - self._asked_at < POLL_SECONDS:
            return
        self._asked_at = time.monotonic()
        self._cancel_unwanted()
        names = ",".join(work.job.name for work in self._works.values())
        try:
            lines = _ask([*_QUEUE, _ALL_STATES, f"--name={names}", "--format=%j %T"]).splitlines()
        except EngineError:
            return  # slurmctld is away: nothing is known, so nothing is lost
        states = {name: state for name, _, state in (line.partition(" ") for line in lines)}
        for work in self._works.values():
            work.state = states.get(work.job.name, work.state).strip()
            is_gone = work.job.name not in states or work.state in _ENDED
            work.gone_at = work.gone_at or time.monotonic() if is_gone else None

    def wait(self, timeout_seconds: float) -> None:
        time.sleep(timeout_seconds)

    def in_flight(self) -> dict[Path, Job]:
        return {folder: work.job for folder, work in self._works.items()}

    def has_begun(self, folder: Path) -> bool:
        """False for a job that was last seen to wait."""
        self._poll()
        return self._works[folder].state != "PENDING" or (folder / STARTED_NAME).exists()

    def cancel(self, folders: Collection[Path]) -> None:
        """Cancel jobs. Returns when they are gone from the cluster, at the latest after CANCEL_SECONDS, or when
        slurmctld does not answer: then they are cancelled when it does."""
        names = [self._works.pop(folder).job.name for folder in folders if folder in self._works]
        self._unwanted |= {*names}
        self._cancel_unwanted()
        ends_at, asked = time.monotonic() + CANCEL_SECONDS, [*_QUEUE, f"--name={','.join(names)}"]
        with suppress(EngineError), waiting("cancelling jobs of the cluster", CANCEL_SECONDS):
            while not self._unwanted and names and time.monotonic() < ends_at and _ask(asked):
                time.sleep(_LOOK_SECONDS)

    def _cancel_unwanted(self) -> None:
        with suppress(EngineError):  # at the next question, then
            cancel_jobs(self._unwanted)
            self._unwanted.clear()

    def result(self, folder: Path) -> Result:
        """The result of a job. EngineError, with what SLURM says of the job, where there is none."""
        work = self._works.get(folder)
        if work is None:
            raise EngineError(f"no job was submitted for {folder}, which the record says is the run in flight")
        try:
            return read_result(folder, work.job)
        except FileNotFoundError:
            why = f"last seen {work.state or 'nowhere'}; "
            try:
                lines = _ask([*_QUEUE, _ALL_STATES, f"--name={work.job.name}", "--format=%T, reason %r, node %N"])
                why = lines.strip().splitlines()[-1] if lines.strip() else f"{why}slurmctld does not know it"
            except EngineError as error:
                why += error.cause
            raise EngineError(f"job {work.job.name} ended without a result: {why}", "Run it again.") from None
        finally:
            self.cancel([folder])  # what was started twice may go on


def cancel_jobs(names: Collection[str]) -> None:
    """Cancel jobs by their names. EngineError where slurmctld does not answer."""
    for name in names:
        _ask(["scancel", f"--name={name}"])


def job_left(folder: Path) -> Job | None:
    """Return the job in SLURM of the run in `folder`; None without one, or if job.json is damaged."""
    with suppress(UsageError):
        job = read_json(folder / JOB_NAME, Job, "")
        return job if job and job.name else None
    return None


def jobs_left(ledger: Ledger, first: int = 0, *, of_certificates: bool = False) -> dict[Path, Job]:
    """Return the jobs that an earlier controller submitted and did not collect, by the folders of their runs.

    They are of experiments from `first` on, and of certificates if `of_certificates`.
    """
    numbers = [record.number for record in ledger.records() if record.status == STARTED and record.number >= first]
    folders = [*map(ledger.run_dir, numbers)]
    if of_certificates:
        paths = ledger.runs_dir.glob(f"*/*/*/{JOB_NAME}")  # certify/NNNN/SIDE-SEED
        folders += [path.parent for path in sorted(paths) if not path.with_name(RUN_NAME).exists()]
    return {folder: job for folder in folders if (job := job_left(folder))}


def end_jobs(ledger: Ledger, note: Callable[[str], None], *, of_certificates: bool = False) -> None:
    """Cancel the jobs of `jobs_left`. EngineError if slurmctld does not answer."""
    if jobs := jobs_left(ledger, of_certificates=of_certificates):
        cancel_jobs([job.name for job in jobs.values()])
        for folder in jobs:
            if folder.parent != ledger.runs_dir:
                (folder / JOB_NAME).unlink()  # `certify --resume` waits for a job that is named there
        note(f"cancelled jobs in SLURM that an earlier controller left: {listed([path.name for path in jobs])}")


def _ask(command: list[str], stdin: bytes = b"") -> str:
    """What a command of SLURM says. EngineError with its last line where it fails, or does not answer."""
    options = ("SLURM_", "SBATCH_", "SQUEUE_")  # variables by which the commands take options
    environment = {n: v for n, v in os.environ.items() if n == "SLURM_CONF" or not n.startswith(options)}
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            check=False,
            timeout=ANSWER_SECONDS,
            env=environment | mark(),
            process_group=0,  # a Ctrl-C is the controller's to answer
        )
    except FileNotFoundError:
        raise EngineError(f"{command[0]} is not here", "Run this where SLURM's commands are: a login node.") from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"{command[0]} did not answer in {ANSWER_SECONDS:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise EngineError(f"{command[0]}: {lines[-1]}")
    return done.stdout.decode(errors="replace")


def ask_node(executor: SlurmExecutor, job: Job, words: Sequence[str]) -> tuple[str, bytes]:
    """Run a Python command in one job. Return a line on its node, and what the command printed. EngineError if no
    answer comes back."""
    runs_dir = executor.root / "runs"
    runs_dir.mkdir(exist_ok=True)
    folder, began = Path(tempfile.mkdtemp(prefix=".node-", dir=runs_dir)), time.monotonic()
    answer = folder / "answer"
    try:
        printed = shlex.quote(f"{answer}.part")
        command = f"{shlex.join(python_command(*words))} > {printed}; mv {printed} {shlex.quote(str(answer))}"
        executor.submit(folder, job, lambda: None, command)
        while not answer.is_file():
            if executor.is_over(folder):
                raise EngineError("the job ended without an answer", "Look at its node.")
            executor.wait(_LOOK_SECONDS)
        text = read_file(answer)
        if not text:
            why = "".join(f": {line}" for line in tail(folder / LOG_NAME, 1))
            raise EngineError(f"the command of the job printed nothing{why}", "Look at its node.")
        node, name = "unknown", executor.in_flight()[folder].name
        with suppress(EngineError):  # the answer is here, also if slurmctld is not
            node = _ask([*_QUEUE, _ALL_STATES, f"--name={name}", "--format=%N"]).strip()
        return f"node:     {node}, answered after {time.monotonic() - began:.1f} s", text
    finally:
        executor.cancel([folder])
        shutil.rmtree(folder, ignore_errors=True)

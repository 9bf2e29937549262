"""Workers as jobs of a SLURM cluster, by sbatch, squeue and scancel (not sacct, which many clusters lack).

The name of a job is in job.json before sbatch is called, so a later controller finds the job even after a kill during
sbatch. While SLURM does not answer, no job counts as lost. A job that SLURM does not know and that no node has started
is submitted again under the same name. A job may therefore start twice: the second start finds `worker.started` and
ends.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from nightshift.campaign.ledger import STARTED, Ledger
from nightshift.campaign.records import (
    DETACHED_NAME,
    JOB_NAME,
    JOB_OF,
    LATE_SECONDS,
    LOG_NAME,
    RESULT_NAME,
    RUN_NAME,
    STARTED_NAME,
    Job,
)
from nightshift.errors import EngineError, Failure, UsageError, listed
from nightshift.executors import base, process
from nightshift.executors.base import Executor, Flight, read_result
from nightshift.files import read_file, read_json
from nightshift.waiting import waiting

Positive = Annotated[int, Meta(ge=1, le=100_000)]
_FIXED = ("--no-requeue", "--open-mode=append", "--nodes=1", "--ntasks=1")
# The options that Nightshift sets, or that would break it.
_LONG = (
    " --no-requeue --requeue --open-mode --nodes --ntasks --export --cpus-per-task --mem --time --partition --account"
    " --constraint --gres --job-name --output --error --chdir --wait --array --wrap --test-only"
)
_EXCLUDE = re.compile(r"(?:^|\0)(?:--exclude[=\0]|-x[=\0 ]?)([^\0]+)")  # in the words of `sbatch`, joined by NUL
_SHORT = ("-J", "-o", "-e", "-D", "-W", "-a", "-N", "-n", "-c", "-t", "-p", "-A", "-C")


class SlurmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of slurm.toml."""

    pairs: Positive  # runs at once
    gpus: Annotated[int, Meta(ge=0, le=16)]  # of a run
    cpus_per_run: Positive
    mem_gb: Positive
    time_minutes: Positive
    partition: str = ""
    account: str = ""
    constraint: str = ""
    gres: str = ""  # by default gpu:N
    sbatch: tuple[str, ...] = ()  # more options
    setup: tuple[str, ...] = ()  # shell lines that run before the worker starts
    queue_minutes: Positive = 600  # how long a job may wait
    controller_minutes: Annotated[int, Meta(ge=0, le=100_000)] = 0  # of --controller-job; 0: the partition's limit

    def __post_init__(self) -> None:
        """Raise ValueError for an option of sbatch that Nightshift sets itself."""
        for option in self.sbatch:  # sbatch also accepts an abbreviated name
            if option.startswith(_SHORT) or (option[:2] == "--" and f" {option.partition('=')[0]}" in _LONG):
                raise ValueError(f"Nightshift itself sets the option {option} of sbatch")

    @property
    def layout(self) -> str:
        """The suffix of the hardware in records: the CPUs, and a digest of `setup`."""
        digest = hashlib.sha256("\n".join(self.setup).encode()).hexdigest()[:8]
        return f"{JOB_OF}{self.cpus_per_run} CPUs" + (f", setup {digest}" if self.setup else "")

    @property
    def options(self) -> list[str]:
        """Options of sbatch. --mem is always set: a job without it may get a whole node."""
        values = {
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
POLL_SECONDS = 2.0  # between two queries of slurmctld, for all jobs at once
ANSWER_SECONDS = 30.0  # SLURM's commands give up after nine if slurmctld does not answer
# How long the result that another node wrote may take to appear here: NFS caches a folder for up to 60 s (acdirmax,
# nfs(5)).
RESULT_SECONDS = 75.0
CANCEL_SECONDS = 90.0  # SLURM's KillWait is 30 by default
# Errors after which a job is submitted again: the user has too many jobs (AssocMaxSubmitJobLimit,
# QOSMaxSubmitJobPerUserLimit), or slurmctld does not answer and may still accept the job.
_TOO_MANY = "MaxSubmit"
_LATER = (_TOO_MANY, "did not answer", "Unable to contact", "timed out")
_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
_SET_BY_NODE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TMPDIR", "TMP", "TEMP")


class _Seen(NamedTuple):
    """The last report of slurmctld on a job."""

    state: str = ""
    node: str = ""
    reason: str = ""

    @property
    def is_left(self) -> bool:
        return self.state not in _ENDED


_NEVER = _Seen()


@dataclass(slots=True)
class _Work(Flight):
    seen: _Seen = _NEVER
    gone_at: float | None = None  # when SLURM no longer had the job in its queue


class SlurmExecutor(Executor[_Work]):
    """Jobs of one user on one cluster. All nodes must share the folder of the checkout."""

    def __init__(self, root: Path, environ: Mapping[str, str], config: SlurmConfig) -> None:
        super().__init__(root, environ, config.pairs, config.layout)
        self.config = config
        self._unwanted = set[str]()  # names of jobs that must still be cancelled
        self._asked_at = -POLL_SECONDS

    def require_ready(self) -> None:
        """Raise EngineError with the error of sbatch if SLURM would never accept a run."""
        try:
            self.sbatch("answer", Path(os.devnull), ["true"], "--test-only")
        except EngineError as error:
            # Temporary: drained nodes, and other jobs of the user.
            if not any(text in error.cause for text in ("node configuration is not available", _TOO_MANY)):
                raise

    def hardware(self, of_engine: str) -> str:
        """Return "": only the worker knows the hardware of its node."""
        return ""

    def _placed(self, job: Job) -> Job:
        return replace(super()._placed(job), name=f"nightshift-{uuid.uuid4().hex}")

    def _start(self, folder: Path, job: Job) -> None:
        self.take_over(folder, job)
        self._send(folder)

    def take_over(self, folder: Path, job: Job) -> bool:
        """Wait for the result of a job that this controller or an earlier one submitted."""
        seconds = job.deadline_seconds + LATE_SECONDS + 60.0 * self.config.queue_minutes
        self._flights[folder] = _Work(job, time.monotonic() + seconds)
        return True

    def _send(self, folder: Path) -> None:
        """Submit the job of job.json, without the avoided nodes unless sbatch refuses that. EngineError if sbatch
        refuses the job. After an error of `_LATER`, `_poll` submits the job.
        """
        work = self._flights[folder]
        work.gone_at = None
        worker = shlex.join(process.python_command(*base.PROGRAM, str(self.root), str(folder)))
        excluded = _EXCLUDE.findall("\0".join(self.config.sbatch))  # sbatch uses only the last --exclude
        exclude = [f"--exclude={','.join([*excluded, *sorted(self.avoided)])}"] if any(self.avoided) else []
        try:
            self.sbatch(work.job.name, folder / LOG_NAME, [*self.exports(), f"exec {worker}"], *exclude)
        except EngineError as refusal:
            if any(text in refusal.cause for text in _LATER):
                return
            if not exclude:
                raise
            self.avoided = ()
            self._send(folder)

    def sbatch(
        self,
        name: str,
        output: Path,
        lines: Sequence[str],
        *more: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Submit a job whose script is `lines`, with the lines of `setup` before the last line.

        `more`: options, which override those of slurm.toml. `variables`: of sbatch.
        """
        words = [*self.config.sbatch, "--export=NONE", *more, *_FIXED, *self.config.options]
        words += [f"--job-name={name}", f"--output={output}", f"--chdir={self.root}"]
        # After the lines of setup: `module load` sets PYTHONPATH.
        last = f"export PYTHONPATH={shlex.quote(process.python_path())}", lines[-1]
        script = "\n".join(["#!/bin/bash", *lines[:-1], *self.config.setup, *last, ""])
        _ask(["sbatch", *words], script.encode(), variables)

    def exports(self) -> list[str]:
        """Return the lines of a script that export the variables an engine may inherit."""
        variables = process.engine_environment(self.environ, {}).items()
        return [f"export {key}={shlex.quote(value)}" for key, value in variables if key not in _SET_BY_NODE]

    def _has_ended(self, folder: Path) -> bool:
        self._poll()
        work = self._flights[folder]
        with suppress(FileNotFoundError, EngineError):
            read_result(folder, work.job)
            return True
        is_late = work.gone_at is not None and time.monotonic() - work.gone_at > RESULT_SECONDS
        return is_late and not self._is_waiting(folder)

    def _is_waiting(self, folder: Path) -> bool:
        """Return whether no node has started the job, which may wait or be unknown to SLURM."""
        return self._flights[folder].seen.state in ("", "PENDING") and not (folder / STARTED_NAME).exists()

    def _poll(self) -> None:
        """Ask slurmctld for all jobs, at most every POLL_SECONDS, and submit again what slurmctld does not know."""
        if time.monotonic() - self._asked_at < POLL_SECONDS:
            return
        try:
            cancel_jobs(self._unwanted)
            jobs = jobs_seen([work.job.name for work in self._flights.values()])
        except EngineError:
            return  # slurmctld does not answer: no job counts as lost
        finally:
            self._asked_at = time.monotonic()
        for folder, work in self._flights.items():
            job = jobs.get(work.job.name)
            work.seen = job or work.seen
            self._places[folder] = work.seen.node
            if job and job.is_left:
                work.gone_at = None
                continue
            work.gone_at = work.gone_at or self._asked_at
            is_unknown = job is None and self._is_waiting(folder)
            if is_unknown and self._asked_at - work.gone_at >= ANSWER_SECONDS:
                try:
                    self._send(folder)
                except EngineError as refusal:
                    work.seen, work.gone_at = _Seen("FAILED", reason=refusal.cause), self._asked_at

    def has_begun(self, folder: Path) -> bool:
        """Return False for a job that waits in the queue, or that SLURM has not reported yet."""
        self._poll()
        return not self._is_waiting(folder)

    def cancel(self, folders: Collection[Path]) -> None:
        """Cancel jobs, and wait until those without a result are gone. `_poll` repeats it if SLURM does not answer."""
        works = {folder: self._flights.pop(folder) for folder in folders if folder in self._flights}
        self._unwanted |= {work.job.name for work in works.values()}
        unfinished = [work.job.name for folder, work in works.items() if not (folder / RESULT_NAME).exists()]
        if works and not unfinished:  # their workers are about to end; `_poll` cancels the jobs
            return
        ends_at = time.monotonic() + CANCEL_SECONDS
        with suppress(EngineError), waiting("cancelling jobs of the cluster", CANCEL_SECONDS):
            cancel_jobs(self._unwanted)
            while any(job.is_left for job in jobs_seen(unfinished).values()) and time.monotonic() < ends_at:
                time.sleep(_LOOK_SECONDS)

    def _ending(self, folder: Path) -> tuple[str, Failure]:
        """Return the last report of SLURM on a job. A preempted job counts as interrupted, not as a failure."""
        name, (state, node, reason) = self._flights[folder].job.name, self._flights[folder].seen
        how = f"last state {state}, reason {reason}, node {node or 'none'}" if state else "SLURM does not know the job"
        memory = f", killed {process.OUT_OF_MEMORY}: mem_gb = {self.config.mem_gb}" if state == "OUT_OF_MEMORY" else ""
        failure = Failure.INTERRUPTED if state == "PREEMPTED" else Failure.INFRASTRUCTURE
        return f"job {name} ended without a result: {how}{memory}", failure


def jobs_seen(names: Collection[str]) -> dict[str, _Seen]:
    """Return the reports of slurmctld on these jobs, by name. EngineError if slurmctld does not answer."""
    jobs = dict[str, _Seen]()
    command = ["squeue", "--noheader", "--states=all", f"--name={','.join(names)}", "--format=%j|%T|%N|%r"]
    for line in _ask(command).splitlines() if names else ():
        name, *fields = line.strip().split("|", 3)
        job = _Seen(*fields)
        # A job that failed without a node was refused. If two jobs have one name, a job that is left counts.
        if (job.node or job.state != "FAILED") and (job.is_left or name not in jobs):
            jobs[name] = job
    return jobs


def cancel_jobs(names: set[str]) -> None:
    """Cancel jobs, and remove their names from `names`. EngineError if slurmctld does not answer."""
    while names:
        _ask(["scancel", f"--name={next(iter(names))}"])
        names.pop()


def job_left(folder: Path) -> Job | None:
    """Return the SLURM job of the run in `folder`; None if there is none, or job.json is damaged."""
    with suppress(UsageError):
        job = read_json(folder / JOB_NAME, Job, "")
        return job if job and job.name else None
    return None


def jobs_left(ledger: Ledger, first: int = 0, *, of_certificates: bool = False) -> dict[Path, Job]:
    """Return the jobs that an earlier controller did not collect, from experiment `first` on, by their folders."""
    numbers = [record.number for record in ledger.records() if record.status == STARTED and record.number >= first]
    folders = [*map(ledger.run_dir, numbers)]
    if of_certificates:
        paths = ledger.runs_dir.glob(f"*/*/*/{JOB_NAME}")  # certify/NNNN/SIDE-SEED
        folders += [path.parent for path in sorted(paths) if not path.with_name(RUN_NAME).exists()]
    return {folder: job for folder in folders if (job := job_left(folder))}


def end_jobs(ledger: Ledger, note: Callable[[str], None], *, of_certificates: bool = False) -> None:
    """Cancel the jobs of `jobs_left`. EngineError if slurmctld does not answer."""
    jobs = jobs_left(ledger, of_certificates=of_certificates)
    cancel_jobs({job.name for job in jobs.values()})
    for folder in jobs:
        if folder.parent != ledger.runs_dir:
            (folder / JOB_NAME).unlink()  # otherwise `certify --resume` would wait for the job
    if jobs:
        note(f"cancelled jobs in SLURM that an earlier controller left: {listed([path.name for path in jobs])}")


def _ask(command: list[str], stdin: bytes = b"", variables: Mapping[str, str] | None = None) -> str:
    """Return the output of a command of SLURM. EngineError if the command fails or times out."""
    options = ("SLURM_", "SBATCH_", "SQUEUE_")  # variables that set options of the commands
    environment = {n: v for n, v in os.environ.items() if n == "SLURM_CONF" or not n.startswith(options)}
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            check=False,
            timeout=ANSWER_SECONDS,
            env=environment | {process.MARKER_NAME: process.new_marker("slurm"), **(variables or {})},
            process_group=0,  # Ctrl-C must reach the controller only
        )
    except FileNotFoundError:
        raise EngineError(f"{command[0]} is not installed here", "Run this on a login node of the cluster.") from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"{command[0]} did not answer in {ANSWER_SECONDS:g} s") from None
    if done.returncode:
        cause = " ".join(done.stderr.decode(errors="replace").split())
        raise EngineError(cause or f"{command[0]}: exit code {done.returncode}")
    return done.stdout.decode(errors="replace")


# -- commands as jobs -------------------------------------------------------------------------------------

_PROGRAM = ("-c", "from nightshift.cli.command import main; main()")


def run_on_node(executor: SlurmExecutor, words: Sequence[str]) -> tuple[str, bytes]:
    """Run a command of `nightshift` as a job. Return a line about its node, and the command's output."""
    began, job, name = time.monotonic(), _NEVER, f"nightshift-{uuid.uuid4().hex}"
    folder = executor.root / "runs" / f".{name}"
    folder.mkdir(parents=True)
    answer, log = folder / "answer", folder / LOG_NAME
    command = shlex.join(process.python_command(*_PROGRAM, *words))
    try:
        executor.sbatch(name, answer, [*executor.exports(), command], f"--error={log}")
        with waiting(lambda: f"waiting for the job: {job.state} {job.reason}"):
            while job.is_left and (job.state or time.monotonic() - began < ANSWER_SECONDS):
                time.sleep(POLL_SECONDS)
                with suppress(EngineError):
                    report = jobs_seen([name]).get(name)
                    if job.state and report is None:
                        break  # SLURM has forgotten the job
                    job = report or job
        text = read_file(answer) if answer.is_file() else b""
        if not text:
            why = "".join(f": {line}" for line in process.tail(log, 1))
            raise EngineError(f"the job printed nothing: {job.state}, node {job.node}{why}", "Check that node.")
        return f"node:     {job.node}, answered after {time.monotonic() - began:.1f} s", text
    finally:
        with suppress(EngineError):
            cancel_jobs({name})
        shutil.rmtree(folder, ignore_errors=True)


def submit_controller(root: Path, config: SlurmConfig, words: Sequence[str]) -> str:
    """Run a command of `nightshift` as a job without GPUs, whose output `wait --night` follows. Return the job's name.

    The command and the user's variables may contain secrets, so they are in the job's environment, not in its script.
    """
    name = f"nightshift-controller-{process.digest_of(root)}"
    if (job := jobs_seen([name]).get(name)) and job.is_left:
        cause = f"job {name} runs the controller of this checkout already: {job.state} {job.node}".rstrip()
        raise UsageError(cause, f"Wait for it, or end it: scancel --name={name}.")
    (root / "runs").mkdir(exist_ok=True)
    config = msgspec.structs.replace(config, gpus=0, gres="", time_minutes=config.controller_minutes)
    command = f'eval "exec {shlex.join(process.python_command(*_PROGRAM))} $NIGHTSHIFT_WORDS"'
    lines, variables = [f"cd {shlex.quote(str(Path.cwd()))}", command], {"NIGHTSHIFT_WORDS": shlex.join(words)}
    log = root / "runs" / DETACHED_NAME
    SlurmExecutor(root, {}, config).sbatch(name, log, lines, "--export=ALL", variables=variables)
    return name

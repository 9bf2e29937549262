"""Workers as jobs of a SLURM cluster, by sbatch, squeue and scancel; never sacct, which many clusters lack.

job.json has the name of its job before sbatch is called, so a later controller finds the job, also after a kill during
sbatch. What SLURM does not answer is unknown, not lost: a job that SLURM does not know, and that no node has begun, is
submitted again under the same name. So a job may start twice, and SLURM may do that by itself: the second start finds
`worker.started` and ends.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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
_FIXED = ("--parsable", "--no-requeue", "--open-mode=append", "--nodes=1", "--ntasks=1", "--export=NONE")
_NAMED = ("--requeue", "--job-name", "--output", "--error", "--chdir", "--wait", "--array", "--wrap", "--test-only")
_SHORT = ("-W", "-a")  # --wait, --array
_EXCLUDE = re.compile(r"(?:^|\0)(?:--exclude[=\0]|-x[=\0 ]?)([^\0]+)")  # in the words of slurm.toml, joined by NUL


class SlurmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of slurm.toml. `pairs`: how many runs at once; `gpus`: of each; `gres`: where another name than
    `gpu:N` is needed; `sbatch`: more options of sbatch; `setup`: shell lines before the worker starts;
    `queue_minutes`: how long a job may wait; `controller_minutes`: the limit of --controller-job, 0 for the
    partition's own."""

    pairs: Positive
    gpus: Annotated[int, Meta(ge=0, le=16)]
    cpus_per_run: Positive
    mem_gb: Positive
    time_minutes: Positive
    partition: str = ""
    account: str = ""
    constraint: str = ""
    gres: str = ""
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    queue_minutes: Positive = 600
    controller_minutes: Annotated[int, Meta(ge=0, le=100_000)] = 0

    def __post_init__(self) -> None:
        """Raise ValueError for an option of sbatch that Nightshift sets itself."""
        own = {word.partition("=")[0] for word in (*_FIXED, *_NAMED, *self.options)}
        for option in self.sbatch:  # sbatch also accepts the beginning of a name
            is_own = option.startswith("--") and any(name.startswith(option.partition("=")[0]) for name in own)
            if is_own or option.startswith(_SHORT):
                raise ValueError(f"Nightshift itself sets the option {option} of sbatch")

    @property
    def layout(self) -> str:
        """What the hardware of a run is followed by: its CPUs, and whatever `setup` changes."""
        digest = hashlib.sha256("\n".join(self.setup).encode()).hexdigest()[:8]
        return f"{JOB_OF}{self.cpus_per_run} CPUs" + (f", setup {digest}" if self.setup else "")

    @property
    def options(self) -> list[str]:
        """For sbatch. Memory and cores are always said: a job without --mem may take a whole node."""
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
POLL_SECONDS = 2.0  # between two questions to slurmctld, for all jobs at once
ANSWER_SECONDS = 30.0  # a slurmctld that is away answers after nine, with an error
_FIRST_ANSWER_SECONDS = 10.0  # while a person waits
# Until a file that another node wrote is seen here. A job that completed wrote one: acdirmax of NFS is 60 s (nfs(5)).
COMPLETED_SECONDS = 75.0
OTHERWISE_SECONDS = 10.0
CANCEL_SECONDS = 90.0  # SLURM's own KillWait is 30
_REFUSED = "refused by sbatch"
_SUBMIT_LIMIT = "MaxSubmit"  # AssocMaxSubmitJobLimit, QOSMaxSubmitJobPerUserLimit: the user has too many jobs
_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
# What another node has of its own.
_OWN_OF_A_NODE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TMPDIR", "TMP", "TEMP")


class NoAnswer(EngineError):
    """A command of SLURM was ended by its limit of time. What it asked for may happen yet."""


class _Seen(NamedTuple):
    """A job as slurmctld last reported it; empty before."""

    state: str = ""
    node: str = ""
    reason: str = ""

    @property
    def is_left(self) -> bool:
        return self.state not in (*_ENDED, _REFUSED)


_NEVER = _Seen()


@dataclass(slots=True)
class _Work(Flight):
    """`gone_at`: since when nothing of the job is left in SLURM. `patience`: the seconds after which a job that SLURM
    does not know is submitted again: none once sbatch has returned."""

    seen: _Seen = _NEVER
    gone_at: float | None = None
    patience: float = ANSWER_SECONDS


class SlurmExecutor(Executor[_Work]):
    """Jobs of one person on one cluster, whose checkout lies on a folder that all nodes share."""

    def __init__(self, root: Path, environ: Mapping[str, str], config: SlurmConfig) -> None:
        super().__init__(root, environ, config.pairs, config.layout)
        self.config = config
        self._unwanted = set[str]()  # names of jobs that are to be cancelled yet
        self._asked_at = -POLL_SECONDS

    def require_ready(self) -> None:
        """Ask sbatch once whether it would accept a run. Raise EngineError with its words if it never would."""
        try:
            self.sbatch("answer", Path(os.devnull), ["true"], "--test-only", seconds=_FIRST_ANSWER_SECONDS)
        except EngineError as error:
            # At this moment: nodes that are drained, and other jobs of the user's.
            if "node configuration is not available" not in error.cause and _SUBMIT_LIMIT not in error.cause:
                raise

    def hardware(self, of_engine: str) -> str:
        """Return "": the worker tells, because this machine has none of it."""
        return ""

    def _placed(self, job: Job) -> Job:
        return replace(super()._placed(job), name=f"nightshift-{uuid.uuid4().hex}")

    def _start(self, folder: Path, job: Job) -> None:
        self.take_over(folder, job)
        if refusal := self._send(folder):
            raise refusal

    def take_over(self, folder: Path, job: Job) -> bool:
        """Wait for the result of a job that was submitted, by this controller or an earlier one."""
        seconds = job.deadline_seconds + LATE_SECONDS + 60.0 * self.config.queue_minutes
        self._flights[folder] = _Work(job, time.monotonic() + seconds)
        return True

    def _send(self, folder: Path) -> EngineError | None:
        """Submit the job of job.json; if sbatch refuses that, on any node. Return sbatch's refusal. If SLURM does not
        answer, `_poll` submits it as soon as SLURM does."""
        work = self._flights[folder]
        work.gone_at, work.patience = None, 0.0
        worker = shlex.join(process.python_command(*base.PROGRAM, str(self.root), str(folder)))
        nodes = _EXCLUDE.findall("\0".join(self.config.sbatch)) + sorted(filter(None, self.avoided))
        options = [f"--exclude={','.join(nodes)}"] if nodes else []
        try:
            self.sbatch(work.job.name, folder / LOG_NAME, [*self.exports(), f"exec {worker}"], *options)
            return None
        except EngineError as error:
            refusal = error
        if isinstance(refusal, NoAnswer) or _SUBMIT_LIMIT in refusal.cause:  # `_poll` looks for the job, then sends it
            work.patience = ANSWER_SECONDS
            return None
        try:
            if jobs_seen([work.job.name]):
                return None
        except EngineError:
            return None
        if not self.avoided:
            return refusal
        self.avoided = ()
        return self._send(folder)

    def sbatch(self, name: str, output: Path, lines: Sequence[str], *more: str, **how: Any) -> None:
        """Submit a job: the one call of sbatch. `lines`: of its script; those of `setup` come before the last one.
        `more`: further options; `how`: for `_ask`. If an option is given twice, the last one applies."""
        words = [*self.config.sbatch, *_FIXED, *self.config.options, f"--job-name={name}", f"--output={output}"]
        # Last: `module load` among the lines of setup sets PYTHONPATH.
        last = f"export PYTHONPATH={shlex.quote(process.python_path())}", lines[-1]
        script = "\n".join(["#!/bin/bash", *lines[:-1], *self.config.setup, *last, ""])
        _ask(["sbatch", *words, f"--chdir={self.root}", *more], script.encode(), **how)

    def exports(self) -> list[str]:
        """Return the lines of a script that set what an engine may inherit."""
        variables = process.engine_environment(self.environ, {}).items()
        return [f"export {key}={shlex.quote(value)}" for key, value in variables if key not in _OWN_OF_A_NODE]

    def _has_ended(self, folder: Path) -> bool:
        self._poll()
        work = self._flights[folder]
        with suppress(FileNotFoundError, EngineError):
            read_result(folder, work.job)
            return True
        if work.gone_at is None:
            return False
        patience = COMPLETED_SECONDS if work.seen.state == "COMPLETED" else OTHERWISE_SECONDS
        return time.monotonic() - work.gone_at > patience and not self._is_waiting(folder)

    def _is_waiting(self, folder: Path) -> bool:
        """Return True for a job that no node has begun. SLURM may never have got the job, or forgot it."""
        return self._flights[folder].seen.state in ("", "PENDING") and not (folder / STARTED_NAME).exists()

    def _poll(self) -> None:
        """Ask for the state of all jobs, now and then. A job that is not in the answer was forgotten by slurmctld, or
        never reached it: it is submitted again."""
        if time.monotonic() - self._asked_at < POLL_SECONDS:
            return
        try:
            cancel_jobs(self._unwanted)
            jobs = jobs_seen([work.job.name for work in self._flights.values()])
        except EngineError:
            return  # slurmctld is away: nothing is known, so nothing is lost
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
            is_late = self._asked_at - work.gone_at >= work.patience
            if job is None and is_late and self._is_waiting(folder) and (refusal := self._send(folder)):
                work.seen, work.gone_at = _Seen(_REFUSED, reason=refusal.cause), self._asked_at

    def has_begun(self, folder: Path) -> bool:
        """Return False for a job that was last seen to wait, or was not seen yet."""
        self._poll()
        return not self._is_waiting(folder)

    def cancel(self, folders: Collection[Path]) -> None:
        """Cancel jobs. Returns when those without a result are gone from the cluster, at the latest after
        CANCEL_SECONDS, or when slurmctld does not answer: then they are cancelled when it does."""
        names = {folder: self._flights.pop(folder).job.name for folder in folders if folder in self._flights}
        self._unwanted |= {*names.values()}
        unfinished = [name for folder, name in names.items() if not (folder / RESULT_NAME).exists()]
        if names and not unfinished:  # their workers are at their end; `_poll` sees to it
            return
        ends_at = time.monotonic() + CANCEL_SECONDS
        with suppress(EngineError), waiting("cancelling jobs of the cluster", CANCEL_SECONDS):
            cancel_jobs(self._unwanted)
            while any(job.is_left for job in jobs_seen(unfinished).values()) and time.monotonic() < ends_at:
                time.sleep(_LOOK_SECONDS)

    def _ending(self, folder: Path) -> tuple[str, Failure]:
        """Return what SLURM says of a job. A preempted one is interrupted: nothing is wrong with it or its node."""
        name, (state, node, reason) = self._flights[folder].job.name, self._flights[folder].seen
        how = f"last seen {state}, reason {reason}, node {node or 'none'}" if state else "SLURM does not know it"
        memory = f", killed {process.OUT_OF_MEMORY}: mem_gb = {self.config.mem_gb}" if state == "OUT_OF_MEMORY" else ""
        failure = Failure.INTERRUPTED if state == "PREEMPTED" else Failure.INFRASTRUCTURE
        return f"job {name} ended without a result: {how}{memory}", failure


def jobs_seen(names: Collection[str]) -> dict[str, _Seen]:
    """Return what slurmctld knows of these jobs, by name. Of two with one name a job that is left counts, then one that
    completed; one that sbatch refused never began."""
    jobs = dict[str, _Seen]()
    command = ["squeue", "--noheader", "--states=all", f"--name={','.join(names)}", "--format=%j|%T|%N|%r"]
    for line in _ask(command).splitlines() if names else ():
        name, *fields = line.strip().split("|", 3)
        job = _Seen(*fields)
        if job.node or job.state != "FAILED":
            jobs[name] = max(jobs.get(name, job), job, key=lambda job: (job.is_left, job.state == "COMPLETED"))
    return jobs


def cancel_jobs(names: set[str]) -> None:
    """Cancel jobs by their names, and remove these. EngineError where slurmctld does not answer."""
    while names:
        _ask(["scancel", f"--name={next(iter(names))}"])
        names.pop()


def job_left(folder: Path) -> Job | None:
    """Return the job in SLURM of the run in `folder`; None without one, or if job.json is damaged."""
    job = None
    with suppress(UsageError):
        job = read_json(folder / JOB_NAME, Job, "")
    return job if job and job.name else None


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
        cancel_jobs({job.name for job in jobs.values()})
        for folder in jobs:
            if folder.parent != ledger.runs_dir:
                (folder / JOB_NAME).unlink()  # `certify --resume` waits for a job that is named there
        note(f"cancelled jobs in SLURM that an earlier controller left: {listed([path.name for path in jobs])}")


def _ask(
    command: list[str], stdin: bytes = b"", seconds: float = ANSWER_SECONDS, variables: Mapping[str, str] | None = None
) -> str:
    """What a command of SLURM says. EngineError with its last error where it fails, or does not answer in `seconds`."""
    options = ("SLURM_", "SBATCH_", "SQUEUE_")  # variables by which the commands take options
    environment = {n: v for n, v in os.environ.items() if n == "SLURM_CONF" or not n.startswith(options)}
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            check=False,
            timeout=seconds,
            env=environment | {process.MARKER_NAME: process.new_marker("slurm"), **(variables or {})},
            process_group=0,  # a Ctrl-C is the controller's to answer
        )
    except FileNotFoundError:
        raise EngineError(f"{command[0]} is not here", "Run this where SLURM's commands are: a login node.") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer in {seconds:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        errors = [line for line in lines if f"{command[0]}: " in line]  # a hint may follow
        limits = [line for line in errors[:-1] if _SUBMIT_LIMIT in line]
        raise EngineError("; ".join([*limits, errors[-1]]) if errors else f"{command[0]}: {lines[-1]}")
    return done.stdout.decode(errors="replace")


# -- commands as jobs -------------------------------------------------------------------------------------

_PROGRAM = ("-c", "from nightshift.cli.command import main; main()")


def run_on_node(executor: SlurmExecutor, words: Sequence[str]) -> tuple[str, bytes]:
    """Run a command of `nightshift` in one job. Return a line on its node, and what the command printed. EngineError if
    it printed nothing."""
    runs_dir = executor.root / "runs"
    runs_dir.mkdir(exist_ok=True)
    folder, began, job = Path(tempfile.mkdtemp(prefix=".nightshift-", dir=runs_dir)), time.monotonic(), _NEVER
    name, answer, log = folder.name.removeprefix("."), folder / "answer", folder / LOG_NAME
    command = shlex.join(process.python_command(*_PROGRAM, *words))
    try:
        executor.sbatch(name, answer, [*executor.exports(), command], f"--error={log}")
        with waiting(lambda: f"waiting for the job: {job.state} {job.reason}"):
            while job.is_left:
                time.sleep(POLL_SECONDS)
                with suppress(EngineError):
                    found = jobs_seen([name]).get(name)
                    if found is None and (job.state or time.monotonic() - began > ANSWER_SECONDS):
                        break  # SLURM forgot it
                    job = found or job
        if not (answer.is_file() and (text := read_file(answer))):
            why = "".join(f": {line}" for line in process.tail(log, 1))
            raise EngineError(f"the job printed nothing: {job.state}, node {job.node}{why}", "Look at its node.")
        return f"node:     {job.node}, answered after {time.monotonic() - began:.1f} s", text
    finally:
        with suppress(EngineError):
            cancel_jobs({name})
        shutil.rmtree(folder, ignore_errors=True)


def submit_controller(root: Path, config: SlurmConfig, words: Sequence[str]) -> str:
    """Run a command of `nightshift` as a job without GPUs, whose output `wait --night` follows. Return its name.

    The job's environment has your variables and the command, which may contain a secret; its script has none of them.

    Raises:
        UsageError: this checkout has such a job already.
        EngineError: SLURM refuses it, or does not answer.
    """
    name = f"nightshift-controller-{process.digest_of(root)}"
    if (job := jobs_seen([name]).get(name)) and job.is_left:
        cause = f"job {name} runs the controller already: {job.state} {job.node}".rstrip()
        raise UsageError(cause, f"Or end it: scancel --name={name}.")
    (root / "runs").mkdir(exist_ok=True)
    config = msgspec.structs.replace(config, gpus=0, gres="", time_minutes=config.controller_minutes)
    command = f'eval "exec {shlex.join(process.python_command(*_PROGRAM))} $NIGHTSHIFT_WORDS"'
    lines, variables = [f"cd {shlex.quote(str(Path.cwd()))}", command], {"NIGHTSHIFT_WORDS": shlex.join(words)}
    executor = SlurmExecutor(root, {}, config)
    executor.sbatch(name, root / "runs" / DETACHED_NAME, lines, "--export=ALL", variables=variables)
    return name

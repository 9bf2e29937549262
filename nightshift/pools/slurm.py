"""Workers as jobs of a SLURM cluster, by its own sbatch, squeue, scontrol and scancel; never sacct, which many lack.

A job has a name of its own, written before it is submitted: a head that was killed in between finds it by that. The key
that it signs its result with travels in the script, which no file of the checkout holds. What SLURM does not answer is
not known, and not lost. A controller that was killed may start a job a second time, whatever --no-requeue says: each
start has a folder of its own, and the first result that is signed counts.
"""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nightshift.entry import isolated
from nightshift.errors import EngineError
from nightshift.files import read_json, write_json
from nightshift.pools import SUBMITTED_NAME, Submitted, new_key, submitted, verified
from nightshift.pools.slurm_toml import SlurmConfig
from nightshift.processes.supervise import engine_environment
from nightshift.records import Result
from nightshift.worker import JOB_NAME, LATE_SECONDS, LOG_NAME, Job

NAME = "slurm"
PROGRAM = (str(Path(__file__).parents[1] / "worker.py"),)
POLL_SECONDS = 2.0  # between two questions to the controller, for all jobs at once
ANSWER_SECONDS = 30.0  # a controller that is away answers after nine, with an error
SHARED_FOLDER_SECONDS = 10.0  # until a file that another node wrote is seen here
CANCEL_SECONDS = 90.0  # SLURM's own KillWait is 30
# What another node has of its own.
_OWN_OF_A_NODE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TMPDIR", "TMP", "TEMP")


@dataclass(slots=True)
class _Work:
    """A job that was submitted and not collected. `state`: as the controller last told it, "" before; `gone_at`: since
    when it does not know it any more."""

    name: str
    public_key: str
    job: Job
    ends_at: float  # on the monotonic clock
    id: str = ""
    state: str = ""
    node: str = ""
    gone_at: float | None = None


@dataclass(slots=True)
class SlurmPool:
    """Jobs of one person on one cluster, whose checkout lies on a folder that all nodes share."""

    root: Path
    environ: Mapping[str, str]
    config: SlurmConfig
    is_here = False
    look_key: bytes = b""
    _works: dict[Path, _Work] = field(default_factory=dict)
    _asked_at: float = -POLL_SECONDS

    @property
    def num_slots(self) -> int:
        """As the protocol says."""
        return self.config.pairs

    def hardware(self, of_engine: str) -> str:
        """What the nodes have is told by the first result."""
        return ""

    def submit(self, folder: Path, job: Job, program: Sequence[str] = ()) -> None:
        """As the protocol says. `program`: in place of the worker's."""
        job = replace(job, num_slots=1, outlives=True)
        name, (key, public_key) = f"nightshift-{uuid.uuid4().hex}", new_key()
        write_json(folder / JOB_NAME, job)
        write_json(folder / SUBMITTED_NAME, Submitted(name, NAME, public_key))
        work = self._take(folder, name, public_key, job)
        options = (f"--job-name={name}", f"--output={folder / LOG_NAME}", f"--chdir={self.root}")
        fixed = ("--parsable", "--no-requeue", "--export=NONE", "--open-mode=append")
        command = isolated(*(program or PROGRAM), str(self.root), str(folder))
        try:
            script = self.script(command, key + self.look_key)
            said = _ask(["sbatch", *fixed, *options, *self.config.options], script)
        except BaseException:
            self._works.pop(folder)
            raise
        work.id = said.strip().partition(";")[0]

    def script(self, program: Sequence[str], stdin: bytes) -> bytes:
        """What the job runs: the person's lines, then the worker, with what it reads on stdin."""
        variables = engine_environment(self.environ, {})
        exports = [
            f"export {name}={shlex.quote(value)}" for name, value in variables.items() if name not in _OWN_OF_A_NODE
        ]
        lines = ["#!/bin/bash", *exports, *self.config.setup]
        lines.append(f"base64 -d <<< {base64.b64encode(stdin).decode()} | exec {shlex.join(program)}")
        return ("\n".join(lines) + "\n").encode()

    def adopt(self, folder: Path) -> bool:
        """As the protocol says."""
        was, job = submitted(folder), read_json(folder / JOB_NAME, Job, "")
        if was is None or job is None or was.pool != NAME:
            return False
        work = self._take(folder, was.name, was.public_key, job)
        work.id = _ask(["squeue", "--noheader", f"--name={was.name}", "--states=all", "--format=%A"]).strip()
        return True

    def _take(self, folder: Path, name: str, public_key: str, job: Job) -> _Work:
        seconds = job.deadline_seconds + LATE_SECONDS + 60.0 * self.config.queue_minutes
        self._works[folder] = _Work(name, public_key, job, time.monotonic() + seconds)
        return self._works[folder]

    def is_over(self, folder: Path) -> bool:
        """True where there is a signed result, or the controller says that none will come, or far too late."""
        work = self._works.get(folder)
        if work is None or time.monotonic() > work.ends_at:
            return True
        self._poll()
        if work.gone_at is None:
            return False
        return self._has_result(folder, work) or time.monotonic() - work.gone_at > SHARED_FOLDER_SECONDS

    def _has_result(self, folder: Path, work: _Work) -> bool:
        try:
            verified(folder, work.job, work.public_key, is_one=False)
        except (FileNotFoundError, EngineError):
            return False
        return True

    def _poll(self) -> None:
        """Ask for the state of all jobs, now and then. Who is not in the answer has ended."""
        if time.monotonic() - self._asked_at < POLL_SECONDS:
            return
        self._asked_at = time.monotonic()
        names = ",".join(work.name for work in self._works.values())
        try:
            said = _ask(["squeue", "--noheader", f"--name={names}", "--format=%j %T %N"])
        except EngineError:
            return  # the controller is away: nothing is known, so nothing is lost
        found = {name: rest.split() for name, _, rest in (line.partition(" ") for line in said.splitlines())}
        for work in self._works.values():
            state = found.get(work.name)
            if state is None:
                work.gone_at = work.gone_at or time.monotonic()
            else:
                work.gone_at, work.state, work.node = None, state[0], " ".join(state[1:])

    def strangers(self) -> list[str]:
        """Jobs of this user that this pool did not submit: `17 name`; none where the controller does not answer."""
        own = {work.name for work in self._works.values()}
        try:
            said = _ask(["squeue", "--noheader", "--me", "--format=%A %j"])
        except EngineError:
            return []
        return [line for line in said.splitlines() if line.partition(" ")[2] not in own]

    def wait(self, timeout_seconds: float) -> None:
        """Sleep: SLURM calls nobody."""
        time.sleep(timeout_seconds)

    def in_flight(self) -> dict[Path, Job]:
        """As the protocol says."""
        return {folder: work.job for folder, work in self._works.items()}

    def has_begun(self, folder: Path) -> bool:
        """As the protocol says; a job that was never seen to wait counts as begun."""
        self._poll()
        return self._works[folder].state != "PENDING" or any(folder.glob("attempt-*"))

    def cancel(self, folder: Path) -> None:
        """As the protocol says; returns when the job is gone from the cluster, at the latest after CANCEL_SECONDS."""
        work = self._works.pop(folder, None)
        if work is None:
            return
        _ask(["scancel", f"--name={work.name}"])
        ends_at = time.monotonic() + CANCEL_SECONDS
        while time.monotonic() < ends_at and _ask(["squeue", "--noheader", f"--name={work.name}"]).strip():
            time.sleep(0.2)

    def result(self, folder: Path) -> Result:
        """The first result that was signed. EngineError, with what SLURM says of the job, where there is none."""
        work = self._works.get(folder)
        if work is None:
            raise EngineError(f"no job was submitted for {folder}, which the record says is the run in flight")
        why = self._why(work)
        self.cancel(folder)  # what was started twice may go on
        try:
            return verified(folder, work.job, work.public_key, is_one=False)
        except FileNotFoundError:
            raise EngineError(f"job {work.id or work.name} ended without a result: {why}", "Run it again.") from None

    def _why(self, work: _Work) -> str:
        """How a job ended, as far as the controller still knows."""
        try:
            said = _ask(["scontrol", "--oneliner", "show", "job", work.id]) if work.id else ""
        except EngineError as error:
            return f"last seen {work.state or 'nowhere'}; {error.cause}"
        told = dict(word.partition("=")[::2] for word in said.split())
        parts = [told.get("JobState", work.state or "unknown"), f"reason {told.get('Reason', 'unknown')}"]
        return ", ".join([*parts, f"node {told.get('NodeList') or work.node or 'none'}"])


def cancel_jobs(names: Sequence[str]) -> None:
    """End jobs that no head has any more, by their names. EngineError where the controller does not answer."""
    for name in names:
        _ask(["scancel", f"--name={name}"])


def _ask(command: list[str], stdin: bytes = b"") -> str:
    """What a command of SLURM says. EngineError with its last line where it fails, or does not answer."""
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, check=False, timeout=ANSWER_SECONDS, env=_environment()
        )
    except FileNotFoundError:
        raise EngineError(f"{command[0]} is not here", "Run this where SLURM's commands are: a login node.") from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"{command[0]} did not answer in {ANSWER_SECONDS:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise EngineError(f"{command[0]}: {lines[-1]}")
    return done.stdout.decode(errors="replace")


def _environment() -> dict[str, str]:
    """Its own settings would change what is asked."""
    meant = ("SLURM_CONF",)
    return {n: v for n, v in os.environ.items() if n in meant or not n.startswith(("SLURM_", "SBATCH_", "SQUEUE_"))}

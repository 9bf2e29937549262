"""Workers on this machine, one process each.

A worker gets two things through a pipe that nobody else holds: a random key, with which it signs its result, and the
knowledge that the head lives. When the pipe closes, the worker ends itself; a watchdog ends it if it cannot.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE

import msgspec

from nightshift.errors import EngineError
from nightshift.files import read_file, write_json
from nightshift.pools import SUBMITTED_NAME, State
from nightshift.processes.supervise import Child, ProcessGroup
from nightshift.records import Job, Result
from nightshift.worker import JOB_NAME, LOG_NAME, RESULT_NAME, Signed, signature

PROGRAM: tuple[str | Path, ...] = ("-m", "nightshift.worker")
GRACE_SECONDS = 60.0  # a worker that is asked to end gives its engine's processes their own grace first
LATE_SECONDS = 60.0  # after its own deadline: then it hangs
_NO_POLL_SECONDS = 3600.0


@dataclass(slots=True)
class _Worker:
    """A worker under way, or one that has ended and was not collected. `key` signs its result."""

    group: ProcessGroup
    child: Child
    key: bytes
    job: Job
    ends_at: float  # on the pool's clock
    pidfd: int | None


@dataclass(slots=True)
class LocalPool:
    """One slot on this machine; `environ` is what workers inherit, `look_key` what sealed runs are opened with."""

    root: Path
    environ: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic
    look_key: bytes = b""
    num_slots: int = 1
    _workers: dict[Path, _Worker] = field(default_factory=dict)

    def submit(self, folder: Path, job: Job) -> None:
        """As the protocol says. EngineError where no process can be started."""
        if folder in self._workers:
            return
        name = f"{folder.parent.name}-{folder.name}-{uuid.uuid4().hex}"
        write_json(folder / JOB_NAME, job)
        write_json(folder / SUBMITTED_NAME, {"name": name, "pool": "local"})
        group, key = ProcessGroup(name, GRACE_SECONDS), secrets.token_bytes(32)
        try:
            child = group.start(
                "worker",
                [sys.executable, "-I", *PROGRAM, self.root, folder],
                log_path=folder / LOG_NAME,
                env=self.environ,
                cwd=self.root,
                stdin=PIPE,
            )
            assert child.popen.stdin is not None
            with suppress(BrokenPipeError):  # it is dead already, which `result` says
                child.popen.stdin.write(key + self.look_key)
                child.popen.stdin.flush()
        except BaseException:
            group.stop()
            raise
        ends_at = self.clock() + job.deadline_seconds + LATE_SECONDS
        self._workers[folder] = _Worker(group, child, key, job, ends_at, _pidfd(child.pid))

    def state(self, folder: Path) -> State:
        """RUNNING, ENDED, or LOST when it hangs past its own deadline."""
        worker = self._workers.get(folder)
        if worker is None:
            return State.UNKNOWN
        if worker.child.poll() is not None:
            return State.ENDED
        return State.LOST if self.clock() > worker.ends_at else State.RUNNING

    def wait(self, timeout_seconds: float) -> None:
        """Sleep until the kernel says that a worker has ended, or until a worker is due."""
        due = min((worker.ends_at - self.clock() for worker in self._workers.values()), default=_NO_POLL_SECONDS)
        pidfds = [worker.pidfd for worker in self._workers.values() if worker.pidfd is not None]
        can_wait = len(pidfds) == len(self._workers)
        select.select(pidfds, [], [], max(min(timeout_seconds, due, _NO_POLL_SECONDS if can_wait else 0.05), 0.0))

    def in_flight(self) -> list[Path]:
        """As the protocol says."""
        return list(self._workers)

    def cancel(self, folder: Path) -> None:
        """As the protocol says."""
        worker = self._workers.pop(folder, None)
        if worker is not None:
            self._stop(worker)

    def _stop(self, worker: _Worker) -> None:
        if worker.pidfd is not None:
            os.close(worker.pidfd)
            worker.pidfd = None
        worker.group.stop()

    def result(self, folder: Path) -> Result:
        """The result that the worker signed, after whatever it left behind is gone."""
        worker = self._workers.pop(folder)
        is_late = worker.child.poll() is None
        last_words = worker.child.tail(1)
        self._stop(worker)
        path = folder / RESULT_NAME
        others = [attempt for attempt in folder.glob("attempt-*") if attempt.name != "attempt-0"]
        if others:
            raise EngineError(f"{others[0]} was made beside the worker that was started: its result counts for nothing")
        try:
            data = read_file(path)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                raise EngineError(f"{path} cannot be read: {error.strerror}") from None
            how = "did not end" if is_late else f"ended without a result: {worker.child.exit_cause()}"
            said = f"; last in {LOG_NAME}: {last_words[0]}" if last_words else ""
            raise EngineError(f"the worker {how}{said}", "Run it again.") from None
        try:
            signed = msgspec.json.decode(data, type=Signed)
            is_own = hmac.compare_digest(signed.hmac, signature(worker.key, bytes(signed.result), worker.job))
            result = msgspec.json.decode(signed.result, type=Result)
        except (ValueError, TypeError, RecursionError) as error:
            raise EngineError(f"{path} is no result of a worker: {error}") from None
        if not is_own:
            raise EngineError(f"{path} was not signed by the worker that was started: it counts for nothing")
        return result


def _pidfd(pid: int) -> int | None:
    """What `select` can wait on until the process ends; None where the system has no such thing."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None

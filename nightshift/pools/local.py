"""Workers on this machine, one process each.

A worker gets two things through a pipe that nobody else holds: a random key, with which it signs its result, and the
knowledge that the head lives. When the pipe closes, the worker ends itself; a watchdog ends it if it cannot.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE

import msgspec

from nightshift.entry import isolated
from nightshift.errors import EngineError
from nightshift.files import read_file, write_json
from nightshift.processes.supervise import Child, ProcessGroup, engine_environment
from nightshift.records import Result
from nightshift.worker import JOB_NAME, KEY_BYTES, LOG_NAME, RESULT_NAME, Job, Signed, signature

SUBMITTED_NAME = "submitted.json"
PROGRAM = (str(Path(__file__).parents[1] / "worker.py"),)
GRACE_SECONDS = 60.0  # a worker that is asked to end gives its engine's processes their own grace first
_POLL_SECONDS = 0.05  # where the kernel cannot tell
LATE_SECONDS = 60.0  # after its own deadline: then it hangs


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker under way, or one that has ended and was not collected. `key` signs its result."""

    group: ProcessGroup
    child: Child
    key: bytes
    job: Job
    ends_at: float  # on the monotonic clock; what runs on hangs
    pidfd: int | None  # readable when it has ended; None where the system has no such thing


@dataclass(slots=True)
class LocalPool:
    """One slot on this machine; `environ` is what workers inherit."""

    root: Path
    environ: Mapping[str, str]
    look_key: bytes = b""
    _workers: dict[Path, _Worker] = field(default_factory=dict)

    def submit(self, folder: Path, job: Job) -> None:
        """As the protocol says."""
        name = f"{folder.parent.name}-{folder.name}-{uuid.uuid4().hex}"
        write_json(folder / JOB_NAME, job)
        write_json(folder / SUBMITTED_NAME, {"name": name, "pool": "local"})
        group, key = ProcessGroup(name, GRACE_SECONDS), secrets.token_bytes(KEY_BYTES)
        try:
            child = group.start(
                "worker",
                isolated(*PROGRAM, str(self.root), str(folder)),
                log_path=folder / LOG_NAME,
                env=engine_environment(self.environ, {}),
                cwd=self.root,
                stdin=PIPE,
            )
            assert child.stdin is not None
            with suppress(BrokenPipeError):  # it is dead already, which `result` says
                child.stdin.write(key + self.look_key)
                child.stdin.flush()
        except BaseException:
            group.stop()
            raise
        ends_at = time.monotonic() + job.deadline_seconds + LATE_SECONDS
        pidfd = os.pidfd_open(child.pid) if hasattr(os, "pidfd_open") else None
        self._workers[folder] = _Worker(group, child, key, job, ends_at, pidfd)

    def is_over(self, folder: Path) -> bool:
        """True as well for a worker that hangs past its own deadline, and where none was started."""
        worker = self._workers.get(folder)
        return worker is None or worker.child.poll() is not None or time.monotonic() > worker.ends_at

    def wait(self, timeout_seconds: float) -> None:
        """Sleep until the kernel says that a worker has ended."""
        pidfds = [worker.pidfd for worker in self._workers.values() if worker.pidfd is not None]
        can_wait = len(pidfds) == len(self._workers)
        select.select(pidfds, [], [], timeout_seconds if can_wait else min(timeout_seconds, _POLL_SECONDS))

    def in_flight(self) -> list[Path]:
        """As the protocol says."""
        return list(self._workers)

    def cancel(self, folder: Path) -> None:
        """As the protocol says."""
        if folder in self._workers:
            self._end(folder)

    def _end(self, folder: Path) -> _Worker:
        worker = self._workers[folder]
        worker.group.stop()
        if worker.pidfd is not None:
            os.close(worker.pidfd)
        return self._workers.pop(folder)

    def result(self, folder: Path) -> Result:
        """The result that the worker signed, after whatever it left behind is gone. EngineError where there is none."""
        if folder not in self._workers:
            raise EngineError(f"no worker was started for {folder}, which the record says is the run in flight")
        is_late = self._workers[folder].child.poll() is None
        last_words = self._workers[folder].child.tail(1)
        worker = self._end(folder)
        path = folder / RESULT_NAME
        others = [attempt for attempt in folder.glob("attempt-*") if attempt.name != "attempt-0"]
        if others:
            raise EngineError(f"{others[0]} was made beside the worker that was started: its result counts for nothing")
        try:
            data = read_file(path)
        except FileNotFoundError:
            how = "did not end" if is_late else f"ended without a result: {worker.child.exit_cause()}"
            said = f"; last in {LOG_NAME}: {last_words[0]}" if last_words else ""
            raise EngineError(f"the worker {how}{said}", "Run it again.") from None
        except OSError as error:
            raise EngineError(f"{path} cannot be read: {error.strerror}") from None
        try:
            signed = msgspec.json.decode(data, type=Signed)
            is_own = hmac.compare_digest(signed.hmac, signature(worker.key, bytes(signed.result), worker.job))
            result = msgspec.json.decode(signed.result, type=Result)
            _ = result.evaluation and result.evaluation.example_scores
        except (ValueError, TypeError, RecursionError) as error:
            raise EngineError(f"{path} is no result of a worker: {error}") from None
        if not is_own:
            raise EngineError(f"{path} was not signed by the worker that was started: it counts for nothing")
        return result

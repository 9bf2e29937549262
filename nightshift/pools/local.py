"""Workers on this machine, one process each.

A worker gets two things through a pipe that nobody else holds: a random key, with which it signs its result, and the
knowledge that the head lives. When the pipe closes, the worker ends itself; a watchdog ends it if it cannot.
"""

from __future__ import annotations

import hmac
import secrets
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, TimeoutExpired

import msgspec

from nightshift.errors import EngineError
from nightshift.files import read_file, write_json
from nightshift.processes.supervise import Child, ProcessGroup
from nightshift.records import Job, Result
from nightshift.worker import JOB_NAME, KEY_BYTES, LOG_NAME, RESULT_NAME, Signed, signature

PROGRAM: tuple[str | Path, ...] = ("-m", "nightshift.worker")
GRACE_SECONDS = 60.0  # a worker that is asked to end gives its engine's processes their own grace first
LATE_SECONDS = 60.0  # after its own deadline: then it hangs


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker under way, or one that has ended and was not collected. `key` signs its result."""

    group: ProcessGroup
    child: Child
    key: bytes
    job: Job
    ends_at: float  # on the monotonic clock; what runs on hangs


@dataclass(slots=True)
class LocalPool:
    """One slot on this machine; `environ` is what workers inherit, `look_key` what sealed runs are opened with.

    Another pool has these methods, and `look_key`.
    """

    root: Path
    environ: Mapping[str, str]
    look_key: bytes = b""  # empty but for the head of a look
    _workers: dict[Path, _Worker] = field(default_factory=dict)

    def submit(self, folder: Path, job: Job) -> None:
        """Write job.json into `folder` and start the worker of that run. EngineError where none can be started."""
        write_json(folder / JOB_NAME, job)
        group = ProcessGroup(f"{folder.parent.name}-{folder.name}-{uuid.uuid4().hex}", GRACE_SECONDS)
        key = secrets.token_bytes(KEY_BYTES)
        try:
            child = group.start(
                "worker",
                [sys.executable, "-I", *PROGRAM, self.root, folder],
                log_path=folder / LOG_NAME,
                env=self.environ,
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
        self._workers[folder] = _Worker(group, child, key, job, ends_at)

    def is_over(self, folder: Path) -> bool:
        """True if nothing more will come of the run: its worker has ended, or hangs past its own deadline."""
        worker = self._workers[folder]
        return worker.child.poll() is not None or time.monotonic() > worker.ends_at

    def wait(self, timeout_seconds: float) -> None:
        """Return when the run in flight ends, at the latest after `timeout_seconds`."""
        for worker in self._workers.values():
            with suppress(TimeoutExpired):
                worker.child.wait(timeout_seconds)

    def in_flight(self) -> list[Path]:
        """The folders of the runs that were submitted and not collected."""
        return list(self._workers)

    def cancel(self, folder: Path) -> None:
        """End the worker and all that it started; nothing where it was collected."""
        if worker := self._workers.pop(folder, None):
            worker.group.stop()

    def result(self, folder: Path) -> Result:
        """The result that the worker signed, after whatever it left behind is gone. EngineError where there is none."""
        worker = self._workers.pop(folder)
        is_late = worker.child.poll() is None
        last_words = worker.child.tail(1)
        worker.group.stop()
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
        except (ValueError, TypeError, RecursionError) as error:
            raise EngineError(f"{path} is no result of a worker: {error}") from None
        if not is_own:
            raise EngineError(f"{path} was not signed by the worker that was started: it counts for nothing")
        return result

"""Workers on this machine, one process in each slot.

What a worker gets through a pipe that nobody else holds: the private key that it signs its result with and, unless it
outlives its head, the knowledge that this one lives. When the pipe closes, such a worker ends itself; a watchdog ends
it if it cannot. One that outlives its head has a watchdog of its own, which ends it after its deadline.
"""

from __future__ import annotations

import os
import select
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import PIPE

import psutil

from nightshift.campaign.records import LATE_SECONDS, LOG_NAME, RESULT_NAME, Job, Result
from nightshift.entry import isolated
from nightshift.errors import EngineError
from nightshift.executors.base import Submitted, announce, verified
from nightshift.executors.process import Child, ProcessGroup, engine_environment
from nightshift.executors.slots import Slot, layout
from nightshift.executors.watchdog import ProcessTree, is_alive, marker_of
from nightshift.waiting import waiting

PROGRAM = (str(Path(__file__).parents[1] / "experiment" / "worker.py"),)
NAME = "local"
GRACE_SECONDS = 60.0  # a worker that is asked to end gives its engine's processes their own grace first
_POLL_SECONDS = 0.05  # where the kernel cannot tell


@dataclass(frozen=True, slots=True)
class _Own:
    """A worker that this head started, or one that has ended and was not collected."""

    group: ProcessGroup
    child: Child

    @property
    def pid(self) -> int:
        return self.child.pid

    def has_ended(self) -> bool:
        return self.child.poll() is not None

    def ask(self) -> None:
        self.child.terminate()

    def end(self) -> None:
        self.group.stop()

    def cause(self) -> str:
        """How it ended, for people."""
        last_words = self.child.tail(1)
        return self.child.exit_cause() + (f"; last in {LOG_NAME}: {last_words[0]}" if last_words else "")


@dataclass(frozen=True, slots=True)
class _Adopted:
    """One that an earlier head started: a stranger's child, or gone already."""

    process: psutil.Process | None
    marker: str

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def has_ended(self) -> bool:
        return self.process is None or not is_alive(self.process)

    def ask(self) -> None:
        with suppress(psutil.Error):
            if self.process is not None:
                self.process.terminate()

    def end(self) -> None:
        tree = ProcessTree(None, lambda process: False)
        tree.seen |= {self.process} if self.process else set()
        tree.markers.add(self.marker)
        tree.sample()
        tree.end(GRACE_SECONDS)

    def cause(self) -> str:
        """Nobody is told how another's child ended."""
        return "while no head was there to see how"


@dataclass(frozen=True, slots=True)
class _Worker:
    process: _Own | _Adopted
    public_key: str
    job: Job
    slot: Slot
    ends_at: float  # on the monotonic clock; what runs on hangs
    pidfd: int | None  # readable when it has ended; None where the system has no such thing


@dataclass(slots=True)
class LocalExecutor:
    """`environ` is what workers inherit; `outlives`: they go on when the head is killed, for the next one to adopt."""

    root: Path
    environ: Mapping[str, str]
    slots: tuple[Slot, ...] = (Slot(),)
    outlives: bool = False
    look_key: bytes = b""
    _workers: dict[Path, _Worker] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """As the protocol says."""
        return len(self.slots)

    @property
    def free_slots(self) -> list[Slot]:
        """As the protocol says."""
        taken = [worker.slot for worker in self._workers.values()]
        return [slot for slot in self.slots if slot not in taken]

    def hardware(self, of_engine: str) -> str:
        """As the protocol says."""
        return of_engine + layout(len(self.slots), len(self.slots[0].cores))

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        """As the protocol says."""
        if not self.free_slots:
            raise EngineError(f"all {len(self.slots)} slots are taken")
        slot = self.free_slots[0]
        job = replace(
            job,
            gpus=slot.gpus or job.gpus,
            cores=slot.cores,
            layout=layout(len(self.slots), len(slot.cores)),
            place=f"slot {slot.number + 1}" if len(self.slots) > 1 else "",
            outlives=self.outlives and not self.look_key,
        )
        name = f"{folder.name}-{uuid.uuid4().hex}"
        key, told = announce(folder, job, name, NAME)
        enter()
        group = ProcessGroup(name, GRACE_SECONDS, job.outlives)
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
            self._take(folder, _Own(group, child), told.public_key, job, slot)
        except BaseException:
            group.stop()
            raise

    def adopt(self, folder: Path, was: Submitted, job: Job) -> bool:
        """As the protocol says."""
        fits = [slot for slot in self.free_slots if slot.cores == job.cores and slot.gpus in (None, job.gpus)]
        if was.executor != NAME or not job.outlives or not fits:
            return False
        found = [process for process in psutil.process_iter() if marker_of(process) == was.name]
        process, slot = min(found, key=lambda one: one.pid, default=None), fits[0]
        if process is None and not (folder / RESULT_NAME).exists():
            return False  # its head was killed before it had its key, or it died with that
        self._take(folder, _Adopted(process, was.name), was.public_key, job, slot)
        return True

    def _take(self, folder: Path, process: _Own | _Adopted, public_key: str, job: Job, slot: Slot) -> None:
        ends_at, pidfd = time.monotonic() + job.deadline_seconds + LATE_SECONDS, None
        if hasattr(os, "pidfd_open") and process.pid is not None:
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(process.pid)
        self._workers[folder] = _Worker(process, public_key, job, slot, ends_at, pidfd)

    def is_over(self, folder: Path) -> bool:
        """True as well for a worker that hangs past its own deadline, and where none was started."""
        worker = self._workers.get(folder)
        return worker is None or worker.process.has_ended() or time.monotonic() > worker.ends_at

    def wait(self, timeout_seconds: float) -> None:
        """Sleep until the kernel says that a worker has ended. One that had ended before may wait for its turn."""
        running = [worker for worker in self._workers.values() if not worker.process.has_ended()]
        pidfds = [worker.pidfd for worker in running if worker.pidfd is not None]
        can_wait = len(pidfds) == len(running)
        select.select(pidfds, [], [], timeout_seconds if can_wait else min(timeout_seconds, _POLL_SECONDS))

    def in_flight(self) -> dict[Path, Job]:
        """As the protocol says."""
        return {folder: worker.job for folder, worker in self._workers.items()}

    def has_begun(self, folder: Path) -> bool:
        """As the protocol says."""
        return folder in self._workers

    def other_jobs(self) -> list[str]:
        """As the protocol says."""
        return []

    def cancel(self, folders: Collection[Path]) -> None:
        """As the protocol says."""
        ours = [folder for folder in folders if folder in self._workers]
        for folder in ours:  # all are asked before one is waited for
            self._workers[folder].process.ask()
        with waiting("ending the run" if len(ours) == 1 else f"ending {len(ours)} runs", len(ours) * GRACE_SECONDS):
            for folder in ours:
                self._end(folder)

    def _end(self, folder: Path) -> _Worker:
        worker = self._workers[folder]
        worker.process.end()
        if worker.pidfd is not None:
            os.close(worker.pidfd)
        return self._workers.pop(folder)

    def result(self, folder: Path) -> Result:
        """The result that the worker signed, after whatever it left behind is gone. EngineError where there is none."""
        if folder not in self._workers:
            raise EngineError(f"no worker was started for {folder}, which the record says is the run in flight")
        is_late = not self._workers[folder].process.has_ended()
        worker = self._end(folder)
        try:
            return verified(folder, worker.job, worker.public_key)
        except FileNotFoundError:
            how = "did not end" if is_late else f"ended without a result: {worker.process.cause()}"
            raise EngineError(f"the worker {how}", "Run it again.") from None

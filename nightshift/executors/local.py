"""Workers on this machine, one process in each slot.

The controller holds the pipe to a worker's stdin. When the controller dies, the pipe closes and the worker ends itself;
the controller's watchdog ends it if it cannot.
"""

import os
import select
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import PIPE

from nightshift.campaign.records import JOB_NAME, LATE_SECONDS, LOG_NAME, Job, Result
from nightshift.errors import EngineError
from nightshift.executors.process import Child, ProcessGroup, python_command, python_environment
from nightshift.executors.result import read_result
from nightshift.executors.slots import Slot, layout
from nightshift.files import write_json
from nightshift.waiting import waiting

PROGRAM = ("-m", "nightshift.experiment.worker")
GRACE_SECONDS = 60.0  # a worker that is asked to end gives its engine's processes their own grace first
# The same where the controller is dead: then a worker has 10 s in all, with prime-rl 30 s.
ORPHAN_GRACE_SECONDS = {"trl": 7.0, "prime-rl": 25.0}
_POLL_SECONDS = 0.05  # where the kernel cannot tell


@dataclass(frozen=True, slots=True)
class _Worker:
    group: ProcessGroup
    child: Child
    job: Job
    slot: Slot
    ends_at: float  # on the monotonic clock; what runs on hangs
    pidfd: int | None  # readable when it has ended; None where the system has no such thing

    def has_ended(self) -> bool:
        return self.child.poll() is not None


@dataclass(slots=True)
class LocalExecutor:
    """The slots of this machine. SlurmExecutor has the same methods. `environ` is what workers inherit."""

    root: Path
    environ: Mapping[str, str]
    slots: tuple[Slot, ...] = (Slot(),)
    _workers: dict[Path, _Worker] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def free_slots(self) -> list[Slot]:
        """The places on this machine that the next runs take, in their order; none of a cluster."""
        taken = [worker.slot for worker in self._workers.values()]
        return [slot for slot in self.slots if slot not in taken]

    def hardware(self, of_engine: str) -> str:
        """What its runs have, where the engine has this; empty where their results tell it."""
        return of_engine + layout(len(self.slots), len(self.slots[0].cores))

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        """Write job.json into `folder`, call `enter`, which adds a line to the journal, and only then start the
        worker of that run. EngineError where none can be started."""
        if not self.free_slots:
            raise EngineError(f"all {len(self.slots)} slots are taken")
        slot = self.free_slots[0]
        job = replace(
            job,
            gpus=slot.gpus or job.gpus,
            cores=slot.cores,
            layout=layout(len(self.slots), len(slot.cores)),
            slot=f"slot {slot.number + 1}" if len(self.slots) > 1 else "",
        )
        marker = f"{folder.name}-{uuid.uuid4().hex}"
        write_json(folder / JOB_NAME, job)
        enter()
        group = ProcessGroup(marker, GRACE_SECONDS, ORPHAN_GRACE_SECONDS[job.rules.engine], is_subreaper=True)
        try:
            child = group.start(
                "worker",
                python_command(*PROGRAM, str(self.root), str(folder)),
                log_path=folder / LOG_NAME,
                env=python_environment(self.environ, {}),
                cwd=self.root,
                stdin=PIPE,
            )
            ends_at, pidfd = time.monotonic() + job.deadline_seconds + LATE_SECONDS, None
            if hasattr(os, "pidfd_open"):
                with suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(child.pid)
            self._workers[folder] = _Worker(group, child, job, slot, ends_at, pidfd)
        except BaseException:
            group.stop()
            raise

    def is_over(self, folder: Path) -> bool:
        """True if nothing more will come of the run: also for a worker that hangs past its own deadline."""
        worker = self._workers.get(folder)
        return worker is None or worker.has_ended() or time.monotonic() > worker.ends_at

    def wait(self, timeout_seconds: float) -> None:
        """Return when a run in flight ends, at the latest after `timeout_seconds`; one that had ended may wait."""
        running = [worker for worker in self._workers.values() if not worker.has_ended()]
        pidfds = [worker.pidfd for worker in running if worker.pidfd is not None]
        can_wait = len(pidfds) == len(running)
        select.select(pidfds, [], [], timeout_seconds if can_wait else min(timeout_seconds, _POLL_SECONDS))

    def in_flight(self) -> dict[Path, Job]:
        """The runs that were submitted and not collected, by their folders."""
        return {folder: worker.job for folder, worker in self._workers.items()}

    def has_begun(self, folder: Path) -> bool:
        """Whether a run in flight is more than a job that waits."""
        return folder in self._workers

    def cancel(self, folders: Collection[Path]) -> None:
        """End the workers of these runs and all that they started; nothing where one was collected. Never fails."""
        ours = [folder for folder in folders if folder in self._workers]
        for folder in ours:  # all are asked before one is waited for
            self._workers[folder].child.terminate()
        runs = "the run" if len(ours) == 1 else f"{len(ours)} runs"
        with waiting(f"ending {runs} (Ctrl-\\ does not wait)", len(ours) * GRACE_SECONDS):
            for folder in ours:
                self._end(folder)

    def _end(self, folder: Path) -> _Worker:
        worker = self._workers[folder]
        worker.group.stop()
        if worker.pidfd is not None:
            os.close(worker.pidfd)
        return self._workers.pop(folder)

    def result(self, folder: Path) -> Result:
        """What came back of a run that is over, after whatever its worker left behind is gone. EngineError where that
        cannot be relied on, or where nothing did."""
        if folder not in self._workers:
            raise EngineError(f"no worker was started for {folder}, which the record says is the run in flight")
        is_late = not self._workers[folder].has_ended()
        worker = self._end(folder)
        try:
            return read_result(folder, worker.job)
        except FileNotFoundError:
            how = "did not end" if is_late else f"ended without a result: {worker.child.exit_cause()}"
            if not is_late and (last_words := worker.child.tail(1)):
                how += f"; last in {LOG_NAME}: {last_words[0]}"
            raise EngineError(f"the worker {how}", "Run it again.") from None

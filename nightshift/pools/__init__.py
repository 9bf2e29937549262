"""Where runs are made. A pool starts workers; what goes in and what comes back lies in the run's folder.

runs/NNNN/run-K/job.json         what the worker needs
runs/NNNN/run-K/submitted.json   the name of the worker, written before it is started
runs/NNNN/run-K/attempt-0/       what the worker leaves: metrics, answers, weights, logs
runs/NNNN/run-K/result.json      a link to the result in it
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Protocol

from nightshift.records import Job, Result

SUBMITTED_NAME = "submitted.json"


class State(StrEnum):
    """Where a run stands."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"  # with a result or without one
    LOST = "lost"  # it neither ended nor can it be expected to
    UNKNOWN = "unknown"  # the pool cannot say now

    @property
    def is_over(self) -> bool:
        """True if nothing more will come of it."""
        return self in (State.ENDED, State.LOST)


class Pool(Protocol):
    """`local` (workers on this machine)."""

    num_slots: int
    look_key: bytes  # that sealed runs are opened with; empty but for the head of a look

    def submit(self, folder: Path, job: Job) -> None:
        """Write job.json into `folder` and start the worker of that run. Does nothing if that was done."""
        ...

    def state(self, folder: Path) -> State:
        """Where the run stands."""
        ...

    def result(self, folder: Path) -> Result:
        """What came back of a run that is over. EngineError where that cannot be relied on, or where nothing did."""
        ...

    def cancel(self, folder: Path) -> None:
        """End the worker and all that it started; nothing where it has ended."""
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Return when a run in flight ends, at the latest after `timeout_seconds`."""
        ...

    def in_flight(self) -> list[Path]:
        """The folders of the runs that were submitted and not collected."""
        ...

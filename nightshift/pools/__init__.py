"""Where runs are made. A pool starts workers; what goes in and what comes back lies in the run's folder.

runs/NNNN/run-K/job.json         what the worker needs
runs/NNNN/run-K/submitted.json   the worker's name, written before it is started: a pool that outlives heads finds it
runs/NNNN/run-K/attempt-0/       what the worker leaves: metrics, answers, weights, logs
runs/NNNN/run-K/result.json      a link to the result in it
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from nightshift.records import Result
from nightshift.worker import Job


class Pool(Protocol):
    """`local`: workers on this machine."""

    look_key: bytes  # that sealed runs are opened with; empty but for the head of a look

    def submit(self, folder: Path, job: Job) -> None:
        """Write job.json into `folder` and start the worker of that run. EngineError where none can be started."""
        ...

    def is_over(self, folder: Path) -> bool:
        """True if nothing more will come of the run."""
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Return when a run in flight ends, at the latest after `timeout_seconds`."""
        ...

    def in_flight(self) -> list[Path]:
        """The folders of the runs that were submitted and not collected."""
        ...

    def cancel(self, folder: Path) -> None:
        """End the worker and all that it started; nothing where it was collected."""
        ...

    def result(self, folder: Path) -> Result:
        """What came back of a run that is over. EngineError where that cannot be relied on, or where nothing did."""
        ...

"""Where runs are made. An executor starts workers in its slots; the run's folder holds what goes in and comes back.

runs/NNNN/job.json      what the worker needs, and a random token; the journal holds its hash before the worker starts
runs/NNNN/result.json   what the worker leaves last, with the token of its job
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from nightshift.campaign.records import RESULT_NAME, Job, Result
from nightshift.errors import EngineError
from nightshift.executors.slots import Slot
from nightshift.files import read_file


class Executor(Protocol):
    """`local`: workers on this machine; `slurm`: jobs of a cluster."""

    @property
    def num_slots(self) -> int:
        """How many runs can be in flight."""
        ...

    @property
    def free_slots(self) -> Sequence[Slot]:
        """The places on this machine that the next runs take, in their order; none of a cluster."""
        ...

    def hardware(self, of_engine: str) -> str:
        """What its runs have, where the engine has this; empty where their results tell it."""
        ...

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        """Write job.json into `folder`, call `enter`, which adds its hash to the journal, and only then start the
        worker of that run. EngineError where none can be started."""
        ...

    def is_over(self, folder: Path) -> bool:
        """True if nothing more will come of the run."""
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Return when a run in flight ends, at the latest after `timeout_seconds`."""
        ...

    def in_flight(self) -> dict[Path, Job]:
        """The runs that were submitted and not collected, by their folders."""
        ...

    def has_begun(self, folder: Path) -> bool:
        """Whether a run in flight is more than a job that waits."""
        ...

    def other_jobs(self) -> list[str]:
        """Jobs of this person that it did not submit, `17 name`: of a cluster that answers."""
        ...

    def cancel(self, folders: Collection[Path]) -> None:
        """End the workers of these runs and all that they started; nothing where one was collected. Never fails."""
        ...

    def result(self, folder: Path) -> Result:
        """What came back of a run that is over. EngineError where that cannot be relied on, or where nothing did."""
        ...


def read_result(folder: Path, job: Job) -> Result:
    """Read the result of a run.

    Raises: FileNotFoundError where there is none; EngineError, which names the file, where it cannot be read or is of
    another job.
    """
    path = folder / RESULT_NAME
    try:
        result = msgspec.json.decode(read_file(path), type=Result)
        _ = result.evaluation and result.evaluation.example_scores
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise EngineError(f"{path} is no result of a worker: {error}") from None
    fits = (
        ("token", result.token, job.token),
        ("seed", result.seed, job.seed),
        ("job.json with the sha256", result.job_sha256, job.sha256),
    )
    for what, found, wanted in fits:
        if found != wanted:
            raise EngineError(f"{path} has the {what} {found!r}, its job has {wanted!r}: it counts for nothing")
    return result

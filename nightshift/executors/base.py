"""The base class of executors, which start the workers of runs: `local` on this machine, `slurm` as jobs of a cluster.

The default methods are for an executor without local slots, whose runs end with their controller.
tests/contract/test_executors.py tests every executor.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from nightshift.campaign.records import JOB_NAME, RESULT_NAME, Job, Result
from nightshift.errors import EngineError, Failure
from nightshift.files import parse_json, read_file, write_json

PROGRAM = ("-m", "nightshift.experiment.worker")


@dataclass(frozen=True)
class Slot:
    """The share of this machine that one worker uses."""

    gpus: str | None = None  # as in --gpus; None: the engine chooses
    cores: tuple[int, ...] = ()  # the logical processors to which the worker is pinned; () = all
    name: str = ""  # empty for an only slot


@dataclass(slots=True)
class Flight:
    """A run that was submitted and not collected."""

    job: Job
    ends_at: float  # on the monotonic clock; a run that has not ended by then hangs


F = TypeVar("F", bound=Flight)


class Executor(ABC, Generic[F]):
    """Starts workers, and collects their results. `avoided`: names of slots or nodes that get no run."""

    def __init__(self, root: Path, environ: Mapping[str, str], num_slots: int = 1, layout: str = "") -> None:
        """`environ`: the environment that workers inherit. `layout`: a suffix of the hardware in records."""
        self.root, self.environ, self.num_slots, self.layout = root, environ, num_slots, layout
        self.avoided: Collection[str] = ()
        self._flights, self._places = dict[Path, F](), dict[Path, str]()

    @property
    def free_slots(self) -> Sequence[Slot]:
        """The free slots of this machine, the next one first."""
        return ()

    @property
    def num_free(self) -> int:
        """How many runs can be submitted now: 0 while the avoided names include "", the only slot."""
        return 0 if "" in self.avoided else max(self.num_slots - len(self.in_flight()), 0)

    def require_ready(self) -> None:
        """Raise EngineError if no run would be accepted."""
        return

    def hardware(self, of_engine: str) -> str:
        """Return the hardware of a run for records: the engine's, with `layout`; "" if only the worker knows it."""
        return of_engine + self.layout

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        """Write job.json, call `enter`, which writes into the journal, and start the run. EngineError if that fails."""
        job = self._placed(job)
        write_json(folder / JOB_NAME, job)
        enter()
        self._places[folder] = job.slot
        try:
            self._start(folder, job)
        except BaseException:
            self.cancel([folder])
            raise

    def _placed(self, job: Job) -> Job:
        return replace(job, layout=self.layout)

    @abstractmethod
    def _start(self, folder: Path, job: Job) -> None:
        """Start the run of job.json. Add it to `_flights` before any of its processes may exist."""

    def take_over(self, folder: Path, job: Job) -> bool:
        """Wait for a run that an earlier controller submitted. Returns False if runs end with their controller."""
        return False

    def in_flight(self) -> dict[Path, Job]:
        """Return the jobs that were submitted and not collected, by the folders of their runs."""
        return {folder: flight.job for folder, flight in self._flights.items()}

    def has_begun(self, folder: Path) -> bool:
        """Return False for a run in flight whose job still waits in a queue."""
        return folder in self._flights

    def is_over(self, folder: Path) -> bool:
        """Return whether the run has ended, or has exceeded its deadline."""
        flight = self._flights.get(folder)
        return flight is None or time.monotonic() > flight.ends_at or self._has_ended(folder)

    @abstractmethod
    def _has_ended(self, folder: Path) -> bool:
        """Return whether a run in flight has ended."""

    def wait(self, timeout_seconds: float) -> None:
        """Return after `timeout_seconds`, or when a run in flight ends."""
        time.sleep(timeout_seconds)

    def place(self, folder: Path) -> str:
        """Return the name of the slot or node of a run, also after its end; "" if it is unknown."""
        return self._places.get(folder, "")

    @abstractmethod
    def cancel(self, folders: Collection[Path]) -> None:
        """End these runs and all their processes. Ignores collected runs, and never raises an error."""

    @abstractmethod
    def _ending(self, folder: Path) -> tuple[str, Failure]:
        """Return how a run without a result ended, and the kind of failure."""

    def result(self, folder: Path) -> Result:
        """Return the result of a run that is over, and end its processes. EngineError if there is no valid result."""
        if folder not in self._flights:
            raise EngineError(f"no job was submitted for {folder}, although its record is in flight")
        try:
            return read_result(folder, self._flights[folder].job)
        except FileNotFoundError:
            cause, failure = self._ending(folder)
            raise EngineError(cause, "Run it again.", failure=failure) from None
        finally:
            self.cancel([folder])


def read_result(folder: Path, job: Job) -> Result:
    """Read runs/NNNN/result.json, the last file of a worker. FileNotFoundError; EngineError if it is invalid."""
    path = folder / RESULT_NAME
    try:
        result = parse_json(read_file(path), Result)
        _ = result.evaluation and result.evaluation.example_scores
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(f"{path} is not the result of a worker: {error}") from None
    identity, expected = (result.token, result.seed, result.job_sha256), (job.token, job.seed, job.sha256)
    if identity != expected:
        raise EngineError(f"{path} has another token, seed or sha256 than its job: {identity}, not {expected}")
    return result

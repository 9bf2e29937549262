"""The base class of executors: where runs happen. `local` starts workers here, `slurm` as jobs of a cluster.

The bodies here are those of an executor without slots of its own and without jobs that outlive the controller.
tests/contract/test_executors.py has what each one must do.
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


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one worker on this machine. `gpus`: as --gpus names them, None for the engine's own choice; `cores`:
    of the operating system, to which the worker is pinned; none if it is free."""

    gpus: str | None = None
    cores: tuple[int, ...] = ()
    name: str = ""  # empty if it is the only slot


@dataclass(slots=True)
class Flight:
    """A run that was submitted and not collected."""

    job: Job
    ends_at: float  # on the monotonic clock; a run that continues after this hangs


F = TypeVar("F", bound=Flight)


class Executor(ABC, Generic[F]):
    """Where runs happen. `environ`: what workers inherit. `layout`: what the hardware of a run is followed by.
    `avoided`: the names of slots or nodes that get no run."""

    def __init__(self, root: Path, environ: Mapping[str, str], num_slots: int = 1, layout: str = "") -> None:
        self.root, self.environ, self.num_slots, self.layout = root, environ, num_slots, layout
        self.avoided: Collection[str] = ()
        self._flights, self._places = dict[Path, F](), dict[Path, str]()

    @property
    def free_slots(self) -> Sequence[Slot]:
        """The slots of this machine that the next runs take, in their order."""
        return ()

    @property
    def num_free(self) -> int:
        """How many runs can be submitted now. None while the place of a lost run is avoided that has no name."""
        return 0 if "" in self.avoided else max(self.num_slots - len(self.in_flight()), 0)

    def require_ready(self) -> None:
        """Raise EngineError if no run would be accepted."""
        return

    def hardware(self, of_engine: str) -> str:
        """Return the hardware of a run, as records name it, where the engine has `of_engine`; "" if a worker tells."""
        return of_engine + self.layout

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        """Write job.json into `folder`, call `enter`, which adds a line to the journal, and only then start the run.

        Raises:
            EngineError: no run can be started. Then none is in flight.
        """
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
        """Start the run of job.json. It is in flight as soon as something of it may exist."""

    def take_over(self, folder: Path, job: Job) -> bool:
        """Wait for a run that an earlier controller submitted. False if such runs end with their controller."""
        return False

    def in_flight(self) -> dict[Path, Job]:
        """Return the jobs that were submitted and not collected, by the folders of their runs."""
        return {folder: flight.job for folder, flight in self._flights.items()}

    def has_begun(self, folder: Path) -> bool:
        """Return whether a run in flight is more than a job that waits."""
        return folder in self._flights

    def is_over(self, folder: Path) -> bool:
        """Return True if nothing more will come of the run: also if it runs past its own deadline."""
        flight = self._flights.get(folder)
        return flight is None or time.monotonic() > flight.ends_at or self._has_ended(folder)

    @abstractmethod
    def _has_ended(self, folder: Path) -> bool:
        """Return whether a run in flight has ended."""

    def wait(self, timeout_seconds: float) -> None:
        """Return after `timeout_seconds`, or when a run in flight ends."""
        time.sleep(timeout_seconds)

    def place(self, folder: Path) -> str:
        """Return the name of the slot or node of a run, also after its end; "" if it is not known."""
        return self._places.get(folder, "")

    @abstractmethod
    def cancel(self, folders: Collection[Path]) -> None:
        """End these runs and all that they started; nothing where one was collected. Never fails."""

    @abstractmethod
    def _ending(self, folder: Path) -> tuple[str, Failure]:
        """Return how a run ended that left no result, and whose fault that is."""

    def result(self, folder: Path) -> Result:
        """Return what came back of a run that is over, after whatever its worker left behind is gone.

        Raises:
            EngineError: nothing came back, or not the result of this job.
        """
        if folder not in self._flights:
            raise EngineError(f"no job was submitted for {folder}, which the record says is the run in flight")
        try:
            return read_result(folder, self._flights[folder].job)
        except FileNotFoundError:
            cause, failure = self._ending(folder)
            raise EngineError(cause, "Run it again.", failure=failure) from None
        finally:
            self.cancel([folder])


def read_result(folder: Path, job: Job) -> Result:
    """Read runs/NNNN/result.json, which a worker leaves last. FileNotFoundError if there is none; EngineError, which
    names the file, if it cannot be read or is of another job."""
    path = folder / RESULT_NAME
    try:
        result = parse_json(read_file(path), Result)
        _ = result.evaluation and result.evaluation.example_scores
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(f"{path} is no result of a worker: {error}") from None
    found, wanted = (result.token, result.seed, result.job_sha256), (job.token, job.seed, job.sha256)
    if found != wanted:
        raise EngineError(f"{path} has another token, seed or sha256 of its job: {found}, not {wanted}")
    return result

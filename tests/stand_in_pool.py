"""A stand-in for the local executor: the worker's own code, in this process, when the head waits for it."""

from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from nightshift.campaign.records import JOB_NAME, Job, Result
from nightshift.errors import EngineError
from nightshift.executors.local import Slot
from nightshift.experiment.worker import make_run
from nightshift.files import write_json


class StandInExecutor:
    """One slot. `during` is called with a run's folder before the run is made: a test acts in the middle of it."""

    num_slots = 1

    def __init__(self, root: Path) -> None:
        self._root = root
        self._jobs: dict[Path, Job] = {}
        self._results: dict[Path, Result | None] = {}
        self.during: Callable[[Path], object] = lambda folder: None

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        write_json(folder / JOB_NAME, job)
        enter()
        self._jobs[folder] = job
        self._results.setdefault(folder, None)

    def is_over(self, folder: Path) -> bool:
        return folder not in self._results or self._results[folder] is not None

    def result(self, folder: Path) -> Result:
        result = self._results.pop(folder, None)
        if result is None:
            raise EngineError(f"{folder} has no result")
        return result

    @property
    def free_slots(self) -> list[Slot]:
        return [] if self._results else [Slot()]

    def cancel(self, folders: Collection[Path]) -> None:
        for folder in folders:
            self._results.pop(folder, None)

    def wait(self, timeout_seconds: float) -> None:
        for folder in [folder for folder, result in self._results.items() if result is None]:
            self.during(folder)
            job = msgspec.json.decode((folder / JOB_NAME).read_bytes(), type=Job)
            self._results[folder] = make_run(job, self._root, folder)

    def in_flight(self) -> dict[Path, Job]:
        return {folder: self._jobs[folder] for folder in self._results}

    def hardware(self, of_engine: str) -> str:
        return of_engine

    def has_begun(self, folder: Path) -> bool:
        return True

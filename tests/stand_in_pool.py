"""A stand-in for the local executor, which runs the worker in this process; and an executor of any kind with jobs."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from nightshift.campaign.records import JOB_NAME, RESULT_NAME, Job
from nightshift.config.train_toml import load
from nightshift.errors import Failure
from nightshift.executors.base import Executor, Flight, Slot
from nightshift.experiment.worker import make_run
from nightshift.files import write_json
from tests import stand_ins
from tests.checkouts import leftovers
from tests.rules import ARITHMETIC_TRL
from tests.waiting import wait_for


class StandInExecutor(Executor[Flight]):
    """`during` is called with a run's folder before the run is made: a test acts in the middle of it."""

    def __init__(self, root: Path, num_slots: int = 1) -> None:
        super().__init__(root, {}, num_slots)
        self._over = set[Path]()
        self.during: Callable[[Path], object] = lambda folder: None

    @property
    def free_slots(self) -> list[Slot]:
        return [] if self._flights else [Slot()]

    def _start(self, folder: Path, job: Job) -> None:
        self._flights[folder] = Flight(job, math.inf)

    def _has_ended(self, folder: Path) -> bool:
        return folder in self._over

    def cancel(self, folders: Collection[Path]) -> None:
        for folder in folders:
            self._flights.pop(folder, None)
            self._over.discard(folder)

    def wait(self, timeout_seconds: float) -> None:
        for folder in [folder for folder in self._flights if folder not in self._over]:
            self.during(folder)
            job = msgspec.json.decode((folder / JOB_NAME).read_bytes(), type=Job)
            write_json(folder / RESULT_NAME, make_run(job, self.root, folder))
            self._over.add(folder)

    def _ending(self, folder: Path) -> tuple[str, Failure]:
        return f"{folder} has no result", Failure.INFRASTRUCTURE


@dataclass
class Case:
    """An executor in the checkout at `root`."""

    executor: Executor[Any]
    root: Path

    def folder(self, number: int = 1) -> Path:
        folder = self.root / "runs" / f"{number:04d}"
        folder.mkdir(parents=True)
        return folder

    def job(self, seed: int = 1, deadline_seconds: float = 120.0) -> Job:
        rules = stand_ins.small(ARITHMETIC_TRL)
        engine = stand_ins.trl_engine(rules, self.root, {})
        settings = dict(engine.validate(load(self.root / "train.toml")).settings)
        return Job(rules, rules.hash(self.root), settings, seed, deadline_seconds, token=f"token of {seed}")

    def submit(self, number: int = 1, holds: bool = False, **fields: Any) -> Path:
        """Submit a run, which trains until it is ended if it `holds`."""
        folder = self.folder(number)
        if holds and not isinstance(self.executor, StandInExecutor):  # whose runs are made at once
            stand_ins.fault(folder, "hold", once=False)
        self.executor.submit(folder, self.job(**fields), lambda: None)
        return folder

    def until_over(self, folder: Path) -> None:
        """Wait for the end of a run; pytest ends a test whose run hangs."""
        while not self.executor.is_over(folder):
            self.executor.wait(0.2)

    def until_training(self, folder: Path) -> None:
        if not isinstance(self.executor, StandInExecutor):
            wait_for(lambda: any(folder.glob("metrics.jsonl")))

    def lose(self, folder: Path) -> None:
        """Kill the worker of a run that trains."""
        if isinstance(self.executor, StandInExecutor):
            self.until_over(folder)
            (folder / RESULT_NAME).unlink()
        else:
            (worker,) = [p for p in leftovers(self.root.parent) if last_word(p) == str(folder)]
            worker.kill()


def last_word(process: psutil.Process) -> str:
    """Return the last word of a command line; "" if the process has ended."""
    try:
        return process.cmdline()[-1]
    except (psutil.Error, IndexError):
        return ""

"""A run in flight in words: the live line, `nightshift wait` and `nightshift status`."""

import time
from datetime import datetime
from pathlib import Path

import msgspec

from nightshift.campaign.metrics import PROGRESS_NAME
from nightshift.campaign.records import JOB_NAME, RESULT_NAME, Job, Phase, Progress
from nightshift.files import read_file
from nightshift.text import clean
from nightshift.waiting import lasted

_SLOWEST = 8.0  # wall-clock seconds that a second of the budget may take: of CPU time, beside neighbours
_MOST_SECONDS = 1e6  # a budget that is more was not written by us
_MAX_NAME = 40  # characters of a slot or node
_STARTS = {"trl": "loading torch and the model", "prime-rl": "starting the inference server and the trainer"}


class RunLine:
    """A run in flight in words, from what its head and its worker leave in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._job, self._began = folder, _job(folder), _written(folder / JOB_NAME)
        self._reading: Progress | None = None
        self._first: tuple[float, float] | None = None  # of this phase: when it was read, and how far it was, 0..1
        self._last: tuple[float, float] | None = None
        self._most = 0  # examples answered: some are asked once more, and counted anew

    @property
    def phase(self) -> Phase | None:
        return None if self._reading is None else self._reading.phase

    def is_over(self) -> bool:
        return (self._folder / RESULT_NAME).exists()

    def read(self, reading: Progress | None) -> None:
        self._job = self._job or _job(self._folder)
        if reading is None or reading == self._reading:
            return
        if reading.phase is not self.phase:
            self._first = self._last = None
        self._reading, self._most = reading, max(self._most, reading.num_done or 0)
        if (share := self._share(reading)) is not None:
            self._last = _written(self._folder / PROGRESS_NAME), share
            self._first = self._first or self._last

    def text(self, name: str = "") -> str:
        """What it does, since when, and when that ends."""
        reading, job, lasts = self._reading, self._job, lasted(time.time() - self._began)
        place = clean(reading.slot, _MAX_NAME) + ": " if reading and reading.slot else ""
        head = f"{name or self.name}: {place}"
        if reading is None:
            return f"{head}waiting to start, {lasts}"
        if reading.phase is Phase.STARTING:
            what = f": {_STARTS[job.rules.engine]}" if job and job.rules.engine in _STARTS else ""
            most = f" of at most {lasted(job.rules.startup_seconds)}" if job else ""
            return f"{head}starting{what}, {lasts}{most}"
        parts = [reading.phase.value]
        if reading.phase is Phase.EVALUATING:
            total = self._num_examples
            parts[0] += f" {self._most:,}" + (f" of {total:,}" if total and total >= self._most else " examples")
        else:
            parts.append(f"step {reading.num_steps}")
            parts += [f"reward {reading.reward:.2f}"] if reading.reward is not None else []
        parts += [lasts, *([ends] if (ends := self._ends()) else [])]
        return head + ", ".join(parts)

    @property
    def name(self) -> str:
        """`experiment 0042`; of a certificate `baseline 1000`."""
        return f"experiment {self.short}" if self._folder.name.isdigit() else self.short

    @property
    def short(self) -> str:
        return self._folder.name.replace("-", " ")

    @property
    def _num_examples(self) -> int | None:
        """That it will answer; None where that cannot be told: a game has several turns."""
        environments = self._job.rules.environments if self._job else ()
        if any(environment.is_game for environment in environments):
            return None
        return sum(environment.num_selection for environment in environments) or None

    def _share(self, reading: Progress) -> float | None:
        if reading.phase is Phase.TRAINING and reading.seconds_left is not None and self._job:
            return min(max(1 - reading.seconds_left / self._job.rules.budget_seconds, 0.0), 1.0)
        total = self._num_examples
        return min(self._most / total, 1.0) if reading.phase is Phase.EVALUATING and total else None

    def _ends(self) -> str:
        """When this phase ends, if it goes on as it did; empty where that cannot be told."""
        if self._first is None or self._last is None or self._job is None or self._reading is None:
            return ""
        (began, before), (then, share) = self._first, self._last
        rate = (share - before) / (then - began) if then > began else 0.0
        if self._reading.phase is Phase.TRAINING:
            fastest = 1 / self._job.rules.budget_seconds
            is_measured = self._job.rules.budget_clock == "cpu" and rate > 0
            rate = min(max(rate, fastest / _SLOWEST), fastest) if is_measured else fastest
        if rate <= 0:
            return ""
        end = then + (1 - share) / rate
        at = datetime.fromtimestamp(end).astimezone().strftime("%H:%M:%S %Z")
        return f"{'ends' if end > time.time() else 'was to end'} {at}"


def _job(folder: Path) -> Job | None:
    try:
        job = msgspec.json.decode(read_file(folder / JOB_NAME), type=Job)
    except (OSError, ValueError, RecursionError):  # not written yet, or damaged: less is told
        return None
    return job if 0 < job.rules.budget_seconds < _MOST_SECONDS else None  # it lies where agents can write


def _written(path: Path) -> float:
    """When, in seconds since 1970; now, where it is not there or its clock is ahead."""
    try:
        return min(time.time(), path.stat().st_mtime)
    except OSError:
        return time.time()

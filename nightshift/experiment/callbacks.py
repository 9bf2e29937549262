"""What a worker does at each step of the training: report progress, and end a training without a gradient."""

import math
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from nightshift.campaign.metrics import NO_GRADIENT_STEPS
from nightshift.campaign.records import Phase, Progress, ProgressCallback
from nightshift.engines.base import NoGradient
from nightshift.files import write_atomically

_PROGRESS_SECONDS = 0.5
_CHANCE = 1e-4  # a row of steps that is less likely than this by chance ends the run


def reporter(path: Path, slot: str) -> ProgressCallback:
    """Return a callback that writes the last reading to `path`, for progress lines and `nightshift status`."""
    last_phase: Phase | None = None
    last = 0.0

    def report(reading: Progress) -> None:
        nonlocal last_phase, last
        now = time.monotonic()
        if reading.phase is not last_phase or now - last >= _PROGRESS_SECONDS:
            with suppress(OSError):  # a full disk ends the run where it matters, not here
                write_atomically(path, msgspec.json.encode(replace(reading, slot=slot)), sync=False)
            last_phase, last = reading.phase, now

    report(Progress(Phase.STARTING, 0))
    return report


def ending(report: ProgressCallback, budget_seconds: float) -> ProgressCallback:
    """Return `report` with an end: it raises NoGradient once NO_GRADIENT_STEPS steps in a row had no gradient.

    Where rewards are sparse, many steps have no gradient by chance. So the row must also be less likely than _CHANCE,
    given the steps before it: steps are taken for independent, and the share without a gradient has a uniform prior. A
    run that never had a gradient goes on for half of its budget, because sparse rewards start late.
    """

    def watch(reading: Progress) -> None:
        report(reading)
        row, left = reading.num_without_gradient, reading.seconds_left
        if row < NO_GRADIENT_STEPS or left is None:
            return
        before = reading.num_steps - row
        without = before - reading.num_with_gradient
        # Probability that all of the next `row` steps have no gradient.
        chance = math.comb(without + row, row) / math.comb(before + 1 + row, row)
        is_over = chance < _CHANCE if before else left <= budget_seconds / 2
        if is_over:
            raise NoGradient(f"no gradient in the last {row} of {reading.num_steps} steps", is_config_fault=True)

    return watch

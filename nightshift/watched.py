"""A run while it trains: its progress, its end where no gradient is left, and its reward curve."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from nightshift.engines import NoGradient, ProgressCallback
from nightshift.files import write_atomically
from nightshift.metrics import NO_GRADIENT_STEPS, Step
from nightshift.records import CURVE_POINTS, Phase, Progress

_PROGRESS_SECONDS = 0.5
_CHANCE = 1e-4  # of a row by chance; a run has some hundred rows at most


def reporter(path: Path, place: str) -> ProgressCallback:
    """Leaves the last reading in `path`, for the head's live line and for `nightshift status`."""
    last_phase: Phase | None = None
    last = -_PROGRESS_SECONDS

    def report(reading: Progress) -> None:
        nonlocal last_phase, last
        now = time.monotonic()
        if reading.phase is not last_phase or now - last >= _PROGRESS_SECONDS:
            with suppress(OSError):  # a full disk ends the run where it matters, not here
                write_atomically(path, msgspec.json.encode(replace(reading, place=place)), sync=False)
            last_phase, last = reading.phase, now

    report(Progress(Phase.STARTING, 0))
    return report


def ending(report: ProgressCallback, budget_seconds: float) -> ProgressCallback:
    """Wrap `report` so that it raises NoGradient once NO_GRADIENT_STEPS steps in a row had no gradient.

    Where rewards are sparse, many steps have none by chance: the row has to be so long that the steps before it, taken
    for independent, make it less likely than _CHANCE. A run without any gradient since its first step goes on for half
    of its budget: sparse rewards start late.
    """

    def watch(reading: Progress) -> None:
        report(reading)
        row, left = reading.num_without_gradient, reading.seconds_left
        if row < NO_GRADIENT_STEPS or left is None:
            return
        before = reading.num_steps - row
        share = (before - reading.num_with_gradient + 1) / (before + 2)  # without a gradient; Laplace's rule
        is_over = share**row < _CHANCE if before else left <= budget_seconds / 2
        if is_over:
            raise NoGradient(f"no gradient in the last {row} of {reading.num_steps} steps", is_config_fault=True)

    return watch


def curve(steps: Iterable[Step], budget_seconds: float) -> tuple[float | None, ...]:
    """Mean reward of the steps that ended in each of CURVE_POINTS equal parts of the budget; None where none did."""
    parts: list[list[float]] = [[] for _ in range(CURVE_POINTS)]
    for step in steps:
        if step.time is not None and step.reward_mean is not None:
            part = step.time / budget_seconds * CURVE_POINTS  # an engine's clock may be set back
            parts[int(min(max(part, 0), CURVE_POINTS - 1))].append(step.reward_mean)
    return tuple(sum(part) / len(part) if part else None for part in parts)

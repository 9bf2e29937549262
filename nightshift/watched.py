"""A run while it trains: its progress, its rewards, and its end where they make it hopeless."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from nightshift.engines import ProgressCallback
from nightshift.errors import EngineError
from nightshift.files import write_atomically
from nightshift.foretelling import Forecast, Rung, window
from nightshift.metrics import Step
from nightshift.records import CURVE_POINTS, Outcome, Phase, Progress, Training

_PROGRESS_SECONDS = 0.5


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


class Hopeless(EngineError):
    """A run is not worth the rest of its time: to the engine a reason to stop."""


class Watched:
    """Reports how a run trains, and ends one that is hopeless: raises Hopeless into the engine's training."""

    def __init__(self, report: ProgressCallback, budget_seconds: float, rungs: Sequence[Rung], is_spared: bool) -> None:
        """`rungs` in the order of their time; `is_spared`: only to tell what would have been foretold."""
        self.forecast: Forecast | None = None
        self._report, self._budget_seconds, self._rungs, self._is_spared = report, budget_seconds, [*rungs], is_spared
        self._steps, self._seconds = dict[int, Step](), 0.0
        self._hopeless: Hopeless | None = None

    def __call__(self, reading: Progress) -> None:
        self._report(reading)
        if reading.phase is not Phase.TRAINING or reading.seconds_left is None:
            return
        budget = self._budget_seconds
        self._seconds = budget - reading.seconds_left
        self._steps[reading.num_steps] = Step(reading.num_steps, self._seconds, reading.reward)
        while self._rungs and self._seconds >= self._rungs[0].foretelling.share * budget:
            rung = self._rungs.pop(0)
            share = rung.foretelling.share
            reward = window(curve(self._steps.values(), budget), share)
            num_before = sum((step.time or 0.0) < share / 2 * budget for step in self._steps.values())
            if self.forecast is not None or reward is None or reward >= rung.least or num_before < rung.warmup_steps:
                continue
            self.forecast = rung.forecast(reward)
            if not self._is_spared:
                cause = f"hopeless at {share:.0%} of the budget: mean reward {reward:.3f}, its parent's was"
                self._hopeless = Hopeless(f"{cause} {rung.parent_reward:.3f}")
                raise self._hopeless

    def told(self, training: Training) -> Training:
        """What training came to: of a run that was stopped that, whatever its engine made of it."""
        if self._hopeless is None:
            return training
        seconds, cause = training.training_seconds or self._seconds, self._hopeless.cause
        return replace(training, outcome=Outcome.STOPPED, training_seconds=seconds, cause=cause, failure=None)


def curve(steps: Iterable[Step], budget_seconds: float) -> tuple[float | None, ...]:
    """Mean reward of the steps that ended in each of CURVE_POINTS equal parts of the budget; None where none did."""
    parts: list[list[float]] = [[] for _ in range(CURVE_POINTS)]
    for step in steps:
        if step.time is not None and step.reward_mean is not None:
            part = step.time / budget_seconds * CURVE_POINTS  # an engine's clock may be set back
            parts[int(min(max(part, 0), CURVE_POINTS - 1))].append(step.reward_mean)
    return tuple(sum(part) / len(part) if part else None for part in parts)

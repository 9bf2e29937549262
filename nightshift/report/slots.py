"""Runs side by side: what ran in which slot and when, how much of the time each was in use, and which one is slow."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median

from nightshift.records import Record, Result
from nightshift.report.chart import Text

WIDTH, LEFT, LANE_HEIGHT = 720.0, 70.0, 18.0
SLOW = 1.25  # times as long a step as the median of the other slots
_MIN_RUNS = 3  # of a slot, before its speed is told
_NUM_TICKS = 6


@dataclass(frozen=True, slots=True)
class Bar:
    """One run, from `x` on."""

    number: int
    x: float
    width: float
    kind: str  # its experiment's verdict
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One slot, or node. `used`: share of the time, 0..1; `step_seconds`: median over its runs; None: too few."""

    place: str
    y: float
    bars: tuple[Bar, ...]
    used: float
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """All of them. `slow`: those whose steps take SLOW times as long as in the others, in words; empty where none."""

    lanes: tuple[Lane, ...]
    ticks: tuple[Text, ...]
    height: float
    slow: str


def timeline(records: Sequence[Record]) -> Timeline | None:
    """Of the runs that say where and when they were made; None where none does."""
    runs = [
        (record, run, span) for record in records for run in record.runs if run.place and (span := span_of_run(run))
    ]
    if not runs:
        return None
    began, ended = min(span[0] for *_, span in runs), max(span[1] for *_, span in runs)
    seconds = max((ended - began).total_seconds(), 1.0)
    scale = (WIDTH - LEFT) / seconds
    found = defaultdict[str, list[tuple[Record, Result, tuple[datetime, datetime]]]](list)
    for one in sorted(runs, key=lambda one: one[2]):  # a node may hold several at once
        names = (f"{one[1].place} ({n})" if n > 1 else one[1].place for n in itertools.count(1))
        found[next(name for name in names if not found[name] or found[name][-1][2][1] <= one[2][0])].append(one)
    lanes = []
    for index, place in enumerate(sorted(found)):
        bars = [
            Bar(
                record.number,
                LEFT + scale * (span[0] - began).total_seconds(),
                max(scale * run.total_seconds, 1.0),
                record.status,
                f"{record.number:04d} {record.status}, {run.total_seconds:.0f} s, {run.training.num_steps} steps",
            )
            for record, run, span in found[place]
        ]
        steps = [s for _, run, _ in found[place] if run.load and (s := run.load.step_seconds) is not None]
        used = min(sum(run.total_seconds for _, run, _ in found[place]) / seconds, 1.0)
        step_seconds = median(steps) if len(steps) >= _MIN_RUNS else None
        lanes.append(Lane(place, index * LANE_HEIGHT, tuple(bars), used, step_seconds))
    height = len(lanes) * LANE_HEIGHT
    return Timeline(tuple(lanes), tuple(_ticks(began, seconds, height)), height + 18.0, slow(lanes))


def span_of_run(run: Result) -> tuple[datetime, datetime] | None:
    """From when to when; None where the record does not say so, or no time can be read from it."""
    try:
        began = datetime.fromisoformat(run.began)
        return (began, began + timedelta(seconds=run.total_seconds)) if began.tzinfo else None
    except (ValueError, OverflowError):
        return None


def num_at_once(records: Iterable[Record]) -> int:
    """The most runs that were under way at one moment."""
    spans = [span for record in records for run in record.runs if (span := span_of_run(run))]
    ends = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    now = most = 0
    for _, change in ends:
        now += change
        most = max(most, now)
    return most


def slow(lanes: Sequence[Lane]) -> str:
    """Which slots are slower than the others, and by how much."""
    told = []
    for lane in lanes:
        others = [other.step_seconds for other in lanes if other is not lane and other.step_seconds]
        if lane.step_seconds and others and lane.step_seconds > SLOW * median(others):
            times = lane.step_seconds / median(others)
            told.append(f"{lane.place} is slow: a step takes {times:.1f} times as long as in the others")
    return "; ".join(told)


def _ticks(began: datetime, seconds: float, height: float) -> Iterable[Text]:
    for index in range(_NUM_TICKS + 1):
        moment = began + timedelta(seconds=seconds * index / _NUM_TICKS)
        yield Text(LEFT + (WIDTH - LEFT) * index / _NUM_TICKS, height + 14.0, moment.strftime("%H:%M"))

"""The geometry of the page's small drawings: key studies, curves of a run, intervals in the table, time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from markupsafe import Markup

from nightshift.records import Side
from nightshift.report.chart import Point, Text, ticks
from nightshift.report.keys import KeyStudy, as_number
from nightshift.report.runs import Series
from nightshift.report.text import points
from nightshift.report.timing import Use

PANEL_WIDTH, PANEL_HEIGHT = 330.0, 150.0
_PANEL_LEFT, _PANEL_TOP, _PANEL_BOTTOM = 44.0, 10.0, 112.0
_MAX_CATEGORIES = 7
SPARK_WIDTH, SPARK_HEIGHT = 400.0, 88.0  # drawn at about half: coordinates are whole numbers
INTERVAL_WIDTH = 96.0
STRIP_HEIGHT = 100.0


@dataclass(frozen=True, slots=True)
class Mark:
    """One trial of a key. `y` is None for a crash, which stands below the plot."""

    number: int
    x: float
    y: float | None
    low: float | None
    high: float | None
    kind: str
    is_alone: bool
    title: str
    is_below: bool = False  # far below the other trials: drawn at the edge


@dataclass(frozen=True, slots=True)
class Panel:
    """Tried values of one key against delta."""

    study: KeyStudy
    marks: tuple[Mark, ...]
    zero_y: float
    y_ticks: tuple[Text, ...]
    x_ticks: tuple[Text, ...]
    current_x: float | None
    crash_y: float = _PANEL_BOTTOM + 9


@dataclass(frozen=True, slots=True)
class Spark:
    """The curve of one quantity, a line a run; `low`, `high` and `last` are its values."""

    lines: tuple[tuple[Side, tuple[Point, ...]], ...]
    low: float
    high: float
    last: float
    is_thinned: bool


@dataclass(frozen=True, slots=True)
class Interval:
    """Delta with its 95 % interval; ends beyond the common scale are cut (`is_cut`)."""

    zero: float
    low: float
    high: float
    middle: float
    is_cut: bool


def panel(study: KeyStudy) -> Panel:
    """The drawing of one key."""
    place = _positions(study)
    measured = [t for t in study.trials if t.delta is not None]
    floor = _floor([100 * t.delta for t in measured if t.delta is not None])
    shown = [(100 * t.delta, 100 * (t.spread or 0.0)) for t in measured if t.delta is not None]
    ends = [delta + sign * spread for delta, spread in shown if delta >= floor for sign in (-1, 1)]
    low, high = min([*ends, 0.0]), max([*ends, 0.0])
    margin = 0.08 * (high - low) or 1.0
    low, high = low - margin, high + margin

    def y_of(value: float) -> float:
        return _PANEL_BOTTOM - (value - low) / (high - low) * (_PANEL_BOTTOM - _PANEL_TOP)

    seen: dict[str, int] = {}
    same = {value: sum(t.value == value for t in study.trials) for value in study.values}
    marks = []
    for trial in study.trials:
        seen[trial.value] = seen.get(trial.value, 0) + 1
        shift = (seen[trial.value] - (same[trial.value] + 1) / 2) * min(8.0, 36.0 / same[trial.value])
        spread = None if trial.spread is None else 100 * trial.spread
        delta = None if trial.delta is None else 100 * trial.delta
        is_below = delta is not None and delta < floor
        told = "crash" if delta is None else points(trial.delta) + (f" ± {spread:.1f}" if spread is not None else "")
        marks.append(
            Mark(
                number=trial.number,
                x=place[trial.value] + shift,
                y=None if delta is None else _PANEL_BOTTOM - 4 if is_below else y_of(delta),
                low=None if delta is None or spread is None or is_below else y_of(delta - spread),
                high=None if delta is None or spread is None or is_below else y_of(delta + spread),
                kind=str(trial.status),
                is_alone=trial.is_alone,
                title=f"{trial.number:04d} {trial.status}\n{trial.old} → {trial.value}: {told}"
                + ("" if trial.is_alone else "\ntogether with other keys"),
                is_below=is_below,
            )
        )
    current = study.current if study.current in place else None
    return Panel(
        study=study,
        marks=tuple(marks),
        zero_y=y_of(0.0),
        y_ticks=tuple(
            Text(_PANEL_LEFT - 6, y_of(v) + 3.5, f"{'+' if v > 0 else ''}{text}") for v, text in ticks(low, high, 4)
        ),
        x_ticks=tuple(_x_ticks(study, place)),
        current_x=None if current is None else place[current],
    )


def _floor(deltas: Sequence[float]) -> float:
    """In pp. A collapse below it would squeeze all other trials into a line."""
    if len(deltas) < 4:
        return -math.inf
    first, middle, third = quantiles(deltas, n=4, method="inclusive")
    return middle - 4 * max(third - first, 5.0)


def _positions(study: KeyStudy) -> dict[str, float]:
    """The x of every tried value, and of the incumbent's: a slot each where they are few, else a number line."""
    left, right = _PANEL_LEFT + 22, PANEL_WIDTH - 26
    values = study.values
    if study.current is not None and study.current not in values:
        values = sorted([*values, study.current], key=lambda v: (as_number(v) is None, as_number(v) or 0.0, v))
    numbers = {value: as_number(value) for value in values}
    known = [number for number in numbers.values() if number is not None]
    if len(values) <= _MAX_CATEGORIES or len(known) < len(values):
        step = (right - left) / max(len(values), 1)
        return {value: left + (i + 0.5) * step for i, value in enumerate(values)}
    low, high = min(known), max(known)
    is_log = low > 0 and high / low >= 10

    def share(number: float) -> float:
        if is_log:
            return math.log(number / low) / math.log(high / low)
        return (number - low) / (high - low)

    return {value: left + share(number) * (right - left) for value, number in numbers.items() if number is not None}


def _x_ticks(study: KeyStudy, place: Mapping[str, float]) -> list[Text]:
    """As many values as fit, each with room for its text; the incumbent's first, then the outermost."""
    order = sorted(place, key=lambda value: place[value])
    wanted = [v for v in (study.current, order[0], order[-1]) if v in place] + order
    placed: list[tuple[float, float, str]] = []
    for value in dict.fromkeys(v for v in wanted if v is not None):
        text = cut_short(value, 11)
        half = len(text) * 3.3 + 4
        x = min(max(place[value], half), PANEL_WIDTH - half)
        if all(x - half >= high or x + half <= low for low, high, _ in placed):
            placed.append((x - half, x + half, text))
    return [Text((low + high) / 2, PANEL_HEIGHT - 10, text) for low, high, text in placed]


def cut_short(text: str, limit: int) -> str:
    """At most `limit` characters, with an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def spark(series: Sequence[Series]) -> Spark | None:
    """The curves of one quantity on common axes; None if it was not measured."""
    everything = [point for one in series for point in one.points]
    if not everything:
        return None
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    left, width = min(xs), max(xs) - min(xs) or 1.0
    low, height = min(ys), max(ys) - min(ys)
    inner = SPARK_HEIGHT - 12

    def place(x: float, y: float) -> Point:
        level = (y - low) / height if height else 0.5
        return (x - left) / width * SPARK_WIDTH, SPARK_HEIGHT - 6 - level * inner

    candidate = next((s for s in reversed(series) if s.side is Side.CANDIDATE), series[-1])
    lines = tuple((one.side, tuple(place(x, y) for x, y in one.points)) for one in series)
    is_thinned = any(x != int(x) for x in xs) or any(len(s.points) < s.points[-1][0] for s in series)
    return Spark(lines, min(ys), max(ys), candidate.points[-1][1], is_thinned)


def interval(delta: float | None, spread: float | None, scale: float) -> Interval | None:
    """The interval of a delta on the scale -scale..+scale; None if nothing was compared."""
    if delta is None or spread is None or scale <= 0:
        return None
    zero = INTERVAL_WIDTH / 2

    def place(value: float) -> float:
        return zero + max(-1.0, min(1.0, value / scale)) * (zero - 4)

    is_cut = abs(delta) + spread > scale
    return Interval(zero, place(delta - spread), place(delta + spread), place(delta), is_cut)


def interval_scale(pairs: Sequence[tuple[float | None, float | None]]) -> float:
    """A common scale for all intervals: nine in ten fit whole."""
    ends = sorted(abs(d) + s for d, s in pairs if d is not None and s is not None)
    return ends[math.ceil(0.9 * len(ends)) - 1] if ends else 0.0


def strip(columns: Sequence[Mapping[Use, float]]) -> tuple[dict[Use, Markup], float]:
    """Stacked columns, one an experiment, as one SVG path a use (1000 units wide); and the tallest in seconds."""
    tallest = max((sum(column.values()) for column in columns), default=0.0)
    paths: dict[Use, list[str]] = {}
    if tallest > 0:
        pitch = 1000 / max(len(columns), 24)  # a few columns stay columns
        for i, column in enumerate(columns):
            y = STRIP_HEIGHT
            for use in Use:
                if seconds := column.get(use, 0.0):
                    size = seconds / tallest * STRIP_HEIGHT
                    y -= size
                    paths.setdefault(use, []).append(
                        f"M{i * pitch:.1f} {y:.1f}h{0.82 * pitch:.1f}v{size:.1f}h{-0.82 * pitch:.1f}z"
                    )
    return {use: Markup("".join(paths[use])) for use in Use if use in paths}, tallest

"""The geometry of the page's small drawings: key studies, curves of a run, intervals in the table, time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from markupsafe import Markup

from nightshift.report.chart import Dot, Point, Scale, Text, ticks
from nightshift.report.data import Experiment
from nightshift.report.keys import KeyStudy, Trial, as_number, by_value
from nightshift.report.runs import Curve
from nightshift.report.text import expected, shortened
from nightshift.report.timing import Use

Interval = tuple[float, float, float]  # low end, middle and high end
PANEL_WIDTH, PANEL_HEIGHT = 330.0, 150.0
_PANEL_LEFT, _PANEL_TOP, _PANEL_BOTTOM = 44.0, 10.0, 112.0
_MAX_CATEGORIES = 7
NUM_CHARACTERS = 11  # of a value below a panel
SPARK_WIDTH, SPARK_HEIGHT = 400.0, 88.0  # drawn at about half: coordinates are whole numbers
INTERVAL_WIDTH = 96.0
STRIP_HEIGHT = 100.0


@dataclass(frozen=True, slots=True)
class Panel:
    """Tried values of one key against delta. A dot is also `shared` where other keys changed with this one."""

    study: KeyStudy
    dots: tuple[Dot, ...]
    zero_y: float
    y_ticks: tuple[Text, ...]
    x_ticks: tuple[Text, ...]
    current_x: float


@dataclass(frozen=True, slots=True)
class Spark:
    """The curve of one quantity, a line a run; `low`, `high` and `last` are its values."""

    lines: tuple[tuple[Point, ...], ...]
    low: float
    high: float
    last: float


def panel(study: KeyStudy) -> Panel:
    """The drawing of one key."""
    place = _positions(study)
    deltas = [
        (100 * delta, 100 * (trial.experiment.delta_spread or 0.0))
        for trial in study.trials
        if (delta := trial.experiment.delta) is not None
    ]
    floor = _floor([delta for delta, _ in deltas])
    ends = [0.0, *(delta + sign * spread for delta, spread in deltas if delta >= floor for sign in (-1, 1))]
    margin = 0.08 * (max(ends) - min(ends)) or 1.0
    low, high = min(ends) - margin, max(ends) + margin

    def y_of(value: float) -> float:
        return _PANEL_BOTTOM - (value - low) / (high - low) * (_PANEL_BOTTOM - _PANEL_TOP)

    seen, same = Counter[str](), Counter(trial.value for trial in study.trials)
    dots = []
    for trial in study.trials:
        seen[trial.value] += 1
        shift = (seen[trial.value] - (same[trial.value] + 1) / 2) * min(8.0, 36.0 / same[trial.value])
        dots.append(_dot(trial, place[trial.value] + shift, floor, y_of))
    return Panel(
        study=study,
        dots=tuple(dots),
        zero_y=y_of(0.0),
        y_ticks=tuple(
            Text(_PANEL_LEFT - 6, y_of(v) + 3.5, f"{'+' if v > 0 else ''}{text}") for v, text in ticks(low, high, 4)
        ),
        x_ticks=tuple(_x_ticks(study, place)),
        current_x=place[study.current],
    )


def _dot(trial: Trial, x: float, floor: float, y_of: Scale) -> Dot:
    """Of one trial; a crash stands below the plot, what lies below `floor` (pp) at its edge."""
    e, is_alone = trial.experiment, len(trial.experiment.changes) == 1
    told = "crash" if e.delta is None else expected(e)
    title = f"{e.number:04d} {e.record.status}\n{trial.old} → {trial.value}: {told}"
    title += "" if is_alone else "\ntogether with other keys"
    if e.delta is None:
        return Dot(e.number, x, _PANEL_BOTTOM + 9, "crash", title)
    kind = e.record.status if is_alone else f"{e.record.status} shared"
    if 100 * e.delta < floor:
        return Dot(e.number, x, _PANEL_BOTTOM - 4, kind, title, is_below=True)
    ends = (None, None) if e.delta_spread is None else (e.delta - e.delta_spread, e.delta + e.delta_spread)
    low, high = (None if end is None else y_of(100 * end) for end in ends)
    return Dot(e.number, x, y_of(100 * e.delta), kind, title, low, high)


def _floor(deltas: Sequence[float]) -> float:
    """In pp. A collapse below it would squeeze all other trials into a line."""
    if len(deltas) < 4:
        return -math.inf
    first, middle, third = quantiles(deltas, n=4, method="inclusive")
    return middle - 4 * max(third - first, 5.0)


def _positions(study: KeyStudy) -> dict[str, float]:
    """The x of every tried value, and of the incumbent's: a slot each where they are few, else a number line."""
    left, right = _PANEL_LEFT + 22, PANEL_WIDTH - 26
    values = sorted({study.current, *(trial.value for trial in study.trials)}, key=by_value)
    numbers = {value: as_number(value) for value in values}
    known = [number for number in numbers.values() if number is not None]
    if len(values) <= _MAX_CATEGORIES or len(known) < len(values):
        step = (right - left) / max(len(values), 1)
        return {value: left + (i + 0.5) * step for i, value in enumerate(values)}
    scale = math.log if min(known) > 0 and max(known) / min(known) >= 10 else float
    low, width = scale(min(known)), scale(max(known)) - scale(min(known)) or 1.0
    shares = {value: (scale(number) - low) / width for value, number in numbers.items() if number is not None}
    return {value: left + share * (right - left) for value, share in shares.items()}


def _x_ticks(study: KeyStudy, place: Mapping[str, float]) -> list[Text]:
    """As many values as fit, each with room for its text; the incumbent's first, then the outermost."""
    order = sorted(place, key=lambda value: place[value])
    placed: list[tuple[float, float, str]] = []
    for value in dict.fromkeys((study.current, order[0], order[-1], *order)):
        text = shortened(value, NUM_CHARACTERS)
        half = len(text) * 3.3 + 4
        x = min(max(place[value], half), PANEL_WIDTH - half)
        if all(x - half >= high or x + half <= low for low, high, _ in placed):
            placed.append((x - half, x + half, text))
    return [Text((low + high) / 2, PANEL_HEIGHT - 10, text) for low, high, text in placed]


def spark(curves: Sequence[Curve]) -> Spark | None:
    """The curves of one quantity on common axes; None if it was not measured."""
    measured = [curve for curve in curves if curve]
    if not measured:
        return None
    xs, ys = zip(*(point for curve in measured for point in curve), strict=True)
    left, width = min(xs), max(xs) - min(xs) or 1.0
    low, height = min(ys), max(ys) - min(ys)
    inner = SPARK_HEIGHT - 12

    def place(x: float, y: float) -> Point:
        level = (y - low) / height if height else 0.5
        return (x - left) / width * SPARK_WIDTH, SPARK_HEIGHT - 6 - level * inner

    lines = tuple(tuple(place(x, y) for x, y in curve) for curve in measured)
    return Spark(lines, min(ys), max(ys), measured[-1][-1][1])


def interval(e: Experiment, scale: float) -> Interval | None:
    """Delta with its 95 % interval on the scale -scale..+scale, cut there; None if nothing was compared."""
    if e.delta is None or e.delta_spread is None or scale <= 0:
        return None
    half = INTERVAL_WIDTH / 2
    shares = (max(-1.0, min(1.0, (e.delta + sign * e.delta_spread) / scale)) for sign in (-1, 0, 1))
    low, middle, high = (half + share * (half - 4) for share in shares)
    return low, middle, high


def interval_scale(experiments: Sequence[Experiment]) -> float:
    """A common scale for all intervals: nine in ten fit whole."""
    pairs = ((e.delta, e.delta_spread) for e in experiments)
    ends = sorted(abs(d) + s for d, s in pairs if d is not None and s is not None)
    return ends[math.ceil(0.9 * len(ends)) - 1] if ends else 0.0


def strip(columns: Sequence[Mapping[Use, float]]) -> tuple[dict[Use, Markup], float]:
    """Stacked columns (see timing.total) as one SVG path a use, 1000 units wide; and the tallest in seconds."""
    tallest = max((sum(column.values()) for column in columns), default=0.0)
    pitch = 1000 / max(len(columns), 24)  # a few columns stay columns
    paths = defaultdict[Use, list[str]](list)
    for i, column in enumerate(columns):
        y = STRIP_HEIGHT
        for use, seconds in column.items():
            size = seconds / tallest * STRIP_HEIGHT
            y -= size
            paths[use].append(f"M{i * pitch:.1f} {y:.1f}h{0.82 * pitch:.1f}v{size:.1f}h{-0.82 * pitch:.1f}z")
    return {use: Markup("".join(paths[use])) for use in Use if use in paths}, tallest

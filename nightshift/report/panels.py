"""The geometry of the small drawings of what was learnt about each key."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from nightshift.report.chart import Axis, Dot, Text
from nightshift.report.data import Experiment
from nightshift.report.text import expected, half
from nightshift.train_toml.config import Change
from nightshift.train_toml.values import shorten

PANEL_WIDTH, PANEL_HEIGHT = 330.0, 150.0
_PANEL_LEFT, _PANEL_TOP, _PANEL_BOTTOM = 44.0, 10.0, 112.0
_NUM_CHARACTERS = 11  # of a value below a panel

Trial = tuple[Experiment, Change]


@dataclass(frozen=True, slots=True)
class Panel:
    """Tried values of one key against what is expected of them. A dot is also `shared` where other keys changed
    with this one.

    `current_x` is where the incumbent's value stands; the first of `x_ticks` is its text.
    """

    key: str
    dots: tuple[Dot, ...]
    zero_y: float
    y_ticks: tuple[Text, ...]
    x_ticks: tuple[Text, ...]
    current_x: float


def key_panels(experiments: Sequence[Experiment]) -> list[Panel]:
    """One for each changed key, those tried most first. Experiments without a verdict say nothing."""
    trials: dict[str, list[Trial]] = defaultdict(list)
    current: dict[str, str] = {}
    for e in experiments:
        for change in e.changes if e.expected is not None or e.is_crash else ():
            trials[change.key].append((e, change))
            current.setdefault(change.key, change.old or "unset")  # before the first trial the incumbent had it
            if e.is_standing:
                current[change.key] = change.new or "unset"
    order = sorted(trials, key=lambda key: (-len(trials[key]), key))
    return [_panel(key, trials[key], current[key]) for key in order]


def _panel(key: str, trials: Sequence[Trial], current: str) -> Panel:
    values = [change.new or "unset" for _, change in trials]
    place = _positions({current, *values})
    gains = [(100 * e.expected.mean, 100 * half(e.expected.stderr)) for e, _ in trials if e.expected is not None]
    floor = lowest_shown([gain for gain, _ in gains])
    ends = [0.0, *(gain + sign * spread for gain, spread in gains if gain >= floor for sign in (-1, 1))]
    margin = 0.08 * (max(ends) - min(ends)) or 1.0
    axis = Axis(min(ends) - margin, max(ends) + margin, _PANEL_TOP, _PANEL_BOTTOM)
    seen, same = Counter[str](), Counter(values)
    dots = []
    for trial, value in zip(trials, values, strict=True):
        seen[value] += 1
        shift = (seen[value] - (same[value] + 1) / 2) * min(8.0, 36.0 / same[value])
        dots.append(_dot(trial, place[value] + shift, axis))
    return Panel(
        key=key,
        dots=tuple(dots),
        zero_y=axis.y(0.0),
        y_ticks=tuple(Text(_PANEL_LEFT - 6, y + 3.5, text) for y, text in axis.ticks(4)),
        x_ticks=tuple(_x_ticks(place, current)),
        current_x=place[current],
    )


def _dot(trial: Trial, x: float, axis: Axis) -> Dot:
    e, change = trial
    is_alone = len(e.changes) == 1 and not e.beside
    told = expected(e.expected) if e.expected else "crash"
    title = f"{e.number:04d} {e.record.status}\n{change.old or 'unset'} → {change.new or 'unset'}: {told}"
    title += "" if is_alone else "\ntogether with other keys or ideas"
    kind = e.record.status if is_alone else f"{e.record.status} shared"
    gain, spread = (100 * e.expected.mean, 100 * half(e.expected.stderr)) if e.expected else (None, None)
    return axis.dot(e, kind, title, x, gain, spread, crash_y=_PANEL_BOTTOM + 9)


def lowest_shown(gains: Sequence[float]) -> float:
    """In pp. A collapse below it would squeeze all other trials into a line."""
    if len(gains) < 4:
        return -math.inf
    first, middle, third = quantiles(gains, n=4, method="inclusive")
    return middle - 4 * max(third - first, 5.0)


def _positions(values: set[str]) -> dict[str, float]:
    """The x of every value: numbers in their order, then texts, at equal distances."""

    def rank(value: str) -> tuple[bool, float, str]:
        try:
            return False, float(value), value
        except ValueError:
            return True, 0.0, value

    left, right = _PANEL_LEFT + 22, PANEL_WIDTH - 26
    step = (right - left) / len(values)
    return {value: left + (i + 0.5) * step for i, value in enumerate(sorted(values, key=rank))}


def _x_ticks(place: Mapping[str, float], current: str) -> list[Text]:
    """As many values as fit, each with room for its text; the incumbent's first, then the outermost."""
    order = list(place)
    placed: list[tuple[float, float, str]] = []
    for value in dict.fromkeys((current, order[0], order[-1], *order)):
        text = shorten(value, _NUM_CHARACTERS)
        half = len(text) * 3.3 + 4
        x = min(max(place[value], half), PANEL_WIDTH - half)
        if all(x - half >= high or x + half <= low for low, high, _ in placed):
            placed.append((x - half, x + half, text))
    return [Text((low + high) / 2, PANEL_HEIGHT - 10, text) for low, high, text in placed]

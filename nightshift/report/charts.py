"""The geometry of the page's charts: where every dot, line and label of a drawing is, which scales as a whole.

Coordinates are units of its viewBox: x from the left of the drawing, y downwards from the top of the plot. The labels
are above it, at negative y. Nothing here draws.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from statistics import quantiles

from nightshift.campaign import records
from nightshift.campaign.commits import short_key
from nightshift.campaign.records import Z95, Standing
from nightshift.config.allowlist import shorten
from nightshift.config.train_toml import Change
from nightshift.report.data import Experiment
from nightshift.report.text import brief, effect, half, incumbent_score, score

PANEL_WIDTH, PANEL_HEIGHT = 330.0, 150.0
_PANEL_LEFT, _PANEL_TOP, _PANEL_BOTTOM = 44.0, 10.0, 112.0
_NUM_CHARACTERS = 11  # of a value below a panel

Trial = tuple[Experiment, Change]


@dataclass(frozen=True, slots=True)
class Panel:
    """Tried values of one key against the effects of their changes. A dot is also `shared` where other keys changed
    with this one.

    `current_x` is where the incumbent's value stands; the first of `x_ticks` is its text.
    """

    key: str
    dots: tuple[Dot, ...]
    zero_y: float
    y_ticks: tuple[Text, ...]
    x_ticks: tuple[Text, ...]
    current_x: float


def key_panels(experiments: Sequence[Experiment], kept: Sequence[records.Change] = ()) -> list[Panel]:
    """One for each changed key, those of the largest effects first. Experiments without a verdict say nothing. `kept`:
    the incumbent's changes in the order of adoption."""
    trials: dict[str, list[Trial]] = defaultdict(list)
    current: dict[str, str] = {}
    for e in experiments:
        for change in e.changes if e.effect is not None or e.is_crash else ():
            trials[change.key].append((e, change))
            current.setdefault(change.key, change.old or "unset")  # before the first trial the incumbent had it
    for each in kept:
        current |= {key: value or "unset" for key, value in each.keys.items()}
    largest = {key: max(abs(e.effect.mean) if e.effect else 0.0 for e, _ in trials[key]) for key in trials}
    order = sorted(trials, key=lambda key: (-largest[key], -len(trials[key]), key))
    return [_panel(key, trials[key], current[key]) for key in order]


def _panel(key: str, trials: Sequence[Trial], current: str) -> Panel:
    values = [change.new or "unset" for _, change in trials]
    place = _positions({current, *values})
    gains = [(100 * e.effect.mean, 100 * half(e.effect.sd)) for e, _ in trials if e.effect is not None]
    floor = lowest_shown([gain for gain, _ in gains], 5.0)
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
        x_ticks=tuple(_panel_ticks(place, current)),
        current_x=place[current],
    )


def _dot(trial: Trial, x: float, axis: Axis) -> Dot:
    e, change = trial
    is_alone = len(e.changes) == 1
    told = effect(e.effect) if e.effect else "crash"
    title = f"{e.number:04d} {e.row.status}\n{change.old or 'unset'} → {change.new or 'unset'}: {told}"
    title += "" if is_alone else "\ntogether with other keys"
    kind = e.verdict if is_alone else f"{e.verdict} shared"
    gain, spread = (100 * e.effect.mean, 100 * half(e.effect.sd)) if e.effect else (None, None)
    return axis.dot(e, kind, title, x, gain, spread, crash_y=_PANEL_BOTTOM + 9)


def lowest_shown(values: Sequence[float], least: float) -> float:
    """A collapse below it would squeeze all other values into a line. `least`: of the distance of the quartiles."""
    if len(values) < 4:
        return -math.inf
    first, middle, third = quantiles(values, n=4, method="inclusive")
    return middle - 4 * max(third - first, least)


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


def _panel_ticks(place: Mapping[str, float], current: str) -> list[Text]:
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


LABEL_SIZE = 11  # of the monospaced labels
CHARACTER_WIDTH = 0.62 * LABEL_SIZE  # the widest common monospaced fonts take 0.602
LABEL_HEIGHT = 17
LABEL_GAP = 3.0  # from a leader to its text
_MAX_LABEL = 34  # characters
_CRASH_HEIGHT, _MANY = 22, 300
_AXIS_HEIGHT = 34

WIDTH, LEFT, RIGHT = 880.0, 46.0, 744.0  # of the drawing, and where its plot begins and ends
_HEIGHT = 300.0  # of the plot
_MAX_LEVELS, _MAX_LABELS = 8, 20

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Dot:
    """One experiment. `low` and `high` are the ends of its error bar; None without one."""

    number: int
    x: float
    y: float
    kind: str  # baseline | keep | left | discard | re-run | crash
    title: str
    low: float | None = None
    high: float | None = None
    is_below: bool = False  # it lies below the axis: drawn at the edge


@dataclass(frozen=True, slots=True)
class Label:
    """The flag of a dot: a leader line goes up from it to a level (0 is next to the plot), where `text` begins."""

    dot: Dot
    level: int
    text: str

    @property
    def x(self) -> float:
        return self.dot.x + LABEL_GAP

    @property
    def y(self) -> float:
        return -12.0 - self.level * LABEL_HEIGHT


@dataclass(frozen=True, slots=True)
class Text:
    """A text with its baseline at `y`."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """The vertical axis of a plot from `low` at the pixel `bottom` to `high` at the pixel `top`."""

    low: float
    high: float
    top: float
    bottom: float

    def y(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)

    def dot(
        self, e: Experiment, kind: str, title: str, x: float, value: float | None, spread: float | None, crash_y: float
    ) -> Dot:
        """The dot of one experiment: at `crash_y` without a value, at the edge where it lies below the axis."""
        if value is None:
            return Dot(e.number, x, crash_y, "crash" if e.is_crash else kind, title)
        if value < self.low:
            return Dot(e.number, x, self.bottom - 5, kind, title, is_below=True)
        if spread is None:
            return Dot(e.number, x, self.y(value), kind, title)
        low, high = (min(max(self.y(end), self.top), self.bottom) for end in (value - spread, value + spread))
        return Dot(e.number, x, self.y(value), kind, title, low, high)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Round values on the axis, at most `most`, as (y, text), with equal numbers of decimals."""
        span = self.high - self.low
        power = math.floor(math.log10(span / most))
        step = next(f * 10.0**power for f in (1, 2, 2.5, 5, 10, 20) if span / (f * 10.0**power) <= most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        decimals = next(d for d in range(12) if abs(round(step, d) - step) < 1e-9 * step or d == 11)
        values = [i * step + 0.0 for i in range(first, last + 1)]  # + 0.0: no minus zero
        return [(self.y(value), f"{value:.{decimals}f}".replace("-", "\N{MINUS SIGN}")) for value in values]


@dataclass(frozen=True, slots=True)
class Chart:
    top: float  # of the drawing: 0 is that of the plot
    height: float
    radius: float
    dots: tuple[Dot, ...]
    incumbent: tuple[Point, ...]  # the step line
    band: tuple[Point, ...]  # its 95 % band as a polygon
    baseline_y: float | None
    unscored: Text | None  # the label of the row below the plot; None without a crash
    ends: tuple[Text, ...]  # what the lines come to
    labels: tuple[Label, ...]
    num_unlabelled: int
    y_ticks: tuple[Text, ...]
    x_ticks: tuple[Text, ...]


def progress_chart(experiments: Sequence[Experiment], standing: Standing | None) -> Chart | None:
    """The chart of all experiments with a verdict; None if none was measured. `standing`: of now."""
    shown = [e for e in experiments if e.is_crash or e.has_score]
    if not any(e.has_score for e in shown):
        return None
    pitch = (RIGHT - LEFT) / len(shown)
    xs = [LEFT + (i + 0.5) * pitch for i in range(len(shown))]
    axis = Axis(*_range(shown, standing), top=0.0, bottom=_HEIGHT)
    crash_y = axis.bottom + _CRASH_HEIGHT / 2 + 2
    dots = [
        axis.dot(e, e.kind, _title(e, len(shown)), x, None if e.is_crash else e.record.score, e.spread, crash_y)
        for e, x in zip(shown, xs, strict=True)
    ]
    has_crash = any(e.is_crash for e in shown)
    kept = [(e, dot) for e, dot in zip(shown, dots, strict=True) if e.row.now == "kept"]
    labels = _labels(kept)
    line, band = _steps([(x, e.standing) for e, x in zip(shown, xs, strict=True)] + [(RIGHT, standing)], axis)
    top = min((label.y for label in labels), default=0.0) - 20
    bottom = axis.bottom + _CRASH_HEIGHT * has_crash + _AXIS_HEIGHT
    return Chart(
        top=top,
        height=bottom - top,
        radius=min(max(0.36 * pitch, 1.5), 4.5),
        dots=tuple(dots),
        incumbent=tuple(line),
        band=tuple(band),
        baseline_y=axis.y(standing.baseline) if standing else None,
        unscored=Text(LEFT - 8, crash_y + 4, "crash") if has_crash else None,
        ends=_ends(standing, axis) if standing else (),
        labels=tuple(labels),
        num_unlabelled=len(kept) - len(labels),
        y_ticks=tuple(Text(LEFT - 8, y + 4, text) for y, text in axis.ticks(6)),
        x_ticks=tuple(_x_ticks(shown, xs, bottom - 14)),
    )


def _range(shown: Sequence[Experiment], now: Standing | None) -> Point:
    """The scores that the axis spans: the estimates, and all scores but those that lie far below."""
    scores = [e.record.score for e in shown if not e.is_crash and e.record.score is not None]
    floor = lowest_shown(scores, 0.05)
    ends = [score for score in scores if score >= floor]
    for standing in filter(None, (*(e.standing for e in shown), now)):
        spread = Z95 * standing.incumbent_sd
        ends += [standing.incumbent - spread, standing.incumbent + spread, standing.baseline]
    margin = 0.04 * max(max(ends) - min(ends), 0.01)
    return min(ends) - margin, max(ends) + margin


def _title(e: Experiment, num_shown: int) -> str:
    """What hovering shows; of hundreds less, for the table says the rest."""
    parts = [f"{e.number:04d} {e.row.status}"]
    if e.record.score is not None:
        parts.append(f"score {score(e.record.score)}" + (f" ± {e.spread:.3f}" if e.spread is not None else ""))
    if e.effect is not None:
        parts.append(f"effect {effect(e.effect)}")
    return "\n".join([*parts, brief(e.record.proposal.description, 80)] if num_shown <= _MANY else parts)


def _steps(standings: Sequence[tuple[float, Standing | None]], axis: Axis) -> tuple[list[Point], list[Point]]:
    """The incumbent's posterior mean as a step line, and its 95 % band as a closed polygon."""
    line, upper, lower = list[Point](), list[Point](), list[Point]()
    known = [(x, standing) for x, standing in standings if standing]
    for (x, standing), end in zip(known, [*(x for x, _ in known[1:]), RIGHT], strict=False):
        half = Z95 * standing.incumbent_sd
        for points, value in ((line, 0.0), (upper, half), (lower, -half)):
            y = axis.y(standing.incumbent + value)
            points += [(x, y), (end, y)]
    return line, [*upper, *reversed(lower)]


def _ends(standing: Standing, axis: Axis) -> tuple[Text, ...]:
    """The values of both lines beside their right ends, moved apart where they are close."""
    x, incumbent, baseline = RIGHT + 8, axis.y(standing.incumbent), axis.y(standing.baseline)
    below = Text(x, baseline + 4, f"baseline {score(standing.baseline)}")
    if incumbent == baseline:
        return (below,)
    shift = math.copysign(max(15 - abs(incumbent - baseline), 0.0) / 2, incumbent - baseline)
    above = Text(x, incumbent + shift + 4, f"incumbent {incumbent_score(standing)}")
    return above, replace(below, y=below.y - shift)


def _labels(kept: Sequence[tuple[Experiment, Dot]]) -> list[Label]:
    telling = nlargest(_MAX_LABELS, kept, key=lambda each: abs(each[0].effect.mean) if each[0].effect else 0.0)
    return place([(dot, _texts(e)) for e, dot in sorted(telling, key=lambda each: each[1].x)])


def _texts(e: Experiment) -> list[str]:
    """What a label may say, from best to shortest. Its key has the name that commit subjects give it."""
    number = f"{e.number:04d}"
    if not e.changes:
        return [number]
    first, *more = e.changes
    suffix = f" +{len(more)}" if more else ""
    text = f"{number} {short_key(first.key)} {first.old or 'unset'}→{first.new or 'unset'}"
    return [shorten(text, _MAX_LABEL - len(suffix)) + suffix, number]


def place(flags: Sequence[tuple[Dot, Sequence[str]]]) -> list[Label]:
    """A label for each of the dots, from left to right, with the first of its texts for which there is room.

    A text begins at its own leader line, so that it covers leaders and texts to its right only: it stands above all of
    these. A dot for which no text fits into width and levels has no label.
    """
    labels: list[Label] = []
    for dot, texts in reversed(flags):
        for text in texts:
            end = dot.x + LABEL_GAP + len(text) * CHARACTER_WIDTH
            level = 1 + max((label.level for label in labels if label.dot.x <= end + LABEL_GAP), default=-1)
            if end <= WIDTH and level < _MAX_LEVELS:
                labels.append(Label(dot, level, text))
                break
    return labels[::-1]


def _x_ticks(shown: Sequence[Experiment], xs: Sequence[float], y: float) -> list[Text]:
    sizes = (factor * 10**power for power in range(7) for factor in (1, 2, 5))
    every = next(size for size in sizes if len(shown) / size <= 15)
    labelled = [(x, e.number) for e, x in zip(shown, xs, strict=True) if e.number % every == 0]
    return [Text(x, y, str(number)) for x, number in labelled or [(xs[0], shown[0].number)]]

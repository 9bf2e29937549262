"""The geometry of the progress chart: where every dot, line and label of the page and of progress.png stands.

Coordinates are pixels of a drawing `width` x `height`, y downwards. Nothing here draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from nightshift.records import Verdict
from nightshift.report.data import MEASURED, Z95, Experiment
from nightshift.report.keys import short_names
from nightshift.report.labels import Flag, Placed, place
from nightshift.report.text import cut, expected, score, shortened, verdict

LABEL_SIZE = 11  # of the monospaced labels
CHARACTER_WIDTH = 0.62 * LABEL_SIZE  # the widest common monospaced fonts take 0.602
LABEL_HEIGHT = 17
_MAX_LABEL = 34  # characters
_MANY = 300  # experiments
_CRASH_HEIGHT = 22
_AXIS_HEIGHT = 34

Point = tuple[float, float]
Scale = Callable[[float], float]  # from a score to a y


@dataclass(frozen=True, slots=True)
class Size:
    """One layout: the drawing's width, the plot's margins and height, and how many labels it bears."""

    name: str
    width: float
    left: float
    right: float
    plot_height: float
    max_levels: int
    max_labels: int


SIZES = (
    Size("wide", 1080, 46, 136, 330, 8, 24),
    Size("medium", 720, 42, 136, 300, 8, 16),
    Size("narrow", 356, 36, 8, 230, 9, 12),
)


@dataclass(frozen=True, slots=True)
class Dot:
    """One experiment. `low` and `high` are the ends of its error bar; None without one."""

    number: int
    x: float
    y: float
    kind: str  # baseline | keep | back | discard | crash
    title: str
    low: float | None = None
    high: float | None = None
    is_below: bool = False  # it lies below the axis: drawn at the edge


@dataclass(frozen=True, slots=True)
class Text:
    """A text with its baseline at `y`."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """The progress chart in one layout."""

    size: Size
    height: float
    top: float  # of the plot
    radius: float
    dots: tuple[Dot, ...]
    incumbent: tuple[Point, ...]  # the step line
    band: tuple[Point, ...]  # its 95 % band as a polygon
    baseline_y: float | None
    crash_y: float | None  # of the crashes, below the plot; None without one
    ends: tuple[Text, ...]  # what the lines come to
    labels: tuple[Placed, ...]
    num_unlabelled: int
    y_ticks: tuple[Text, ...]
    x_ticks: tuple[Text, ...]

    @property
    def plot_right(self) -> float:
        """The right edge of the plot."""
        return self.size.width - self.size.right

    def label_y(self, label: Placed) -> float:
        """The baseline of a label's text."""
        return self.top - 12 - label.level * LABEL_HEIGHT

    def dot_of(self, number: int) -> Dot:
        """The dot of one experiment."""
        return next(dot for dot in self.dots if dot.number == number)


def progress_chart(experiments: Sequence[Experiment], size: Size) -> Chart | None:
    """The chart of all experiments with a verdict; None if none was measured."""
    shown = [e for e in experiments if e.is_crash or (e.record.status in MEASURED and e.score is not None)]
    if all(e.is_crash for e in shown):
        return None
    plot_width = size.width - size.left - size.right
    pitch = plot_width / len(shown)
    xs = [size.left + (i + 0.5) * pitch for i in range(len(shown))]
    flags = _flags([(e, x) for e, x in zip(shown, xs, strict=True) if e.is_kept and e.is_standing])
    labels = place(flags, size.width, CHARACTER_WIDTH, size.max_levels, size.max_labels)
    top = 14.0 + LABEL_HEIGHT * (1 + max((label.level for label in labels), default=-1)) + 6 * bool(labels)
    bottom = top + size.plot_height
    low, high = _range(shown)

    def y_of(value: float) -> float:
        return bottom - (value - low) / (high - low) * size.plot_height

    titles = [_title(e, len(shown)) if size.name != "narrow" else "" for e in shown]
    dots = [_dot(e, x, y_of, top, bottom, title) for e, x, title in zip(shown, xs, titles, strict=True)]
    crash_y = next((dot.y for dot in dots if dot.kind == "crash"), None)
    line, band = _steps(shown, xs, size.width - size.right, y_of)
    standing = next((e.standing for e in reversed(shown) if e.standing), None)
    height = bottom + (0 if crash_y is None else _CRASH_HEIGHT) + _AXIS_HEIGHT
    return Chart(
        size=size,
        height=height,
        top=top,
        radius=min(max(0.36 * pitch, 1.5), 4.5),
        dots=tuple(dots),
        incumbent=tuple(line),
        band=tuple(band),
        baseline_y=y_of(standing.baseline) if standing else None,
        crash_y=crash_y,
        ends=_ends(standing.baseline, standing.incumbent, y_of, size) if standing else (),
        labels=tuple(labels),
        num_unlabelled=len(flags) - len(labels),
        y_ticks=tuple(Text(size.left - 8, y_of(value) + 4, text) for value, text in ticks(low, high, 6)),
        x_ticks=tuple(_x_ticks(shown, xs, height - 14, int(plot_width / 46))),
    )


def _range(shown: Sequence[Experiment]) -> Point:
    """The scores that the axis spans: the beliefs and the keeps whole, the rest unless it lies far below."""
    core: list[float] = []
    for e in shown:
        if e.standing:
            spread = Z95 * e.standing.incumbent_sd
            core += [e.standing.incumbent - spread, e.standing.incumbent + spread, e.standing.baseline]
        if e.score is not None and e.record.status == Verdict.KEEP:
            core += [e.score - (e.spread or 0.0), e.score + (e.spread or 0.0)]
    scores = [e.score for e in shown if not e.is_crash and e.score is not None]
    core = core or scores
    spreads = [e.spread for e in shown if e.spread is not None]
    span = max(max(core) - min(core), 4 * median(spreads) if spreads else 0.0, 0.01)
    near = [s for s in scores if min(core) - span <= s <= max(core) + span]
    low, high = min([*core, *near]), max([*core, *scores])
    margin = 0.04 * max(high - low, 0.01)
    return low - margin, high + margin


def _dot(e: Experiment, x: float, y_of: Scale, top: float, bottom: float, title: str) -> Dot:
    if e.is_crash or e.score is None:
        return Dot(e.number, x, bottom + _CRASH_HEIGHT / 2 + 2, e.kind, title)
    y = y_of(e.score)
    if y > bottom:
        return Dot(e.number, x, bottom - 5, e.kind, title, is_below=True)
    ends = (None, None) if e.spread is None else (y_of(e.score - e.spread), y_of(e.score + e.spread))
    low, high = (None if end is None else min(max(end, top), bottom) for end in ends)
    return Dot(e.number, x, y, e.kind, title, low, high)


def _title(e: Experiment, count: int) -> str:
    """What hovering shows; without the description where there are many."""
    parts = [f"{e.number:04d} {verdict(e)}"]
    if e.score is not None:
        parts.append(f"score {score(e.score)}" + (f" ± {e.spread:.3f}" if e.spread is not None else ""))
    if e.delta is not None:
        parts.append(f"expected {expected(e)} over the incumbent")
    if e.is_crash and e.record.judgement:
        parts.append(cut(e.record.judgement.why, 120))
    if count <= _MANY:
        parts.append(cut(e.record.description, 160))
    return "\n".join(parts)


def _steps(
    shown: Sequence[Experiment], xs: Sequence[float], right: float, y_of: Scale
) -> tuple[list[Point], list[Point]]:
    """The incumbent's posterior mean as a step line, and its 95 % band as a closed polygon."""
    line, upper, lower = list[Point](), list[Point](), list[Point]()
    known = [(x, e.standing) for e, x in zip(shown, xs, strict=True) if e.standing]
    for (x, standing), end in zip(known, [*(x for x, _ in known[1:]), right], strict=False):
        half = Z95 * standing.incumbent_sd
        for points, value in ((line, 0.0), (upper, half), (lower, -half)):
            y = y_of(standing.incumbent + value)
            points += [(x, y), (end, y)]
    return line, [*upper, *reversed(lower)]


def _ends(baseline: float, incumbent: float, y_of: Scale, size: Size) -> tuple[Text, ...]:
    if size.name == "narrow":
        return ()
    x = size.width - size.right + 8
    high, low = y_of(incumbent), y_of(baseline)
    if abs(high - low) < 15:
        if baseline == incumbent:
            return (Text(x, high + 4, f"baseline {score(baseline)}"),)
        middle, sign = (high + low) / 2, 1 if high <= low else -1
        high, low = middle - 7.5 * sign, middle + 7.5 * sign
    return (Text(x, high + 4, f"incumbent {score(incumbent)}"), Text(x, low + 4, f"baseline {score(baseline)}"))


def _flags(kept: Sequence[tuple[Experiment, float]]) -> list[Flag]:
    names = short_names(change.key for e, _ in kept for change in e.changes)
    flags = []
    for e, x in kept:
        number = f"{e.number:04d}"
        texts = [number]
        if e.changes:
            first, more = e.changes[0], len(e.changes) - 1
            told = f"{names[first.key]} {first.old or 'unset'}→{first.new or 'unset'}"
            suffix = f" +{more}" if more else ""
            full = shortened(f"{number} {told}", _MAX_LABEL - len(suffix)) + suffix
            brief = shortened(f"{number} {names[first.key]}", 18 - len(suffix)) + suffix
            texts = list(dict.fromkeys([full, brief, number]))
        flags.append(Flag(e.number, x, tuple(texts), abs(e.delta or 0.0)))
    return flags


def _x_ticks(shown: Sequence[Experiment], xs: Sequence[float], y: float, most: int) -> list[Text]:
    sizes = (factor * 10**power for power in range(7) for factor in (1, 2, 5))
    every = next(size for size in sizes if len(shown) / size <= most)
    labelled = [(x, e.number) for e, x in zip(shown, xs, strict=True) if e.number % every == 0]
    return [Text(x, y, str(number)) for x, number in labelled or [(xs[0], shown[0].number)]]


def ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Round values between low and high, at most `most`, with equal numbers of decimals."""
    span = high - low
    power = math.floor(math.log10(span / most))
    step = next(f * 10.0**power for f in (1, 2, 2.5, 5, 10, 20) if span / (f * 10.0**power) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [i * step + 0.0 for i in range(first, last + 1)]  # + 0.0: no minus zero
    decimals = next(d for d in range(12) if abs(round(step, d) - step) < 1e-9 * step or d == 11)
    return [(value, f"{value:.{decimals}f}".replace("-", "\N{MINUS SIGN}")) for value in values]

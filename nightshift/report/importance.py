"""Which keys matter: the effects of the changes that set them, as believed now, with 95 % intervals."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.records import Change, Effect
from nightshift.config.allowlist import BY_PRESET
from nightshift.config.train_toml import Config
from nightshift.config.values import Value, shorten, value_text
from nightshift.report.charts import SIZES, Point, Size, Text, lowest_shown
from nightshift.report.data import Experiment
from nightshift.report.text import effect, half, verdict

_MAX_AXES = 8
_MIN_LOG = 8.0  # times the least value that the largest is, where an axis is logarithmic
_TOP, _PITCH, _SIDE = 30.0, 62.0, 34.0
_UNSET = 0.14  # share of a numeric axis, at its left, for experiments that leave the key unset
_CHARACTER = 6.2  # pixels of a tick's text
_APART = 7.0  # pixels over which lines of the same value are spread


Settings = Mapping[str, Value | None]  # by key; None: unset


def settings(configs: Mapping[int, Config]) -> dict[int, Settings]:
    """By experiment; one without a config has its row all the same, and is compared without its settings."""
    keys = list(dict.fromkeys(key for config in configs.values() for key in config.values))
    return {
        number: {key: (config.values if key in BY_PRESET else config.resolved).get(key) for key in keys}
        for number, config in configs.items()
    }


def spelled(value: Value | None) -> str:
    """As train.toml writes it."""
    return "unset" if value is None else value_text(value)


@dataclass(frozen=True, slots=True)
class Scale:
    """The axis of one key at `y`; `kind` is log, linear or choice."""

    key: str
    y: float
    kind: str
    ticks: tuple[Text, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One experiment; `kind`: good or bad by the effect of its change, crash, or none without a change."""

    number: int
    kind: str
    strength: float  # 0..1 of the largest differences
    points: tuple[Point, ...]
    title: str


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The drawing in one layout."""

    size: Size
    height: float
    scales: tuple[Scale, ...]
    lines: tuple[Line, ...]


def coordinates(experiments: Sequence[Experiment], settings: Mapping[int, Settings]) -> list[Coordinates]:
    """In every layout, of the experiments with known settings; none where fewer than two keys were tried."""
    tried = Counter(change.key for e in experiments for change in e.changes)
    known = next(iter(settings.values()), {})
    keys = [key for key, _ in sorted(tried.items(), key=lambda one: (-one[1], one[0])) if key in known][:_MAX_AXES]
    shown = [e for e in experiments if e.number in settings and e.record.judgement is not None]
    if len(keys) < 2 or len(shown) < 2:
        return []
    return [_drawing(shown, settings, keys, size) for size in SIZES]


def _drawing(
    shown: Sequence[Experiment], settings: Mapping[int, Settings], keys: Sequence[str], size: Size
) -> Coordinates:
    scales, paths = list[Scale](), {e.number: list[Point]() for e in shown}
    for index, key in enumerate(keys):
        y = _TOP + index * _PITCH
        values = [settings[e.number][key] for e in shown]
        kind, place = _positions(values)
        left, width = _SIDE, size.width - 2 * _SIDE
        xs = {value: left + width * at for value, at in place.items()}
        tried = Counter(map(spelled, values))
        ticks = _ticks(dict(sorted(xs.items(), key=lambda one: -tried[one[0]])), y + 14, size.width)
        scales.append(Scale(key, y, kind, tuple(ticks)))
        for e, value in zip(shown, values, strict=True):
            paths[e.number].append((xs[spelled(value)] + _shift(e.number), y))
    means = [abs(e.effect.mean) for e in shown if e.effect]
    large = quantiles(means, n=10)[-1] if len(means) > 1 else max(means, default=0.0)
    order = sorted(shown, key=lambda e: abs(e.effect.mean) if e.effect else 0.0)  # the largest are on top
    lines = tuple(_line(e, tuple(paths[e.number]), large) for e in order)
    return Coordinates(size, _TOP + (len(keys) - 1) * _PITCH + 26, tuple(scales), lines)


def _line(e: Experiment, points: tuple[Point, ...], large: float) -> Line:
    told = f", effect {effect(e.effect)}" if e.effect else ""
    title = f"{e.number:04d} {verdict(e)}{told}"
    if e.effect is None:
        return Line(e.number, "crash" if e.is_crash else "none", 0.5, points, title)
    kind = "good" if e.effect.mean > 0 else "bad"
    return Line(e.number, kind, min(abs(e.effect.mean) / (large or 1.0), 1.0), points, title)


def _shift(number: int) -> float:
    """Lines of the same values lie side by side: the golden ratio spreads them evenly, in whatever order they came."""
    return _APART * ((number * 0.618034) % 1 - 0.5)


def _positions(values: Sequence[Value | None]) -> tuple[str, dict[str, float]]:
    """The place of every value by its text, 0..1, and the kind of axis: numbers have one of their own."""
    numbers = {spelled(v): float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)}
    others = {spelled(v) for v in values} - numbers.keys()
    if not numbers or others - {spelled(None)}:
        texts = sorted({spelled(v) for v in values})
        return "choice", {text: (i + 0.5) / len(texts) for i, text in enumerate(texts)}
    low, high = min(numbers.values()), max(numbers.values())
    is_log = low > 0 and high / low >= _MIN_LOG
    scaled = {text: math.log(v) if is_log else v for text, v in numbers.items()}
    first, width = min(scaled.values()), max(scaled.values()) - min(scaled.values())
    start = _UNSET if others else 0.0
    places = {text: start + (1 - start) * ((v - first) / width if width else 0.5) for text, v in scaled.items()}
    return "log" if is_log else "linear", places | dict.fromkeys(others, 0.0)


def _ticks(xs: Mapping[str, float], y: float, width: float) -> list[Text]:
    """The texts of as many values as have room: the outermost, then those tried most."""
    order = sorted(xs, key=xs.__getitem__)
    placed = list[tuple[float, float, str]]()
    for value in dict.fromkeys((order[0], order[-1], *xs)):
        text = shorten(value, 16)
        room = len(text) * _CHARACTER / 2 + 3
        x = min(max(xs[value], room), width - room)
        if all(x - room >= high or x + room <= low for low, high, _ in placed):
            placed.append((x - room, x + room, text))
    return [Text((low + high) / 2, y, text) for low, high, text in placed]


WIDTH = 1000.0  # of the axis that all bars share
_MAX_KEYS, _MAX_CHANGES = 12, 3
_MARGIN = 0.04  # of the axis, at both ends


@dataclass(frozen=True, slots=True)
class Bar:
    """One change: what it adds to the incumbent. `value`: what it sets the key to; `is_shared`: it sets other keys,
    too. `x`, `low` and `high` stand on the axis, cut off at its ends."""

    change: Change
    value: str
    effect: Effect
    is_shared: bool
    is_kept: bool
    x: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Importance:
    """One key with the changes that set it, those of the largest effects; `num_more` are left out."""

    key: str
    bars: tuple[Bar, ...]
    num_more: int


@dataclass(frozen=True, slots=True)
class Importances:
    """The keys of the largest effects first; `num_more` are left out. `zero` stands on the axis."""

    keys: tuple[Importance, ...]
    num_more: int
    zero: float


def importances(campaign: Campaign) -> Importances | None:
    """Of all keys that measured changes set; None without one. A change of several keys is counted for each."""
    found = defaultdict[str, list[tuple[Change, Effect]]](list)
    for record in campaign.first_proposals.values():
        change, value = record.run.new, campaign.effect(record)
        if change is not None and value is not None:
            for key in change.keys:
                found[key].append((change, value))
    if not found:
        return None
    ranked = {key: sorted(each, key=lambda one: -abs(one[1].mean)) for key, each in found.items()}
    keys = sorted(ranked, key=lambda key: (-abs(ranked[key][0][1].mean), key))
    shown = {key: ranked[key][:_MAX_CHANGES] for key in keys[:_MAX_KEYS]}
    effects = [value for each in shown.values() for _, value in each]
    floor = lowest_shown([100 * value.mean for value in effects]) / 100
    ends = [0.0, *(e.mean + sign * half(e.sd) for e in effects if e.mean >= floor for sign in (-1, 1))]
    least, width = min(ends), (max(ends) - min(ends)) or 1.0

    def x(value: float) -> float:
        place = _MARGIN + (1 - 2 * _MARGIN) * (value - least) / width
        return WIDTH * min(max(place, 0.0), 1.0)

    def bar(key: str, change: Change, value: Effect) -> Bar:
        low, high = (x(value.mean + sign * half(value.sd)) for sign in (-1, 1))
        is_shared, is_kept = len(change.keys) > 1, campaign.is_kept(change)
        return Bar(change, change.keys[key] or "unset", value, is_shared, is_kept, x(value.mean), low, high)

    return Importances(
        tuple(
            Importance(key, tuple(bar(key, *one) for one in each), len(ranked[key]) - len(each))
            for key, each in shown.items()
        ),
        len(keys) - len(shown),
        x(0.0),
    )

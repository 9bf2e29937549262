"""The charts of the page as Vega-Lite specs, which the browser draws, and vl-convert as SVG and PNG.

The charts use the colours of the page's style sheet, so that they follow light and dark. Scores are fractions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

from nightshift.agents.history import KeyHistory
from nightshift.campaign.commits import short_key
from nightshift.campaign.records import Z95, Standing
from nightshift.campaign.results import incumbent_text
from nightshift.report.data import CURVES, Experiment
from nightshift.report.text import score

Spec = dict[str, Any]
_NAMES = ("ink", "quiet", "rule", "page", "blue", "good", "bad", "grey")  # of colours, in report.css
_LIGHT = ("#1c2128", "#5d6675", "#e3e6ea", "#ffffff", "#2459d3", "#14804a", "#c2410c", "#8b95a3")  # of the PNG
COLOURS = {name: f"var(--{name})" for name in _NAMES}
# By Experiment.kind: the dot's name in the legend, shape, fill and stroke.
STYLES = {
    "keep": ("kept", "circle", "good", "good"),
    "left": ("kept, then reverted or replaced", "circle", "page", "good"),
    "baseline": ("baseline", "square", "blue", "blue"),
    "discard": ("discarded", "circle", "page", "grey"),
    "re-run": ("re-run", "square", "page", "blue"),
    "crash": ("crashed", "cross", "bad", "bad"),
    "below": ("below the axis", "triangle-down", "page", "grey"),
}
MAX_VALUES = 12  # of a key; `nightshift history` shows all
MANY = 150  # with more experiments the dots are small, without intervals and numbers
SVG_WIDTH, PNG_WIDTH, HEIGHT = 1110, 1000, 340
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_TIPS = ("experiment", "hypothesis", "change", "score", "effect")
_IS_CHOSEN, _HUE = "indexof(chosen, datum.n) >= 0", "hues[indexof(chosen, datum.n)]"


def _spec(height: int, **parts: Any) -> Spec:
    text = {"labelColor": COLOURS["quiet"], "titleColor": COLOURS["quiet"], "labelFontSize": 11, "titleFontSize": 11}
    lines = {"domainColor": COLOURS["rule"], "gridColor": COLOURS["rule"], "tickColor": COLOURS["rule"]}
    legend = {"orient": "top", "title": None, "symbolSize": 70, "columnPadding": 14, "labelLimit": 260}
    config = {
        "font": _FONT,
        "background": None,
        "view": {"stroke": None},
        "aria": False,
        "axis": text | lines | {"titleFontWeight": "normal"},
        "legend": text | legend | {"columns": {"expr": "width < 500 ? 2 : 0"}},
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
        "padding": {"left": 4, "top": 4, "bottom": 4, "right": 8},
        "config": config,
        **parts,
    }


def domain(experiments: Sequence[Experiment], now: Standing | None) -> tuple[float, float] | None:
    """Return the range of the score axes: it includes all estimates and scores, except scores far below the others.
    None without scores."""
    scores = [e.row.eval_score for e in experiments if e.has_score and e.row.eval_score is not None]
    if not scores:
        return None
    floor = -math.inf
    if len(scores) > 3:  # else one collapsed run squeezes all others into a line
        first, middle, third = quantiles(scores, n=4, method="inclusive")
        floor = middle - 4 * max(third - first, 0.05)
    ends = [score for score in scores if score >= floor]
    for standing in filter(None, (*(e.standing for e in experiments), now)):
        spread = Z95 * standing.incumbent_sd
        ends += [standing.incumbent - spread, standing.incumbent + spread, standing.baseline]
    margin = 0.05 * max(max(ends) - min(ends), 0.01)
    return min(ends) - margin, max(ends) + margin


def progress(experiments: Sequence[Experiment], now: Standing | None) -> Spec | None:
    """Return the chart of all scores and of the estimated scores of incumbent and baseline; None without a score."""
    shown = [e for e in experiments if e.verdict == "crash" or e.has_score]
    if (span := domain(experiments, now)) is None:
        return None
    is_long, first, last = len(experiments) > MANY, shown[0].number - 0.5, shown[-1].number + 0.5
    dots = sorted((_dot(e, *span, is_long) for e in shown), key=lambda dot: bool(dot["kind"] == "keep"))
    kinds = [kind for kind in STYLES if any(dot["kind"] == kind for dot in dots)]
    names, shapes, fills, strokes = zip(*(STYLES[kind] for kind in kinds), strict=True)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if (last - first) / s <= 16)
    ticks = [n for n in range(shown[0].number, shown[-1].number + 1) if n % step == 0 or n == shown[0].number]
    x_axis = {"values": ticks, "grid": False, "title": "experiment", "format": "d", "labelOverlap": True}
    x = {"field": "n", "type": "quantitative", "scale": {"domain": [first, last], "nice": False}, "axis": x_axis}
    scale = {"domain": span, "nice": False, "zero": False}

    def layer(data: str, mark: Spec, y: str, **encoding: Any) -> Spec:
        field = {"field": y, "type": "quantitative", "scale": scale, "axis": {"format": "%", "title": "measured score"}}
        return {"data": {"name": data}, "mark": mark, "encoding": {"y": field, **encoding}}

    def style(values: Sequence[str]) -> Spec:
        return {"field": "label", "type": "nominal", "scale": {"domain": names, "range": values}}

    line, bold = {"color": COLOURS["blue"], "interpolate": "step-after"}, {"type": "text", "fontWeight": "bold"}
    rule, point = {"type": "rule", "color": COLOURS["grey"], "opacity": 0.45}, {"type": "point", "strokeWidth": 1.5}
    high = {"field": "high"}
    is_shown = {"test": "!only.length || indexof(only, datum.n) >= 0", "value": 1}
    size = {"condition": {"test": "datum.label == 'kept'", "value": 60}, "value": 16} if is_long else {"value": 64}
    dot = {
        "size": size,
        "shape": style(shapes),
        "fill": style([COLOURS[name] for name in fills]),
        "stroke": style([COLOURS[name] for name in strokes]),
        "opacity": {"condition": is_shown, "value": 0.12},
        "tooltip": _tips(*_TIPS),
    }
    ring = layer("dots", point | {"size": 260, "strokeWidth": 3}, "y", stroke={"field": "hue", "scale": None})
    choice = [{"filter": _IS_CHOSEN}, {"calculate": _HUE, "as": "hue"}]
    number = bold | {"dy": -12, "color": COLOURS["good"]}
    datasets: dict[str, list[Spec]] = {"dots": dots}
    datasets["numbers"] = [] if is_long else [dot for dot in dots if dot["kind"] == "keep"]
    layers = []
    if now is not None:
        known = [(e.number, e.standing) for e in shown if e.standing]
        steps = [(number, s, Z95 * s.incumbent_sd) for number, s in (*known, (last, now))]
        datasets["steps"] = [
            {"n": n, "y": s.incumbent, "low": s.incumbent - half, "high": s.incumbent + half} for n, s, half in steps
        ]
        datasets["baseline"] = [{"n": first, "to": last, "y": now.baseline}]
        # Move the two labels apart.
        gap = max(0.05 * (span[1] - span[0]) - abs(now.gain), 0.0) / 2 * (1 if now.gain >= 0 else -1)
        ends = [(now.incumbent + gap, f"incumbent {incumbent_text(now)}")] if now.gain else []
        ends.append((now.baseline - gap, f"baseline {score(now.baseline)}"))
        datasets["ends"] = [{"n": last, "y": y, "text": text} for y, text in ends]
        layers = [
            layer("steps", line | {"type": "area", "opacity": 0.13}, "low", y2=high),
            layer("baseline", rule | {"strokeDash": [5, 4], "opacity": 1}, "y", x2={"field": "to"}),
            layer("steps", line | {"type": "line", "strokeWidth": 2}, "y"),
            layer("ends", bold | {"align": "left", "dx": 6, "color": COLOURS["quiet"]}, "y", text={"field": "text"}),
        ]
    layers += [
        layer("dots", rule, "low", y2=high),
        ring | {"transform": choice},
        layer("dots", point | {"opacity": 1, "cursor": "pointer"}, "y", **dot),
        layer("numbers", number, "y", text={"field": "n", "format": "04d"}),
    ]
    params: list[Spec] = [{"name": name, "value": []} for name in ("chosen", "hues", "only")]
    return _spec(HEIGHT, params=params, datasets=datasets, encoding={"x": x}, layer=layers)


def _dot(e: Experiment, low: float, high: float, is_long: bool) -> Spec:
    """Return the dot of one experiment. A crash, or a score below the axis, has its dot at the lower edge."""
    value, edge = e.row.eval_score if e.has_score else None, low + 0.012 * (high - low)
    kind = "crash" if value is None else "below" if value < low else e.kind
    y = edge if value is None else max(value, edge)
    half = 0.0 if is_long or kind in ("crash", "below") else e.spread or 0.0
    ends = {"low": max(y - half, low), "high": min(y + half, high)}
    return {"n": e.number, "kind": kind, "label": STYLES[kind][0], "y": y, **ends}


def _tips(*names: str) -> list[Spec]:
    """Return the fields of a tooltip. The page's script adds the fields of an experiment to its dots."""
    return [{"field": name.replace(" ", "_"), "title": name} for name in names]


def values(key: KeyHistory, scores: Mapping[int, float | None], span: tuple[float, float]) -> Spec:
    """Return the chart of one key: a dot per run at its value and measured score, and the mean of each value."""
    runs, means = list[Spec](), list[Spec]()
    for row in key.values[:MAX_VALUES]:
        name = row.value + "".join(f" +{short_key(other)}" for other in row.others)
        runs += [{"n": n, "value": name, "measured": scores.get(n)} for n in row.numbers]
        if row.mean_score is not None:
            _, num_runs, mean, difference = str(row).split(" | ")
            texts = {"runs_counted": num_runs, "mean_score": mean, "difference": difference}
            means.append({"value": name, "mean": row.mean_score, "setting": f"{key.key} = {row.name}", **texts})
    is_now = f"datum.value == {json.dumps(key.now)}"
    axis = {
        "title": None,
        "labelLimit": 170,
        "labelFontWeight": {"condition": {"test": is_now, "value": "bold"}, "value": "normal"},
        "labelColor": {"condition": {"test": is_now, "value": COLOURS["good"]}, "value": COLOURS["quiet"]},
    }
    x = {"type": "quantitative", "scale": {"domain": span, "nice": False, "zero": False, "clamp": True}}
    x["axis"] = {"title": None, "format": "%", "tickCount": 4}
    tick = {"type": "tick", "thickness": 3, "color": COLOURS["blue"], "size": 18}
    point = {"type": "point", "filled": True, "size": 45, "cursor": "pointer", "opacity": 0.8}
    hue = {"calculate": f"{_IS_CHOSEN} ? {_HUE} : '{COLOURS['grey']}'", "as": "hue"}
    tips = _tips("setting", "runs counted", "mean score", "difference")
    return _spec(
        60 + 22 * len(means),
        params=[{"name": name, "value": []} for name in ("chosen", "hues")],
        encoding={"y": {"field": "value", "type": "nominal", "sort": [mean["value"] for mean in means], "axis": axis}},
        layer=[
            {"data": {"values": means}, "mark": tick, "encoding": {"x": x | {"field": "mean"}, "tooltip": tips}},
            {
                "data": {"values": runs},
                "transform": [hue],
                "mark": point,
                "encoding": {
                    "x": x | {"field": "measured"},
                    "color": {"field": "hue", "scale": None},
                    "tooltip": _tips(*_TIPS),
                },
            },
        ],
    )


def curve(name: str) -> Spec:
    """Return the chart of one quantity of training: a thin and a smoothed line per run. The script adds the data."""
    y = {"type": "quantitative", "scale": {"zero": False}, "axis": {"tickCount": 4, "title": None}}
    x = {"field": "step", "type": "quantitative", "axis": {"grid": False, "tickCount": 4, "title": None}}
    smooth = {"op": "mean", "field": name, "as": "smooth"}
    tips = [{"field": "run", "title": "experiment"}, {"field": "step"}, {"field": name, "title": CURVES[name]}]
    smoothed = {"type": "line", "strokeWidth": 2, "point": {"opacity": 0, "size": 80}}
    return _spec(
        150,
        data={"name": "runs"},
        title={"text": CURVES[name], "anchor": "start", "fontSize": 12, "color": COLOURS["ink"]},
        transform=[{"window": [smooth], "frame": [-3, 3], "groupby": ["run"], "sort": [{"field": "step"}]}],
        encoding={"x": x, "color": {"field": "hue", "type": "nominal", "scale": None}, "detail": {"field": "run"}},
        layer=[
            {"mark": {"type": "line", "strokeWidth": 1, "opacity": 0.25}, "encoding": {"y": y | {"field": name}}},
            {"mark": smoothed, "encoding": {"y": y | {"field": "smooth"}, "tooltip": tips}},
        ],
    )


def svg(spec: Spec) -> str:
    """Return the picture that the page shows without JavaScript."""
    import vl_convert

    drawing: str = vl_convert.vegalite_to_svg(spec | {"width": SVG_WIDTH}, allowed_base_urls=[])
    return drawing


def png(spec: Spec, title: str, subtitle: str) -> bytes:
    """Return the picture for a README, in light colours."""
    import vl_convert

    head = {"text": title, "subtitle": subtitle, "anchor": "start", "fontSize": 17, "offset": 8}
    frame = {"left": 14, "top": 14, "bottom": 14, "right": 14}
    source = json.dumps(spec | {"width": PNG_WIDTH, "padding": frame, "title": head})
    for name, colour in zip(_NAMES, _LIGHT, strict=True):
        source = source.replace(COLOURS[name], colour)
    picture: bytes = vl_convert.vegalite_to_png(
        json.loads(source) | {"background": "white"}, scale=2, allowed_base_urls=[]
    )
    return picture

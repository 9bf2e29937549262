"""The drawings of the page as Vega-Lite specs: plain values that the browser draws, and vl-convert as SVG and PNG.

The page's drawings take their colours from its style sheet, so that they follow light and dark. Scores are fractions.
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
from nightshift.report.data import CURVES, Experiment
from nightshift.report.text import incumbent_score, score

Spec = dict[str, Any]
LIGHT = {  # by the names of report.css
    "ink": "#1c2128",
    "quiet": "#667080",
    "rule": "#e3e6ea",
    "page": "#ffffff",
    "blue": "#2459d3",
    "good": "#14804a",
    "bad": "#c2410c",
    "grey": "#8b95a3",
}
PAGE = {name: f"var(--{name})" for name in LIGHT}
# Of a dot: its name in the legend, shape, fill and stroke, by Experiment.kind.
STYLES = {
    "keep": ("kept", "circle", "good", "good"),
    "left": ("kept, then reverted or replaced", "circle", "page", "good"),
    "baseline": ("baseline", "square", "blue", "blue"),
    "discard": ("discarded", "circle", "page", "grey"),
    "re-run": ("re-run", "square", "page", "blue"),
    "crash": ("crashed", "cross", "bad", "bad"),
    "below": ("below the axis", "triangle-down", "page", "grey"),
}
MANY = 150  # experiments: with more the dots are small, without intervals and numbers
SVG_WIDTH, PNG_WIDTH, HEIGHT = 1110, 1000, 340
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_IS_CHOSEN = "indexof(chosen, datum.n) >= 0"


def _spec(colours: Mapping[str, str], height: int, **parts: Any) -> Spec:
    text = {"labelColor": colours["quiet"], "titleColor": colours["quiet"], "labelFontSize": 11, "titleFontSize": 11}
    lines = {"domainColor": colours["rule"], "gridColor": colours["rule"], "tickColor": colours["rule"]}
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
        "autosize": {"type": "fit", "contains": "padding", "resize": True},
        "config": config,
        **parts,
    }


def domain(experiments: Sequence[Experiment], now: Standing | None) -> tuple[float, float] | None:
    """Return the scores that the axes span: the estimates, and all scores but those far below. None without scores."""
    scores = [e.row.eval_score for e in experiments if e.has_score and e.row.eval_score is not None]
    if not scores:
        return None
    floor = -math.inf
    if len(scores) > 3:  # a collapse would squeeze all other scores into a line
        first, middle, third = quantiles(scores, n=4, method="inclusive")
        floor = middle - 4 * max(third - first, 0.05)
    ends = [score for score in scores if score >= floor]
    for standing in filter(None, (*(e.standing for e in experiments), now)):
        spread = Z95 * standing.incumbent_sd
        ends += [standing.incumbent - spread, standing.incumbent + spread, standing.baseline]
    margin = 0.05 * max(max(ends) - min(ends), 0.01)
    return min(ends) - margin, max(ends) + margin


def progress(experiments: Sequence[Experiment], now: Standing | None, colours: Mapping[str, str] = PAGE) -> Spec | None:
    """Return the chart of all scores, and of the estimated scores of incumbent and baseline; None without a score."""
    shown = [e for e in experiments if e.is_crash or e.has_score]
    if (span := domain(experiments, now)) is None:
        return None
    low, high = span
    is_long, first, last = len(experiments) > MANY, shown[0].number - 0.5, shown[-1].number + 0.5
    dots = [_dot(e, low, high, is_long) for e in shown]
    kinds = [kind for kind in STYLES if any(dot["kind"] == kind for dot in dots)]
    names, shapes, fills, strokes = zip(*(STYLES[kind] for kind in kinds), strict=True)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if (last - first) / s <= 16)
    ticks = [n for n in range(shown[0].number, shown[-1].number + 1) if n % step == 0 or n == shown[0].number]
    x_axis = {"values": ticks, "grid": False, "title": "experiment", "format": "d", "labelOverlap": True}
    x = {"field": "n", "type": "quantitative", "scale": {"domain": [first, last], "nice": False}, "axis": x_axis}
    scale = {"domain": [low, high], "nice": False, "zero": False}

    def y(field: str) -> Spec:
        return {"field": field, "type": "quantitative", "scale": scale, "title": "score, validation split"}

    def style(values: Sequence[str]) -> Spec:
        return {"field": "label", "type": "nominal", "scale": {"domain": names, "range": values}}

    band, line = {"type": "area", "color": colours["blue"], "opacity": 0.13}, {"color": colours["blue"]}
    end = {"type": "text", "align": "left", "dx": 6, "fontWeight": "bold", "clip": False, "fontSize": 11}
    number = {"type": "text", "dy": -12, "fontSize": 11, "fontWeight": "bold", "color": colours["good"]}
    size = {"condition": {"test": "datum.label == 'kept'", "value": 60}, "value": 16} if is_long else {"value": 64}
    is_shown = {"test": "!only.length || indexof(only, datum.n) >= 0", "value": 1}
    layers: list[Spec] = [
        {
            "data": {"name": "dots"},
            "mark": {"type": "rule", "color": colours["grey"], "opacity": 0.45},
            "encoding": {"y": y("low"), "y2": {"field": "high"}},
        },
        {
            "data": {"name": "dots"},
            "transform": [{"filter": _IS_CHOSEN}, {"calculate": "hues[indexof(chosen, datum.n)]", "as": "hue"}],
            "mark": {"type": "point", "size": 260, "strokeWidth": 3},
            "encoding": {"y": y("y"), "stroke": {"field": "hue", "scale": None}},
        },
        {
            "data": {"name": "dots"},
            "mark": {"type": "point", "strokeWidth": 1.5, "opacity": 1, "cursor": "pointer"},
            "encoding": {
                "y": y("y"),
                "size": size,
                "shape": style(shapes),
                "fill": style([colours[name] for name in fills]),
                "stroke": style([colours[name] for name in strokes]),
                "opacity": {"condition": is_shown, "value": 0.12},
                "tooltip": _tips("experiment", "hypothesis", "change", "score", "effect"),
            },
        },
        {
            "data": {"values": [] if is_long else [dot for dot in dots if dot["kind"] == "keep"]},
            "mark": number,
            "encoding": {"y": y("y"), "text": {"field": "n", "format": "04d"}},
        },
    ]
    datasets: dict[str, list[Spec]] = {"dots": sorted(dots, key=lambda dot: bool(dot["kind"] == "keep"))}
    if now is not None:
        known = [(e.number, e.standing) for e in shown if e.standing]
        steps = [(number, s, Z95 * s.incumbent_sd) for number, s in (*known, (last, now))]
        datasets["steps"] = [
            {"n": n, "mean": s.incumbent, "low": s.incumbent - half, "high": s.incumbent + half} for n, s, half in steps
        ]
        gap = max(0.05 * (high - low) - abs(now.gain), 0.0) / 2 * (1 if now.gain >= 0 else -1)  # of the two labels
        datasets["ends"] = [
            {"n": last, "y": now.incumbent + gap, "text": f"incumbent {incumbent_score(now)}"},
            {"n": last, "y": now.baseline - gap, "text": f"baseline {score(now.baseline)}"},
        ][0 if now.gain else 1 :]
        layers[:0] = [
            {
                "data": {"name": "steps"},
                "mark": band | {"interpolate": "step-after"},
                "encoding": {"y": y("low"), "y2": {"field": "high"}},
            },
            {
                "data": {"values": [{"n": first, "to": last, "y": now.baseline}]},
                "mark": {"type": "rule", "strokeDash": [5, 4], "color": colours["quiet"]},
                "encoding": {"x2": {"field": "to"}, "y": y("y")},
            },
            {
                "data": {"name": "steps"},
                "mark": line | {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
                "encoding": {"y": y("mean")},
            },
            {
                "data": {"name": "ends"},
                "mark": end | {"color": colours["quiet"]},
                "encoding": {"y": y("y"), "text": {"field": "text"}},
            },
        ]
    return _spec(
        colours,
        HEIGHT,
        padding={"left": 4, "top": 4, "bottom": 4, "right": 8},
        params=[{"name": name, "value": []} for name in ("chosen", "hues", "only")],
        datasets=datasets,
        encoding={"x": x},
        layer=layers,
    )


def _dot(e: Experiment, low: float, high: float, is_long: bool) -> Spec:
    """Return the dot of one experiment; at the lower edge without a score, or with one that is below the axis."""
    value, edge = e.row.eval_score if e.has_score else None, low + 0.012 * (high - low)
    kind = "crash" if value is None else "below" if value < low else e.kind
    y = edge if value is None else max(value, edge)
    half = 0.0 if is_long or kind in ("crash", "below") else e.spread or 0.0
    ends = {"low": max(y - half, low), "high": min(y + half, high)}
    return {"n": e.number, "kind": kind, "label": STYLES[kind][0], "y": y, **ends}


def _tips(*names: str) -> list[Spec]:
    """Return what hovering shows; the page's script adds these fields to the dots."""
    return [{"field": name.replace(" ", "_"), "title": name} for name in names]


def values(key: KeyHistory, scores: Mapping[int, float | None], span: tuple[float, float]) -> Spec:
    """Return the chart of the measured scores of a key's values: a dot a run, and the mean of each value."""
    runs, means = list[Spec](), list[Spec]()
    names = {row: row.value + "".join(f" +{short_key(other)}" for other in row.others) for row in key.values}
    for row in key.values:
        runs += [{"n": n, "value": names[row], "score": scores.get(n)} for n in row.numbers]
        _, counted, mean, difference = str(row).split(" | ")
        texts = {"runs_counted": counted, "mean_score": mean, "difference": difference}
        means += [{"value": names[row], "mean": row.mean_score, "setting": f"{key.key} = {row.name}", **texts}]
    measured = [mean for mean in means if mean["mean"] is not None]
    order = [mean["value"] for mean in measured]
    is_now = f"datum.value == {json.dumps(key.now)}"
    axis = {
        "title": None,
        "labelAngle": 0,
        "labelLimit": 280 // max(len(order), 1),
        "grid": False,
        "labelFontWeight": {"condition": {"test": is_now, "value": "bold"}, "value": "normal"},
        "labelColor": {"condition": {"test": is_now, "value": PAGE["good"]}, "value": PAGE["quiet"]},
    }
    y = {"type": "quantitative", "scale": {"domain": span, "nice": False, "zero": False, "clamp": True}, "title": None}
    return _spec(
        PAGE,
        150,
        params=[{"name": name, "value": []} for name in ("chosen", "hues")],
        encoding={"x": {"field": "value", "type": "nominal", "sort": order, "axis": axis}},
        layer=[
            {
                "data": {"values": measured},
                "mark": {"type": "tick", "thickness": 3, "color": PAGE["blue"], "size": 26},
                "encoding": {
                    "y": y | {"field": "mean", "axis": {"tickCount": 4}},
                    "tooltip": _tips("setting", "runs counted", "mean score", "difference"),
                },
            },
            {
                "data": {"values": runs},
                "mark": {"type": "point", "filled": True, "size": 45, "cursor": "pointer", "opacity": 0.75},
                "encoding": {
                    "y": y | {"field": "score"},
                    "color": {"condition": {"test": _IS_CHOSEN, "value": PAGE["ink"]}, "value": PAGE["grey"]},
                    "tooltip": _tips("experiment", "hypothesis", "change", "score", "effect"),
                },
            },
        ],
    )


def curve(name: str) -> Spec:
    """Return the chart of one quantity of training: a smoothed line a run above its values, which the page fills in."""
    color = {"field": "hue", "type": "nominal", "scale": None}
    y = {"type": "quantitative", "scale": {"zero": False}, "axis": {"tickCount": 4, "title": None}}
    smooth = {"op": "mean", "field": name, "as": "smooth"}
    tips = [{"field": "run", "title": "experiment"}, {"field": "step"}, {"field": name, "title": CURVES[name]}]
    return _spec(
        PAGE,
        150,
        data={"name": "runs"},
        title={"text": CURVES[name], "anchor": "start", "fontSize": 12, "color": PAGE["ink"]},
        transform=[{"window": [smooth], "frame": [-3, 3], "groupby": ["run"], "sort": [{"field": "step"}]}],
        encoding={
            "x": {"field": "step", "type": "quantitative", "axis": {"grid": False, "tickCount": 4, "title": None}},
            "color": color,
            "detail": {"field": "run"},
        },
        layer=[
            {"mark": {"type": "line", "strokeWidth": 1, "opacity": 0.25}, "encoding": {"y": y | {"field": name}}},
            {
                "mark": {"type": "line", "strokeWidth": 2, "point": {"opacity": 0, "size": 80}},
                "encoding": {"y": y | {"field": "smooth"}, "tooltip": tips},
            },
        ],
    )


def svg(spec: Spec) -> str:
    """Return the picture that the page shows without its script."""
    import vl_convert

    drawing: str = vl_convert.vegalite_to_svg(spec | {"width": SVG_WIDTH}, allowed_base_urls=[])
    return drawing


def png(spec: Spec, title: str, subtitle: str) -> bytes:
    """Return a picture for a README; `spec` has the colours of LIGHT."""
    import vl_convert

    head = {"text": title, "subtitle": subtitle, "anchor": "start", "fontSize": 17, "offset": 8}
    frame = {"left": 14, "top": 14, "bottom": 14, "right": 14}
    spec = spec | {"width": PNG_WIDTH, "background": "white", "padding": frame, "title": head}
    picture: bytes = vl_convert.vegalite_to_png(spec, scale=2, allowed_base_urls=[])
    return picture

"""The charts of the page as Vega-Lite specs, which the browser draws, and vl-convert as SVG and PNG. They use the
colours of the page's style sheet, so that they follow light and dark. Scores are fractions."""

import json
from collections.abc import Sequence
from typing import Any

from nightshift.campaign.records import Z95, Standing
from nightshift.campaign.results import incumbent_text, percents
from nightshift.report.data import CURVES, Experiment

Spec = dict[str, Any]
# Of report.css, and of the PNG.
_COLOURS = {
    "var(--ink)": "#1c2128",
    "var(--quiet)": "#5d6675",
    "var(--rule)": "#e3e6ea",
    "var(--page)": "#ffffff",
    "var(--blue)": "#2459d3",
    "var(--good)": "#14804a",
    "var(--bad)": "#c2410c",
    "var(--grey)": "#8b95a3",
}
INK, QUIET, RULE, PAGE, BLUE, GOOD, BAD, GREY = _COLOURS
# By Experiment.kind: the dot's name in the legend, shape, fill and stroke.
STYLES = {
    "keep": ("kept", "circle", GOOD, GOOD),
    "left": ("kept, then reverted or replaced", "circle", PAGE, GOOD),
    "baseline": ("baseline", "square", BLUE, BLUE),
    "discard": ("discarded", "circle", PAGE, GREY),
    "re-run": ("re-run", "square", PAGE, BLUE),
    "crash": ("crashed", "cross", BAD, BAD),
}
MANY = 150  # with more experiments the dots are small, without intervals and numbers
SVG_WIDTH, PNG_WIDTH = 1110, 1000
_MAX_BELOW = 0.15  # a score further below all estimates is drawn at the edge, where it squeezes no others
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def _spec(height: int, **parts: Any) -> Spec:
    text = {"labelColor": QUIET, "titleColor": QUIET, "titleFontWeight": "normal"}
    legend = {"orient": "top", "title": None, "columnPadding": 14, "labelLimit": 260}
    config = {
        "font": _FONT,
        "background": None,
        "view": {"stroke": None},
        "aria": False,
        "axis": text | {"domainColor": RULE, "gridColor": RULE, "tickColor": RULE},
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


def progress(experiments: Sequence[Experiment], now: Standing | None) -> Spec | None:
    """Return the chart of all scores and of the estimated scores of incumbent and baseline; None without a score. A
    crash, and a score far below the estimates, has its dot at the lower edge."""
    shown = [e for e in experiments if e.verdict == "crash" or e.standing]
    scores = [e.row.eval_score for e in shown if e.row.eval_score is not None]
    if now is None or not scores:
        return None
    known: list[tuple[float, Standing]] = [(e.number, e.standing) for e in shown if e.standing]
    first, last = shown[0].number - 0.5, shown[-1].number + 0.5
    known += [(last - 0.25, now), (last, now)]  # a commit of yours may have changed the incumbent since
    steps = [(n, s.incumbent, Z95 * s.incumbent_sd) for n, s in known]
    lowest = min(now.baseline, *(y - half for _, y, half in steps))
    low = min(lowest, max(min(scores), lowest - _MAX_BELOW)) - 0.01
    high = max(now.baseline, *scores, *(y + half for _, y, half in steps)) + 0.01
    is_long = len(experiments) > MANY
    dots = [_dot(e, low, is_long) for e in sorted(shown, key=lambda e: e.kind == "keep")]  # kept changes on top
    names, shapes, fills, strokes = zip(*STYLES.values(), strict=True)
    axis = {"grid": False, "title": "experiment", "format": "d", "tickMinStep": 1}
    x = {"field": "n", "type": "quantitative", "scale": {"domain": [first, last], "nice": False}, "axis": axis}
    scale = {"domain": [low, high], "nice": False, "clamp": True}

    def layer(data: str, mark: Spec, y: str, **encoding: Any) -> Spec:
        field = {"field": y, "type": "quantitative", "scale": scale, "axis": {"format": "%", "title": "measured score"}}
        return {"data": {"name": data}, "mark": mark, "encoding": {"y": field, **encoding}}

    def style(values: Sequence[str]) -> Spec:
        return {"field": "label", "type": "nominal", "scale": {"domain": names, "range": values}}

    line, bold = {"color": BLUE, "interpolate": "step-after"}, {"type": "text", "fontWeight": "bold"}
    point, high_end = {"type": "point", "strokeWidth": 1.5}, {"field": "high"}
    datasets = {
        "dots": dots,
        "numbers": [dot for dot in dots if dot["kind"] == "keep" and not is_long],
        "steps": [{"n": n, "y": y, "low": y - half, "high": y + half} for n, y, half in steps],
        "baseline": [{"n": first, "to": last, "y": now.baseline}],
        "ends": [
            {"n": last, "y": now.incumbent, "text": f"incumbent {incumbent_text(now)}", "dy": -7},
            {"n": last, "y": now.baseline, "text": f"baseline {percents(now.baseline)}", "dy": 7},
        ],
    }
    label = bold | {"align": "left", "dx": 6, "dy": {"expr": "datum.dy"}, "color": QUIET}
    ring = layer("dots", point | {"size": 260, "strokeWidth": 3}, "y", stroke={"field": "hue", "scale": None})
    mark = point | {"opacity": 1, "cursor": "pointer", "size": 16 if is_long else 64}
    styles = {"shape": style(shapes), "fill": style(fills), "stroke": style(strokes)}
    hue = {"calculate": "hues[indexof(chosen, datum.n)]", "as": "hue"}
    layers = [
        layer("steps", line | {"type": "area", "opacity": 0.13}, "low", y2=high_end),
        layer("baseline", {"type": "rule", "color": GREY, "strokeDash": [5, 4]}, "y", x2={"field": "to"}),
        layer("steps", line | {"type": "line", "strokeWidth": 2}, "y"),
        layer("ends", label, "y", text={"field": "text"}),
        layer("dots", {"type": "rule", "color": GREY, "opacity": 0.45}, "low", y2=high_end),
        ring | {"transform": [{"filter": "indexof(chosen, datum.n) >= 0"}, hue]},
        layer("dots", mark, "y", **styles, tooltip=_tips("experiment", "hypothesis", "change", "score", "effect")),
        layer("numbers", bold | {"dy": -12, "color": GOOD}, "y", text={"field": "n", "format": "04d"}),
    ]
    params: list[Spec] = [{"name": name, "value": []} for name in ("chosen", "hues")]  # set by the page's script
    return _spec(340, params=params, datasets=datasets, encoding={"x": x}, layer=layers)


def _dot(e: Experiment, low: float, is_long: bool) -> Spec:
    y, kind = (e.row.eval_score, e.kind) if e.row.eval_score is not None else (low, "crash")
    half = Z95 * e.standing.run_sd if e.standing and not is_long else 0.0
    return {"n": e.number, "kind": kind, "label": STYLES[kind][0], "y": y, "low": y - half, "high": y + half}


def _tips(*names: str) -> list[Spec]:
    """Return the fields of a tooltip. The page's script adds the fields of an experiment to its dots."""
    return [{"field": name, "title": name} for name in names]


def curve(name: str) -> Spec:
    """Return the chart of one quantity of training: a thin and a smoothed line per run. The script adds the data."""
    y = {"type": "quantitative", "scale": {"zero": False}, "axis": {"tickCount": 4, "title": None}}
    x = {"field": "step", "type": "quantitative", "axis": {"grid": False, "tickCount": 4, "title": None}}
    smooth = {"op": "mean", "field": name, "as": "smooth"}
    hue = {"field": "hue", "type": "nominal", "scale": None}
    smoothed = {"type": "line", "strokeWidth": 2, "point": {"opacity": 0, "size": 80}}
    tips = _tips("experiment", "step", name)
    return _spec(
        150,
        data={"name": "runs"},
        title={"text": CURVES[name], "anchor": "start", "fontSize": 12, "color": INK},
        transform=[{"window": [smooth], "frame": [-3, 3], "groupby": ["experiment"], "sort": [{"field": "step"}]}],
        encoding={"x": x, "color": hue, "detail": {"field": "experiment"}},
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
    source = json.dumps(spec | {"width": PNG_WIDTH, "padding": frame, "title": head, "background": "white"})
    for name, colour in _COLOURS.items():
        source = source.replace(name, colour)
    picture: bytes = vl_convert.vegalite_to_png(json.loads(source), scale=2, allowed_base_urls=[])
    return picture

"""progress.png: the progress chart as a picture for READMEs and mails. The only user of matplotlib."""

import io
from typing import Any

from nightshift.report.charts import LABEL_SIZE, Chart

_INK, _MUTED, _LINE, _GRID = "#1c2128", "#667080", "#2459d3", "#e6e9ee"
_KINDS = {  # face, edge and size in radii of every dot
    "baseline": ("white", _LINE, 1.3),
    "left": ("white", "#14804a", 1.2),
    "keep": ("#14804a", "white", 1.4),
    "discard": ("white", "#8b95a3", 1.0),
    "re-run": ("#8b95a3", "white", 1.0),
}
_CRASH = "#c2410c"
_POINT = 72 / 100  # drawings are laid out at 100 pixels an inch


def draw(chart: Chart, title: str, dpi: int = 200) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    head = 34.0
    width, height = chart.size.width, chart.height + head
    figure = Figure(figsize=(width / 100, height / 100), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(chart.top + chart.height, chart.top - head)
    axes.set_axis_off()
    left, right = chart.size.left, chart.plot_right

    def write(x: float, y: float, text: str, color: str = _MUTED, size: float = 11, **style: Any) -> None:
        axes.text(x, y, text, size=size * _POINT, color=color, parse_math=False, **style)

    write(left, chart.top - 9, _drawable(title), _INK, 13, weight="bold")
    write(width - 14, chart.top - 9, _legend(chart), ha="right")
    for tick in chart.y_ticks:
        axes.plot([left, right], [tick.y - 4] * 2, color=_GRID, linewidth=0.8, zorder=0)
        write(tick.x, tick.y, tick.text, ha="right")
    for tick in chart.x_ticks:
        write(tick.x, tick.y, tick.text, ha="center")
    if chart.baseline_y is not None:
        axes.plot([left, right], [chart.baseline_y] * 2, color=_MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    if chart.band:
        axes.fill(*zip(*chart.band, strict=True), color=_LINE, alpha=0.13, linewidth=0, zorder=1)
    if chart.incumbent:
        axes.plot(*zip(*chart.incumbent, strict=True), color=_LINE, linewidth=1.8, zorder=2)
    for kind, (face, edge, size) in _KINDS.items():
        dots = [dot for dot in chart.dots if dot.kind == kind]
        bars = [((d.x, d.low), (d.x, d.high)) for d in dots if d.low is not None and d.high is not None]
        colour = face if kind == "keep" else edge
        axes.add_collection(
            LineCollection(bars, colors=colour, linewidths=0.8, alpha=0.15 if chart.radius < 2 else 0.45, zorder=2.5)
        )
        for below, marker in ((False, "o"), (True, "v")):
            area, places = (2 * chart.radius * size * _POINT) ** 2, [dot for dot in dots if dot.is_below is below]
            xs, ys = [dot.x for dot in places], [dot.y for dot in places]
            axes.scatter(xs, ys, s=area, c=face, edgecolors=edge, linewidths=1, marker=marker, zorder=3)
    if (row := chart.unscored) is not None:
        xs = [dot.x for dot in chart.dots if dot.kind == "crash"]
        area = (2 * max(chart.radius, 2.5) * _POINT) ** 2
        axes.scatter(xs, [row.y - 4] * len(xs), s=area, c=_CRASH, marker="x", linewidths=1.2, zorder=3)
        write(row.x, row.y, row.text, _CRASH, ha="right")
    for label in chart.labels:
        leader = [label.y - 8, label.dot.y]
        axes.plot([label.dot.x] * 2, leader, color="#14804a", linewidth=0.6, alpha=0.55, zorder=1.5)
        write(label.x, label.y, _drawable(label.text), _INK, LABEL_SIZE, family="DejaVu Sans Mono")
    for end in chart.ends:
        write(end.x, end.y, end.text, _LINE if end.text.startswith("incumbent") else _MUTED, weight="bold")
    data = io.BytesIO()
    figure.savefig(data, dpi=dpi, format="png", pil_kwargs={"compress_level": 1})  # a night draws it often
    return data.getvalue()


def _legend(chart: Chart) -> str:
    crashed = "   \u00d7 crashed" if any(dot.kind == "crash" for dot in chart.dots) else ""
    left = "   \u25ce reverted or replaced" if any(dot.kind == "left" for dot in chart.dots) else ""
    line = "line: believed score of the incumbent, its 95 % band; bars: 95 % of a score"
    return f"\u25cf kept{left}   \u25cb discarded{crashed}   {line}"


def _drawable(text: str) -> str:
    """Text without the characters that matplotlib's own fonts lack or that would hide."""
    return "".join(c if " " <= c <= "~" or c == "\N{RIGHTWARDS ARROW}" else "?" for c in text)

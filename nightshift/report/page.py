"""The morning page: report.html, progress.png and report.md, from the ledger alone.

report.html is one file without a network: style, scripts, data and drawings are inside. What comes from outside
(descriptions, rollouts, file names) is escaped by Jinja, made visible by `text.visible`, and cannot run: the page's
policy allows its own script alone, by its hash. A page of 1,000 experiments stays below 5 MB and 5 s of one core.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nightshift.campaign.ledger import Ledger
from nightshift.errors import EngineError
from nightshift.files import write_atomically
from nightshift.git.repo import Repo
from nightshift.proposers.history import load_configs
from nightshift.proposers.notebook import belied, notebook
from nightshift.report import compare, panels, text, timing
from nightshift.report.chart import SIZES, Chart, progress_chart
from nightshift.report.coordinates import Coordinates, coordinates
from nightshift.report.data import Morning, counted, gather
from nightshift.report.importance import WIDTH, Importances, importances
from nightshift.report.markdown import summary
from nightshift.report.panels import Panel
from nightshift.report.rows import Row, detailed, rows
from nightshift.report.settings import settings
from nightshift.report.slices import shown_examples
from nightshift.report.text import Headline
from nightshift.report.timing import Night, Timeline, Use, nights, timeline

PICTURE_NAME = "progress.png"
TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("draw", "table", "compare", "start")
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    "base-uri 'none'; form-action 'none'"
)
LIVE_POLICY = "; connect-src 'self'"  # of a page that is served, and asks whether it is still what the ledger says


@dataclass(frozen=True, slots=True)
class View:
    """Everything that page, summary and picture are drawn from."""

    morning: Morning
    headline: Headline
    rows: tuple[Row, ...]
    panels: tuple[Panel, ...]
    charts: tuple[Chart, ...]
    nights: tuple[Night, ...]
    slots: Timeline | None
    importances: Importances | None
    coordinates: tuple[Coordinates, ...]
    compared: Markup  # JSON
    notebook: tuple[str, ...]  # its lines; none where it says nothing
    written: datetime


def write_report(
    root: Path, now: datetime, output: Path | None = None, branch: str | None = None
) -> tuple[Headline, list[Path]]:
    """Write report.html, report.md and progress.png (not without a measured experiment) into `output`, or runs/.

    Raises UsageError for a branch without experiments, EngineError when the disk refuses.
    """
    from nightshift.report.png import draw

    ledger = Ledger(root)
    view = view_of(ledger, Repo(root).head().branch, now, branch)
    folder = output or ledger.runs_dir
    files = {
        "report.html": render(view).encode(),
        "report.md": summary(view.morning, view.headline, view.nights, bool(view.charts)).encode(),
    }
    if view.charts:
        files[PICTURE_NAME] = draw(view.charts[0], view.headline.title)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(folder / name, data)
        if not view.charts:
            (folder / PICTURE_NAME).unlink(missing_ok=True)  # one of another campaign would lie beside this page
    except OSError as error:
        cause = f"cannot write {folder}: {error.strerror or error}"
        raise EngineError(cause, "Free disk space, or give --output.") from None
    return view.headline, [folder / name for name in files]


def view_of(ledger: Ledger, head_branch: str, now: datetime, branch: str | None = None) -> View:
    """Read the ledger and the files of its runs, and put together what is to be shown."""
    morning = gather(ledger, branch, head_branch)
    shown = detailed(morning.experiments)
    examples = shown_examples(morning.environments, ledger.tsv_path.parent)
    wanted = compare.dividing(shown, examples)
    found = rows(morning.experiments, shown, ledger, examples, wanted)
    configs = settings(load_configs(ledger, [e.record for e in shown]))
    charts = (progress_chart(morning.experiments, size) for size in SIZES)
    _, *entries = notebook(morning.campaign.decided).rstrip().split("\n")
    return View(
        morning=morning,
        headline=text.headline(morning),
        rows=tuple(found),
        panels=tuple(panels.key_panels(morning.experiments)),
        charts=tuple(chart for chart in charts if chart is not None),
        nights=tuple(nights([(row.experiment.record, row.uses) for row in found])),
        slots=timeline([e.record for e in morning.experiments]),
        importances=importances(morning.campaign, morning.experiments),
        coordinates=tuple(coordinates(shown, configs)),
        compared=compare.data_block(found, configs, examples),
        notebook=tuple(entries[1:]),  # without its heading
        written=now,
    )


@cache  # a night writes the page after every experiment, and compiling the templates is a third of that
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=text.visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = (
        "score", "signed", "points", "duration", "short_number", "cut", "brief", "plus_minus", "expected", "local",
        "half", "counts", "certificate_line", "elsewhere_lines",
    )  # fmt: skip
    environment.filters |= {name: getattr(text, name) for name in names}
    environment.filters |= {"n": _coordinate, "path": _path, "plain": _plain, "belied": belied, "counted": counted}
    return environment


def render(view: View, version: str = "") -> str:
    """The page as one HTML document; with the `version` of a served one it asks its server for a newer one."""
    # These files are ours; none holds a closing tag.
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    script = "".join((TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    context: dict[str, Any] = {
        "view": view,
        "morning": view.morning,
        "panels": panels,
        "timing": timing,
        "axis_width": WIDTH,
        "uses": list(Use),
        "style": Markup(style),
        "script": Markup(script),
        "policy": _POLICY.format(digest=digest) + (LIVE_POLICY if version else ""),
        "version": version,
    }
    return _environment().get_template("report.html.j2").render(context)


def _coordinate(value: float) -> Markup:
    return Markup(f"{value:.1f}".removesuffix(".0"))


def _path(points: Sequence[tuple[float, float]], digits: int = 1) -> Markup:
    return Markup(" ").join(f"{x:.{digits}f},{y:.{digits}f}".replace(".0", "") for x, y in points)


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"

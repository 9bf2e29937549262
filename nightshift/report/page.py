"""The morning page: report.html, progress.png and report.md, from the ledger alone.

report.html is one file without a network: style, script and drawings are inside. What comes from outside
(descriptions, rollouts, file names) is escaped by Jinja, made visible by `text.visible`, and cannot
run: the page's policy allows its own script alone, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from nightshift.metrics import METRICS_NAME, read_steps
from nightshift.records import Record, Verdict
from nightshift.report import panels, slots, text
from nightshift.report.chart import SIZES, Chart, progress_chart
from nightshift.report.data import Experiment, Morning, gather
from nightshift.report.markdown import summary
from nightshift.report.panels import Panel, Spark
from nightshift.report.runs import CURVES, Rollout, curve_of, lost_game, rollouts
from nightshift.report.slices import SelectionSet, Slice, shown_examples
from nightshift.report.slots import Timeline, timeline
from nightshift.report.text import Headline
from nightshift.report.timing import Night, Use, nights, split_experiment

PICTURE_NAME = "progress.png"
TEMPLATES = Path(__file__).parent / "templates"
# A page of 1,000 experiments stays below 5 MB and 5 s (measured: 4.1 MB, 4.3 s on one core): beyond so many
# experiments the details are those of keeps, of the last ones and of the largest differences.
_MAX_DETAILS = 200
_NUM_LAST = 20
_SPARK_POINTS = 48
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One experiment as the page shows it. Without details curves and times are left out, texts are cut earlier, and
    `rollouts` is None."""

    experiment: Experiment
    uses: Mapping[Use, float]  # its seconds
    sparks: tuple[tuple[str, Spark | None], ...]
    rollouts: tuple[Rollout, ...] | None
    lost_game: Mapping[str, str] = field(default_factory=dict)
    slices: tuple[Slice, ...] = ()  # of a measured change, against the experiment that it was built on


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
    detailed = _detailed(morning.experiments)
    examples = shown_examples(morning.environments, ledger.tsv_path.parent)
    measured = {e.number: e.record for e in morning.experiments if e.standing}
    rows = [_row(e, ledger, measured, examples if e.number in detailed else None) for e in morning.experiments]
    charts = (progress_chart(morning.experiments, size) for size in SIZES)
    return View(
        morning=morning,
        headline=text.headline(morning),
        rows=tuple(rows),
        panels=tuple(panels.key_panels(morning.experiments)),
        charts=tuple(chart for chart in charts if chart is not None),
        nights=tuple(nights([(row.experiment.record, row.uses) for row in rows])),
        slots=timeline([e.record for e in morning.experiments]),
        written=now,
    )


def _row(experiment: Experiment, ledger: Ledger, measured: Mapping[int, Record], examples: SelectionSet | None) -> Row:
    """With details where there are `examples`; the rollouts are those of the last run that was evaluated."""
    record = experiment.record
    if examples is None:
        return Row(experiment, split_experiment(record, [[] for _ in record.runs]), (), None)
    folders = [ledger.attempt_dir(record.number, index, run) for index, run in enumerate(record.runs, 1)]
    steps = [read_steps(folder / METRICS_NAME) for folder in folders]
    curves = {words: [curve_of(name, found, _SPARK_POINTS) for found in steps] for name, words in CURVES.items()}
    parent = measured.get(record.parent or 0) if record.number in measured else None
    scored = [folder for folder, run in zip(folders, record.runs, strict=True) if run.evaluation]
    return Row(
        experiment=experiment,
        uses=split_experiment(record, steps),
        sparks=tuple((words, panels.spark(found)) for words, found in curves.items()),
        rollouts=tuple(one for folder in scored[-1:] for one in rollouts(folder, record.number, examples.texts)),
        lost_game=lost_game(scored[-1]) if scored and record.evaluations[-1].figures else {},
        slices=examples.flips(record, parent) if parent else (),
    )


def _detailed(experiments: Sequence[Experiment]) -> set[int]:
    """Numbers of the experiments that are shown with details: keeps, the last and the most telling ones."""
    keeps = [e for e in experiments if e.record.status == Verdict.KEEP][-_MAX_DETAILS // 2 :]
    telling = sorted(experiments, key=lambda e: -abs(e.delta or 0.0))
    chosen = dict.fromkeys(e.number for e in (*keeps, *experiments[-_NUM_LAST:], *telling))
    return set(list(chosen)[:_MAX_DETAILS])


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
    names = ("score", "signed", "points", "duration", "short_number", "cut", "certificate_line", "transfer_lines")
    environment.filters |= {name: getattr(text, name) for name in names}
    environment.filters |= {"n": _coordinate, "path": _path, "plain": _plain}
    return environment


def render(view: View) -> str:
    """The page as one HTML document."""
    # Both files are ours; neither holds a closing tag.
    style, script = ((TEMPLATES / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    context: dict[str, Any] = {
        "view": view,
        "morning": view.morning,
        "panels": panels,
        "slots": slots,
        "uses": list(Use),
        "style": Markup(style),
        "script": Markup(script),
        "policy": _POLICY.format(digest=digest),
    }
    return _environment().get_template("report.html.j2").render(context)


def _coordinate(value: float) -> Markup:
    return Markup(f"{value:.1f}".removesuffix(".0"))


def _path(points: Sequence[tuple[float, float]], digits: int = 1) -> Markup:
    return Markup(" ").join(f"{x:.{digits}f},{y:.{digits}f}".replace(".0", "") for x, y in points)


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"

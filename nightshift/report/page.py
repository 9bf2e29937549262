"""The morning page: report.html, progress.png and report.md, from the ledger alone.

report.html is one file without a network: style, script and drawings are inside. What comes from outside
(descriptions, rollouts, file names) is escaped by Jinja, made visible by `report_text.visible`, and cannot
run: the page's policy allows its own script alone, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nightshift.campaign.ledger import Ledger
from nightshift.errors import ConfigError, EngineError
from nightshift.files import write_atomically
from nightshift.git.repo import Repo
from nightshift.metrics import Step
from nightshift.records import Verdict
from nightshift.report import panels
from nightshift.report import text as report_text
from nightshift.report.chart import SIZES, Chart, progress_chart
from nightshift.report.data import Experiment, Morning, gather
from nightshift.report.keys import KeyStudy, study
from nightshift.report.markdown import summary
from nightshift.report.panels import Interval, Panel, Spark
from nightshift.report.runs import CURVES, Rollout, problem_texts, rollouts, series_of, steps_of
from nightshift.report.text import Headline, certificate_line, headline
from nightshift.report.timing import Night, Segment, Use, nights, split_experiment, totals
from nightshift.train_toml.config import parse
from nightshift.train_toml.diff import Change, diff

PICTURE_NAME = "progress.png"
TEMPLATES = Path(__file__).parent / "templates"
# A page of 1,000 experiments stays below 5 MB and 5 s (measured: 3 ms to read the steps of a run): beyond
# these numbers of experiments the details are those of keeps, of the last ones and of the largest differences.
_MAX_CURVES = 300
_MAX_ROLLOUTS = 100
_NUM_LAST = 20
_SPARK_POINTS = 48
_MAX_PANELS = 60
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One experiment as the page shows it. Of a brief one, curves and times are left out and texts are cut
    earlier; `rollouts` is None where they are left out."""

    experiment: Experiment
    interval: Interval | None
    segments: tuple[Segment, ...]
    is_brief: bool
    sparks: tuple[tuple[str, Spark | None], ...]
    rollouts: tuple[Rollout, ...] | None


@dataclass(frozen=True, slots=True)
class View:
    """Everything that page, summary and picture are drawn from."""

    morning: Morning
    headline: Headline
    certificate: str
    rows: tuple[Row, ...]
    studies: tuple[KeyStudy, ...]
    panels: tuple[Panel, ...]
    charts: tuple[Chart, ...]
    nights: tuple[Night, ...]
    net: tuple[Change, ...] | None  # incumbent against baseline
    strip: Mapping[Use, Markup]
    tallest_seconds: float
    written: datetime


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one report, and its verdict in a sentence."""

    paths: tuple[Path, ...]
    headline: Headline


def write_report(root: Path, now: datetime, output: Path | None = None, branch: str | None = None) -> Written:
    """Write report.html, report.md and progress.png (not without a measured experiment) into `output`, or runs/.

    Raises UsageError for a branch without experiments, EngineError when the disk refuses.
    """
    from nightshift.report.png import draw

    ledger = Ledger(root)
    view = look(ledger, Repo(root).head().branch, now, branch)
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
        raise EngineError(
            f"cannot write {folder}: {error.strerror or error}", "Free disk space, or give --output."
        ) from None
    return Written(tuple(folder / name for name in files), view.headline)


def look(ledger: Ledger, head_branch: str, now: datetime, branch: str | None = None) -> View:
    """Read the ledger and the files of its runs, and put together what is to be shown."""
    morning = gather(ledger, branch, head_branch)
    with_curves = _chosen(morning.experiments, _MAX_CURVES)
    with_rollouts = _chosen(morning.experiments, _MAX_ROLLOUTS)
    problems = problem_texts(morning.rules) if with_rollouts else {}
    scale = panels.interval_scale([(e.delta, e.delta_spread) for e in morning.experiments])
    rows = []
    for experiment in morning.experiments:
        record = experiment.record
        folder = ledger.run_dir(record.number)
        has_curves, has_rollouts = record.number in with_curves, record.number in with_rollouts
        steps = {run.index: steps_of(folder / f"run-{run.index}") for run in record.runs} if has_curves else {}
        rows.append(
            Row(
                experiment=experiment,
                interval=panels.interval(experiment.delta, experiment.delta_spread, scale),
                segments=tuple(split_experiment(record, steps)),
                is_brief=not has_curves,
                sparks=_sparks(experiment, steps) if has_curves else (),
                rollouts=_rollouts(experiment, folder, problems) if has_rollouts else None,
            )
        )
    segments = {row.experiment.number: row.segments for row in rows}
    strip, tallest = panels.strip([totals(row.segments) for row in rows])
    studies = study(morning.experiments)
    charts = [chart for size in SIZES if (chart := progress_chart(morning.experiments, size)) is not None]
    return View(
        morning=morning,
        headline=headline(morning),
        certificate=certificate_line(morning.certified),
        rows=tuple(rows),
        studies=tuple(studies),
        panels=tuple(panels.panel(one) for one in studies[:_MAX_PANELS]),
        charts=tuple(charts),
        nights=tuple(nights([e.record for e in morning.experiments], segments)),
        net=_net(ledger, morning),
        strip=strip,
        tallest_seconds=tallest,
        written=now,
    )


def _net(ledger: Ledger, morning: Morning) -> tuple[Change, ...] | None:
    """What the incumbent's train.toml changes against the baseline's; None where one cannot be read."""
    if not morning.chain:
        return ()
    ends = (morning.chain[0], morning.chain[-1])
    try:
        old, new = (parse(ledger.source(end.number)) for end in ends)
    except (OSError, ConfigError):
        return None
    return diff(old, new)


def _chosen(experiments: Sequence[Experiment], most: int) -> set[int]:
    """Numbers of the experiments that are shown with details: all, or keeps, the last and the most telling ones."""
    if len(experiments) <= most:
        return {e.number for e in experiments}
    first = [e for e in experiments if e.record.status == Verdict.KEEP][-most // 2 :]
    last = list(experiments[-_NUM_LAST:])
    telling = sorted(experiments, key=lambda e: -abs(e.delta or 0.0))
    return {e.number for e in list({e.number: e for e in (*first, *last, *telling)}.values())[:most]}


def _sparks(experiment: Experiment, steps: Mapping[int, Sequence[Step]]) -> tuple[tuple[str, Spark | None], ...]:
    runs = [(run, steps.get(run.index, ())) for run in experiment.record.runs]
    return tuple((words, panels.spark(series_of(name, runs, _SPARK_POINTS))) for name, words in CURVES.items())


def _rollouts(experiment: Experiment, folder: Path, problems: Mapping[tuple[str, str], str]) -> tuple[Rollout, ...]:
    """From the last evaluated run of the candidate."""
    evaluated = [run for run in experiment.record.runs if run.evaluation is not None and run.side == "candidate"]
    if not evaluated:
        return ()
    return tuple(rollouts(folder / f"run-{evaluated[-1].index}", experiment.number, problems))


@cache  # a night writes the page after every experiment, and compiling the templates is a third of that
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=report_text.visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        name: getattr(report_text, name) for name in ("score", "signed", "points", "duration", "short_number", "cut")
    }
    environment.filters |= {
        "n": _coordinate,
        "path": _path,
        "whole": _whole_path,
        "plain": _plain,
        "totals": totals,
        "pairs": lambda segments: [(segment.use, segment.seconds) for segment in segments],
    }
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
        "uses": list(Use),
        "style": Markup(style),
        "script": Markup(script),
        "policy": _POLICY.format(digest=digest),
    }
    return _environment().get_template("report.html.j2").render(context)


def _coordinate(value: float) -> Markup:
    return Markup(f"{value:.1f}".removesuffix(".0"))


def _path(points: Sequence[tuple[float, float]]) -> Markup:
    return Markup(" ").join(f"{x:.1f},{y:.1f}".replace(".0", "") for x, y in points)


def _whole_path(points: Sequence[tuple[float, float]]) -> Markup:
    return Markup(" ").join(f"{x:.0f},{y:.0f}" for x, y in points)


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"

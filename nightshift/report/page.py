"""The morning page: report.html, progress.png and report.md, from the ledger alone.

report.html is one file without a network: style, script and drawings are inside. What comes from outside
(descriptions, rollouts, file names) is escaped by Jinja, made visible by `text.visible`, and cannot
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
from nightshift.metrics import METRICS_NAME, read_steps
from nightshift.records import Verdict
from nightshift.report import panels, text
from nightshift.report.chart import SIZES, Chart, progress_chart
from nightshift.report.data import Experiment, Morning, gather
from nightshift.report.keys import KeyStudy, study
from nightshift.report.markdown import summary
from nightshift.report.panels import Interval, Panel, Spark
from nightshift.report.runs import CURVES, Rollout, curve_of, problem_texts, rollouts
from nightshift.report.text import Headline
from nightshift.report.timing import Night, Use, nights, split_experiment
from nightshift.train_toml.config import Change, diff, parse

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
    uses: Mapping[Use, float]  # its seconds
    is_brief: bool
    sparks: tuple[tuple[str, Spark | None], ...]
    rollouts: tuple[Rollout, ...] | None


@dataclass(frozen=True, slots=True)
class View:
    """Everything that page, summary and picture are drawn from."""

    morning: Morning
    headline: Headline
    rows: tuple[Row, ...]
    studies: tuple[KeyStudy, ...]
    panels: tuple[Panel, ...]
    charts: tuple[Chart, ...]
    nights: tuple[Night, ...]
    net: tuple[Change, ...] | None  # incumbent against baseline
    strip: tuple[Mapping[Use, Markup], float]  # its paths, and the tallest column in seconds
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
        raise EngineError(
            f"cannot write {folder}: {error.strerror or error}", "Free disk space, or give --output."
        ) from None
    return Written(tuple(folder / name for name in files), view.headline)


def view_of(ledger: Ledger, head_branch: str, now: datetime, branch: str | None = None) -> View:
    """Read the ledger and the files of its runs, and put together what is to be shown."""
    morning = gather(ledger, branch, head_branch)
    with_curves = _chosen(morning.experiments, _MAX_CURVES)
    with_rollouts = _chosen(morning.experiments, _MAX_ROLLOUTS)
    problems = problem_texts(morning.rules, ledger.tsv_path.parent) if with_rollouts else {}
    scale = panels.interval_scale(morning.experiments)
    rows = []
    for experiment in morning.experiments:
        record, number = experiment.record, experiment.number
        folders = [ledger.attempt_dir(number, index, run) for index, run in enumerate(record.runs, 1)]
        steps = [read_steps(folder / METRICS_NAME) if number in with_curves else [] for folder in folders]
        curves = ((words, [curve_of(name, found, _SPARK_POINTS) for found in steps]) for name, words in CURVES.items())
        scored = [folder for folder, run in zip(folders, record.runs, strict=True) if run.evaluation]
        shown = scored[-1:] if number in with_rollouts else []
        answers = [rollout for folder in shown for rollout in rollouts(folder, number, problems)]
        rows.append(
            Row(
                experiment=experiment,
                interval=panels.interval(experiment, scale),
                uses=split_experiment(record, steps),
                is_brief=number not in with_curves,
                sparks=tuple((words, panels.spark(found)) for words, found in curves),
                rollouts=tuple(answers) if number in with_rollouts else None,
            )
        )
    studies = study(morning.experiments)
    charts = [chart for size in SIZES if (chart := progress_chart(morning.experiments, size)) is not None]
    return View(
        morning=morning,
        headline=text.headline(morning),
        rows=tuple(rows),
        studies=tuple(studies),
        panels=tuple(panels.panel(one) for one in studies[:_MAX_PANELS]),
        charts=tuple(charts),
        nights=tuple(nights([(row.experiment.record, row.uses) for row in rows])),
        net=_net(ledger, morning),
        strip=panels.strip([row.uses for row in rows]),
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
    return set(list(dict.fromkeys(e.number for e in (*first, *last, *telling)))[:most])


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
    names = ("score", "signed", "points", "duration", "short_number", "cut", "shortened", "certificate_line")
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

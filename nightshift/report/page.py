"""The morning page: report.html, report.md and progress.png, from the ledger alone.

report.html is one file that needs no network. Text from outside is made visible by `text.visible`, escaped by Jinja,
and set as text by the script. The Content-Security-Policy allows only the two scripts of the page, by their hashes.
"""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import METRICS_NAME, read_steps
from nightshift.campaign.records import ANSWERS_NAME, PAGE_NAME, PICTURE_NAME, SUMMARY_NAME, Rollout, percent
from nightshift.config.train_toml import UNSET, changes_of, spelled
from nightshift.errors import EngineError
from nightshift.files import as_json, read_rows, write_atomically
from nightshift.report import charts, sections, text
from nightshift.report.data import CURVES, Experiment, curves, detailed, gather, split_experiment
from nightshift.report.fields import OF_RUN, fields
from nightshift.report.markdown import summary
from nightshift.report.sections import View
from nightshift.report.slices import SelectionSet, shown_examples
from nightshift.text import clean, local
from nightshift.waiting import lasted

TEMPLATES = Path(__file__).parent / "templates"
_MAX_FLIPS = 2  # examples fixed, and as many broken, with their texts
_MAX_ANSWER, _MAX_PROBLEM, _MAX_DETAIL = 240, 600, 1000  # characters
_MAX_DATA = 60_000  # of train.toml and the notebook
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}; "
    "base-uri 'none'; form-action 'none'"
)
# The columns of figures by the names of their fields in a row. The script sorts by them.
COLUMNS = {
    "eval_score": "score",
    "effect_at_decision": "effect, pp",
    "p_helps": "P(it helps)",
    "total_seconds": "time",
}


def write_report(
    root: Path, now: datetime, output: Path | None = None, branch: str | None = None, *, is_live: bool = False
) -> tuple[View, list[Path]]:
    """Write report.html, report.md and, if a score was measured, progress.png into `output`; None: into runs/.
    UsageError for a branch without experiments, EngineError if the disk refuses. `is_live`: see `render`."""
    ledger = Ledger(root)
    folder = output or ledger.runs_dir
    view = view_of(ledger, now, branch)
    picture = view.data["specs"]["progress"]
    files = {PAGE_NAME: render(view, is_live).encode(), SUMMARY_NAME: summary(view).encode()}
    if picture is not None:
        files[PICTURE_NAME] = charts.png(picture, view.headline.title, text.visible(view.morning.story.branch, 80))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(folder / name, data)
    except OSError as error:
        fix = "Free disk space, or write elsewhere: uv run nightshift report --output FOLDER."
        raise EngineError(f"cannot write {folder}: {error.strerror or error}", fix) from None
    return view, [folder / name for name in files]


def view_of(ledger: Ledger, now: datetime, branch: str | None = None) -> View:
    """Read the ledger and the files of its runs, and return what page and report.md show."""
    morning = gather(ledger, branch)
    story, experiments = morning.story, morning.experiments
    shown = detailed(experiments)
    steps = {n: read_steps(ledger.run_dir(n) / METRICS_NAME) for n in shown}
    examples = shown_examples(story.records[-1].environments if experiments else (), ledger.root)
    rows, seconds = list[dict[str, Any]](), Counter[str]()
    for e in experiments:
        uses = split_experiment(e.record, steps.get(e.number, ()))
        seconds.update(uses)
        rows.append(_row(e, uses))
        if e.number in shown:
            config = story.configs.get(e.number)
            rows[-1]["settings"] = config and {path: spelled(config.shown(path)) for path in config.resolved}
            rows[-1]["curves"] = curves(steps[e.number])
            rows[-1]["details"] += _flips(e, shown.get(e.record.parent or 0), examples, ledger)
    names = [name for name in CURVES if any(name in row.get("curves", ()) for row in rows)]
    data = {
        "rows": rows,
        "columns": COLUMNS,
        "first": [e.number for e in experiments if e.kind in ("baseline", "keep")],
        "specs": {
            "progress": charts.progress(experiments, morning.standing),
            **{f"curve-{name}": charts.curve(name) for name in names},
        },
    }
    return View(morning, text.headline(morning), sections.sections(morning, seconds), data, now)


def _row(e: Experiment, uses: Mapping[str, float]) -> dict[str, Any]:
    """Return the line of an experiment with the details that its record has. `uses`: seconds by use."""
    record, row = e.record, e.row
    line = (*OF_RUN, *COLUMNS, "run", "verdict", "now")  # fields that the line has
    details = [field for field in fields(record, row, text.score) if field[0] not in line]
    details.append(("time", ", ".join(f"{use} {lasted(seconds)}" for use, seconds in uses.items())))
    return {
        **{name: getattr(row, name) for name in (*COLUMNS, "number", "now", "status", "failure")},
        "verdict": e.verdict,
        "kind": e.kind,
        "title": clean(record.proposal.description, 120),
        "note": text.remark(e),
        "changes": [[c.key, c.old or UNSET, c.new or UNSET] for c in changes_of(record.diff) if c.old != c.new],
        "cells": {
            "eval_score": text.score(row.eval_score),
            "effect_at_decision": text.plus_minus(row.effect),
            "p_helps": text.UNKNOWN if row.p_helps is None else percent(row.p_helps),
            "total_seconds": text.UNKNOWN if row.total_seconds is None else lasted(row.total_seconds),
        },
        "details": [(label, text.cut(words, _MAX_DETAIL)) for label, words in details if words],
    }


def _flips(e: Experiment, parent: Experiment | None, examples: SelectionSet, ledger: Ledger) -> list[tuple[str, str]]:
    """Return which examples an experiment fixed and broke against its parent, as details: how many, and some texts."""
    if parent is None or not (lines := examples.flips(e.record, parent.record)):
        return []
    details = [(f"examples against {parent.number:04d}", text.cut("\n".join(lines), 2 * _MAX_DETAIL))]
    gains = np.subtract(examples.scores(e.record), examples.scores(parent.record))
    signs = {"fixed": 1, "broken": -1}
    places = {place: word for word, sign in signs.items() for place in np.flatnonzero(sign * gains > 0)[:_MAX_FLIPS]}
    before, after = (
        {(row.environment, row.key): text.cut(row.completion, _MAX_ANSWER) for row in read_rows(path, Rollout, places)}
        for path in (ledger.run_dir(number) / ANSWERS_NAME for number in (parent.number, e.number))
    )
    for place, word in places.items():
        key, problem = list(examples.texts.items())[place]
        if key in before and key in after:
            answers = f"{parent.number:04d}: {before[key]}\n{e.number:04d}: {after[key]}"
            details.append((word, f"{text.cut(problem, _MAX_PROBLEM)}\n{answers}"))
    return details


@cache  # a night writes the page after every experiment; compiling the templates takes a third of the time
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=text.visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"linked": _linked, "whole": lambda value: escape(text.visible(value, _MAX_DATA))}
    return environment


def _linked(words: str) -> Markup:
    """Return a text as HTML with a link at each number of an experiment."""
    link = r'<a href="#run-\g<0>">\g<0></a>'
    return Markup(re.sub(r"(?<![\w.-])0\d{3}(?!\.?\w)", link, str(escape(text.visible(words)))))


@cache  # 2 s
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script."""
    import vl_convert

    return f"(() => {{{vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')}\n}})();"


def draw_page(root: Path, branch: str | None) -> str:
    """Return the page of a checkout as HTML. Raises UsageError for a branch without experiments."""
    ledger = Ledger(root)
    return render(view_of(ledger, datetime.now(UTC), branch), ledger.is_running())


def render(view: View, is_live: bool = False) -> str:
    """Return the page as one HTML document. `is_live`: the page reloads itself every 30 s."""
    # Scripts of this package and of vl-convert: no closing tag is in them.
    scripts = [_vega(), (TEMPLATES / "report.js").read_text(encoding="utf-8")] if view.morning.experiments else []
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    data = as_json(text.visible(view.data)).decode()
    picture = view.data["specs"]["progress"]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            view=view,
            is_live=is_live,
            run_terms=sections.RUN_TERMS,
            has_bars=len(view.morning.experiments) <= charts.MANY,
            policy=_POLICY.format(hashes=hashes),
            picture=Markup(charts.svg(picture)) if picture else None,
            written=local(view.written),
            style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
            scripts=[Markup(script) for script in scripts],
            data=Markup(data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")),
        )
    )

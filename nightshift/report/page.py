"""The morning page: report.html, report.md and progress.png, from the ledger alone.

report.html is one file that needs no network. Text from outside (descriptions, rollouts, file names) is made visible by
`text.visible`, escaped by Jinja, and set as text by the script. The page's Content-Security-Policy allows only the two
scripts of the page, by their hashes; Vega interprets its expressions without `eval`.
"""

import base64
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
from markupsafe import Markup, escape

from nightshift.agents.history import KeyHistory, history
from nightshift.agents.notebook import notebook
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import METRICS_NAME, read_steps
from nightshift.campaign.records import (
    ANSWERS_NAME,
    NOT_ISOLATED,
    PAGE_NAME,
    PICTURE_NAME,
    SUMMARY_NAME,
    Record,
    Rollout,
)
from nightshift.config.train_toml import UNSET, spelled
from nightshift.errors import EngineError
from nightshift.files import cache_dir, read_rows, write_atomically
from nightshift.report import charts, text
from nightshift.report.data import CURVES, Experiment, Morning, curves, decided_by_user, detailed, gather, lost_game
from nightshift.report.fields import OF_RUN, fields
from nightshift.report.markdown import summary
from nightshift.report.slices import SelectionSet, shown_examples
from nightshift.report.steps import copied, next_steps, nothing_to_copy
from nightshift.report.text import View
from nightshift.report.timing import Seconds, Use, nights, split_experiment
from nightshift.text import clean, counted, local

TEMPLATES = Path(__file__).parent / "templates"
_MAX_TEXTS = 4000  # answers: with 150 experiments those to 26 examples
_MAX_EXAMPLES = 120
_MAX_ANSWER, _MAX_PROBLEM = 240, 600  # characters
_MAX_DATA = 60_000  # of a value: train.toml, or one character for each example of a run; texts are cut before
_FIRST_LEVEL, _MAX_LEVELS = 48, 79  # a score is a character, from "0" on to "~"
_MAX_KEYS = 12  # charts of values; the others are in `nightshift history`
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
    "strict_score": "in requested format",
}
# Fields that the line itself has.
_IN_LINE = (*COLUMNS, "run", "verdict", "now")


def write_report(
    root: Path, now: datetime, output: Path | None = None, branch: str | None = None, *, is_live: bool = False
) -> tuple[View, list[Path]]:
    """Write report.html, report.md and, if a score was measured, progress.png into `output`; None: into runs/.

    `is_live`: see `render`. Raises UsageError for a branch without experiments, EngineError if the disk refuses.
    """
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
        if picture is None:
            (folder / PICTURE_NAME).unlink(missing_ok=True)  # of another campaign
    except OSError as error:
        cause = f"cannot write {folder}: {error.strerror or error}"
        fix = "Free disk space, or write elsewhere: uv run nightshift report --output FOLDER."
        raise EngineError(cause, fix) from None
    return view, [folder / name for name in files]


def view_of(ledger: Ledger, now: datetime, branch: str | None = None) -> View:
    """Read the ledger and the files of its runs, and return what page and report.md show."""
    morning = gather(ledger, branch)
    campaign, keys, table = morning.story.campaign, list[KeyHistory](), _Table(morning)
    if morning.configs is not None and campaign.baseline is not None:
        tried = history(campaign, morning.story.configs, morning.configs[1]).keys
        keys = [key for key in tried if sum(row.mean_score is not None for row in key.values) > 1]
    return View(
        morning=morning,
        headline=text.headline(morning),
        facts=tuple(_facts(morning)),
        nothing_to_copy=nothing_to_copy(morning),
        copied=tuple(copied(morning)),
        next_steps=tuple(next_steps(campaign, morning.agent, is_certified=morning.is_certified)),
        keys=tuple(keys),
        nights=tuple(nights(table.times)),
        notebook=notebook(campaign).partition("\n")[2].strip(),
        data=table.data(morning, keys),
        written=now,
    )


def _facts(morning: Morning) -> Iterator[tuple[str, str]]:
    """Yield task, model, budget, hardware and engine, and the agent's direction and missing isolation."""
    if not morning.experiments:
        return
    records = morning.story.records
    last, rules = records[-1], next(filter(None, map(morning.story.rules, reversed(records))), None)
    seconds = rules.budget_text if rules else last.budget_seconds and f"{last.budget_seconds:g} s"
    yield "task", " + ".join(last.environments)
    yield "model", rules.model if rules else "not recorded"
    yield "budget", f"{seconds} of training a run" if seconds else "not recorded"
    yield "hardware", clean(last.hardware, 120)
    yield "engine", last.engine
    if morning.direction:
        yield "direction", morning.direction
    if number := sum(not e.record.proposal.is_isolated for e in morning.experiments):
        yield "isolation", f"agent: {NOT_ISOLATED} in {counted(number)} (--sandbox none)"


def _dividing(scores: Sequence[tuple[float, ...]], examples: SelectionSet) -> dict[tuple[str, str], int]:
    """Return the examples whose answers are shown, with their places: the examples with the most different scores."""
    if len(scores) < 2:
        return {}
    spread = np.var(scores, axis=0)
    most = min(_MAX_TEXTS // len(scores), _MAX_EXAMPLES)
    keys = list(examples.texts)
    return {keys[at]: at for at in np.argsort(-spread, kind="stable")[:most].tolist() if spread[at] > 0}


def _adds(row: dict[str, Any], name: str) -> bool:
    """Return True if a figure of a row is measured and not the score once more."""
    return row[name] is not None and (name == "eval_score" or row[name] != row["eval_score"])


class _Table:
    """The lines of the table with their details. For experiments chosen by `detailed`, the details include what the
    files of the run contain. `times`: the seconds of each experiment by use."""

    def __init__(self, morning: Morning) -> None:
        story, configs = morning.story, morning.story.configs
        self._ledger = story.ledger
        self._shown = {e.number: e.record for e in detailed(morning.experiments)}
        self._measured = {e.number: e.record for e in morning.experiments if e.standing}
        names = story.records[-1].environments if story.records else ()
        self._examples = shown_examples(names, story.ledger.root)
        scores = map(self._examples.scores, self._shown.values())
        self._wanted = _dividing([*filter(None, scores)], self._examples)
        known = {number: configs[number] for number in self._shown if number in configs}
        paths = dict.fromkeys(path for config in known.values() for path in config.values)
        self._settings = {n: {path: spelled(config.shown(path)) for path in paths} for n, config in known.items()}
        self._first = next(iter(self._settings.values()), {})
        runs = [record.evaluation.example_scores for record in self._shown.values() if record.evaluation]
        levels = sorted(set().union(*runs))
        self._letters = {v: chr(_FIRST_LEVEL + i) for i, v in enumerate(levels)} if len(levels) <= _MAX_LEVELS else {}
        self._texts, self._problems = dict[str, int](), dict[int, str]()
        self.times = list[tuple[Record, Seconds]]()
        self.rows = [self._row(e, len(morning.experiments)) for e in morning.experiments]

    def data(self, morning: Morning, keys: Sequence[KeyHistory]) -> dict[str, Any]:
        """Return the data of the page's script: rows, settings, answers and charts."""
        experiments, span = morning.experiments, charts.domain(morning.experiments, morning.standing)
        measured = {e.number: e.row.eval_score for e in experiments}
        curves = dict.fromkeys(name for row in self.rows for name in row.get("curves", {}).get("values", ()))
        return {
            "rows": self.rows,
            # A column without values, or with the same values as the score, is left out.
            "columns": {n: h for n, h in COLUMNS.items() if any(_adds(row, n) for row in self.rows)},
            "settings": self._first,
            "problems": self._problems,
            "texts": list(self._texts),
            "first": [e.number for e in experiments if e.kind in ("baseline", "keep")],
            "specs": {
                "progress": charts.progress(experiments, morning.standing),
                **{f"key-{i}": charts.values(key, measured, span) for i, key in enumerate(keys[:_MAX_KEYS]) if span},
                **{f"curve-{name}": charts.curve(name) for name in CURVES if name in curves},
            },
        }

    def _row(self, e: Experiment, num_experiments: int) -> dict[str, Any]:
        record, row, is_shown = e.record, e.row, e.number in self._shown
        details = [field for field in fields(record, row, text.score) if field[0] not in (*OF_RUN, *_IN_LINE)]
        details.append(("your commit", "\n".join(decided_by_user(record.user_decisions))))
        more = dict[str, Any]()
        if is_shown:
            more = self._of_files(record, details)
        else:
            self.times.append((record, split_experiment(record, [])))
            words = f"left out of a page of {counted(num_experiments)}: they are in runs/{e.number:04d}/"
            details.append(("curves, times, answers", words))
        changes = [[c.key, c.old or UNSET, c.new or UNSET] for c in e.changes if c.old != c.new]
        return more | {
            **{name: getattr(row, name) for name in COLUMNS},
            "number": row.number,
            "now": row.now,
            "verdict": e.verdict,
            "status": row.status,
            "failure": row.failure or "",
            "kind": e.kind,
            "title": clean(record.proposal.description, 120),
            "note": text.remark(e),
            "changes": changes or [[line, "", ""] for line in record.diff],
            "cells": {
                "eval_score": text.score(row.eval_score, text.UNKNOWN),
                "effect_at_decision": text.plus_minus(row.effect),
                "p_helps": text.share(row.p_helps),
                "total_seconds": text.UNKNOWN if row.total_seconds is None else text.duration(row.total_seconds),
                "strict_score": text.score(row.strict_score, text.UNKNOWN),
            },
            "details": [(label, text.cut(words, 2000 if is_shown else 240)) for label, words in details if words],
        }

    def _of_files(self, record: Record, details: list[tuple[str, str]]) -> dict[str, Any]:
        """Return curves, settings, scores and answers of an experiment, and add texts to its `details`."""
        folder, evaluation, more = self._ledger.run_dir(record.number), record.evaluation, dict[str, Any]()
        steps = read_steps(folder / METRICS_NAME) if record.result else []
        uses = split_experiment(record, steps)
        self.times.append((record, uses))
        times = (f"{u} {text.duration(t)} ({100 * t / sum(uses.values()):.0f} %)" for u, t in uses.items())
        details.append(("time", ", ".join(times)))
        if record.result:
            more["curves"] = curves(steps)
        if own := self._settings.get(record.number):
            more["settings"] = {key: value for key, value in own.items() if value != self._first.get(key)}
        if evaluation is None:
            return more
        share, length = 100 * evaluation.truncated_share, evaluation.completion_tokens_mean
        details.append(("answers", f"{share:.1f} % reached the token limit; {length:.4g} tokens on average"))
        places = None if evaluation.figures else self._wanted.values()
        answers = read_rows(folder / ANSWERS_NAME, Rollout, places) if places is None or places else []
        game = "\n".join(f"{clean(what, 20)}: {clean(value, 100)}" for what, value in lost_game(answers).items())
        details.append(("a game that it lost", game))
        parent = self._measured.get(record.parent or 0) if record.number in self._measured else None
        lines = [
            f"{clean(s.name, 80)}: {counted(s.num_examples, 'example')}, {s.fixed} fixed, {s.broken} broken, "
            f"net {s.fixed - s.broken:+d} ± {s.spread:.0f}"
            for s in (self._examples.flips(record, parent) if parent else ())
        ]
        details.append((f"examples against {record.parent or 0:04d}", "\n".join(lines)))
        if not self._letters:
            return more
        more["scores"] = "".join(map(self._letters.__getitem__, evaluation.example_scores))
        more["set"], more["answers"] = evaluation.examples_sha256[:12], {}
        for answer in answers if evaluation.examples_sha256 == self._examples.digest else ():
            if (place := self._wanted.get(key := (answer.environment, answer.key))) is not None:
                self._problems[place] = text.cut(self._examples.texts[key], _MAX_PROBLEM)
                words = text.cut(answer.completion, _MAX_ANSWER)
                more["answers"][place] = self._texts.setdefault(words, len(self._texts))
        return more


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
    environment.globals["text"] = text
    environment.filters["local"] = lambda moment: local(datetime.fromisoformat(str(moment)))
    return environment


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script. Bundling takes 2 s, so the script of a
    version is stored in the user's cache."""
    import vl_convert

    folder = cache_dir(os.environ)
    path = folder / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    script = f"(() => {{{vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')}\n}})();"
    with suppress(OSError):  # the next process bundles again
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, script.encode())
    return script


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
    data = msgspec.json.encode(text.visible(view.data, _MAX_DATA)).decode()
    picture = view.data["specs"]["progress"]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            view=view,
            morning=view.morning,
            is_live=is_live,
            uses=list(Use),
            max_keys=_MAX_KEYS,
            max_values=charts.MAX_VALUES,
            has_bars=len(view.morning.experiments) <= charts.MANY,
            policy=_POLICY.format(hashes=hashes),
            picture=Markup(charts.svg(picture)) if picture else None,
            train_toml=escape(text.visible(view.train_toml, _MAX_DATA)),
            notebook=escape(text.visible(view.notebook, _MAX_DATA)),
            style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
            scripts=[Markup(script) for script in scripts],
            data=Markup(data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")),
        )
    )

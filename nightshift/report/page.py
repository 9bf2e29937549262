"""The morning page: report.html, progress.svg and report.md, from the ledger alone.

report.html is one file without a network: style, scripts, data and drawings are inside. What comes from outside
(descriptions, rollouts, file names) is escaped by Jinja, made visible by `text.visible`, and cannot run: the page's
policy allows its own script alone, by its hash. A page of 1,000 experiments stays below 5 MB and 5 s of one core.
"""

import base64
import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
from markupsafe import Markup

from nightshift.agents.history import load_configs
from nightshift.agents.notebook import compare_prediction, notebook
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import PAGE_NAME, PICTURE_NAME, SUMMARY_NAME
from nightshift.config.train_toml import spelled
from nightshift.errors import EngineError
from nightshift.files import write_atomically
from nightshift.report import text
from nightshift.report.charts import (
    LEFT,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    RIGHT,
    WIDTH,
    Chart,
    Panel,
    key_panels,
    progress_chart,
)
from nightshift.report.data import (
    CURVES,
    Experiment,
    Morning,
    counted,
    decided_by_user,
    detailed,
    gather,
    with_details,
)
from nightshift.report.markdown import summary
from nightshift.report.slices import SelectionSet, shown_examples
from nightshift.report.text import Headline
from nightshift.report.timing import Night, Use, nights, split_experiment

_MAX_TEXTS = 6000  # answers: with 150 experiments those to 40 examples
_MAX_EXAMPLES = 200
_MAX_ANSWER, _MAX_PROBLEM = 240, 600  # characters
_FIRST_LEVEL, _MAX_LEVELS = 48, 79  # a score is a character, from "0" on to "~"
FIGURES = ("verdict", "score", "strict score", "effect_at_decision")

Keys = frozenset[tuple[str, str]]  # of examples: (package, key)
Settings = Mapping[str, str]  # by key


def dividing(experiments: Sequence[Experiment], examples: SelectionSet) -> Keys:
    """The examples whose answers are told: those with the most different scores."""
    scores = [told for e in experiments if (told := examples.scores(e.record)) is not None]
    if len(scores) < 2:
        return frozenset()
    spread = np.var(scores, axis=0)
    most = min(_MAX_TEXTS // len(scores), _MAX_EXAMPLES)
    keys = list(examples.texts)
    return frozenset(keys[place] for place in np.argsort(-spread, kind="stable")[:most] if spread[place] > 0)


def data_block(experiments: Sequence[Experiment], settings: Mapping[int, Settings], examples: SelectionSet) -> Markup:
    shown = [e for e in experiments if e.rollouts is not None]
    keys = list(dict.fromkeys(key for e in shown for key in e.answers))
    places = {key: index for index, key in enumerate(examples.texts)}
    texts = dict[str, int]()  # the same answer is told once
    levels = _levels(shown)
    first = next(iter(settings.values()), {})
    block = {
        "figures": FIGURES,
        "curves": CURVES,
        "settings": first,
        "examples": {
            places[key]: [text.visible(text.cut(examples.texts[key], _MAX_PROBLEM))] for key in keys if key in places
        },
        "experiments": {
            str(e.number): {
                **_told(e, first, settings.get(e.number)),
                **_scores(e, levels),
                "answers": {
                    places[key]: texts.setdefault(str(text.visible(text.cut(one.completion, _MAX_ANSWER))), len(texts))
                    for key, one in e.answers.items()
                    if key in places and examples.scores(e.record) is not None
                },
            }
            for e in shown
        },
    }
    block["texts"] = list(texts)
    encoded = msgspec.json.encode(block).decode()
    return Markup(encoded.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _told(e: Experiment, first: Settings, own: Settings | None) -> dict[str, Any]:
    scores = (text.score(score, text.UNKNOWN) for score in (e.record.score, e.record.strict_score))
    return {
        "title": text.visible(text.brief(e.record.proposal.description, 70)),
        "figures": (e.row.status, *scores, text.effect(e.effect)),
        "settings": None if own is None else {key: v for key, v in own.items() if v != first.get(key)},
        "curves": e.curves or None,
    }


def _levels(experiments: Sequence[Experiment]) -> dict[float, str]:
    """A character for each score that an example got; none where they are too many."""
    found = {value for e in experiments for value in _example_scores(e)}
    return {value: chr(_FIRST_LEVEL + i) for i, value in enumerate(sorted(found))} if len(found) <= _MAX_LEVELS else {}


def _scores(e: Experiment, levels: Mapping[float, str]) -> dict[str, str]:
    """Of its run, an example a character; of the same `set` are the scores of the same examples."""
    scores, evaluation = _example_scores(e) if levels else (), e.record.evaluation
    if not scores or evaluation is None:
        return {}
    return {"scores": "".join(map(levels.__getitem__, scores)), "set": evaluation.examples_sha256[:12]}


def _example_scores(e: Experiment) -> tuple[float, ...]:
    return e.record.evaluation.example_scores if e.record.evaluation else ()


TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("draw", "table", "compare", "start")
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, slots=True)
class View:
    """Everything that page, summary and picture are drawn from."""

    morning: Morning
    headline: Headline
    panels: tuple[Panel, ...]
    chart: Chart | None
    nights: tuple[Night, ...]
    compared: Markup  # JSON
    notebook: tuple[str, ...]  # its lines; none where it says nothing
    written: datetime


def write_report(
    root: Path, now: datetime, output: Path | None = None, branch: str | None = None, *, is_live: bool = False
) -> tuple[Headline, list[Path]]:
    """Write report.html, report.md and progress.svg (not without a measured experiment) into `output`, or runs/.

    `is_live`: see `render`. Raises UsageError for a branch without experiments, EngineError when the disk refuses.
    """
    ledger = Ledger(root)
    folder = output or ledger.runs_dir
    with _writable(folder):
        if folder.is_dir():
            tempfile.TemporaryFile(dir=folder).close()  # refused before the page is drawn
    view = view_of(ledger, now, branch)
    files = {
        PAGE_NAME: render(view, is_live).encode(),
        SUMMARY_NAME: summary(view.morning, view.headline, view.nights, view.chart is not None).encode(),
    }
    if view.chart is not None:
        files[PICTURE_NAME] = _environment().get_template("progress.svg.j2").render(_context(view)).encode()
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(folder / name, data)
        if view.chart is None:
            (folder / PICTURE_NAME).unlink(missing_ok=True)  # one of another campaign would lie beside this page
    return view.headline, [folder / name for name in files]


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Raise EngineError, which says where else to write, when the disk refuses to write into `folder`."""
    try:
        yield
    except OSError as error:
        cause = f"cannot write {folder}: {error.strerror or error}"
        fix = "Free disk space, or write elsewhere: uv run nightshift report --output FOLDER."
        raise EngineError(cause, fix) from None


def view_of(ledger: Ledger, now: datetime, branch: str | None = None) -> View:
    """Read the ledger and the files of its runs, and put together what is to be shown."""
    morning = gather(ledger, branch)
    shown = detailed(morning.experiments)
    examples = shown_examples(morning.story.records[-1].environments if morning.story.records else (), ledger.root)
    wanted = dividing(shown, examples)
    measured = {e.number: e.record for e in morning.experiments if e.standing}
    details = {e.number: with_details(e, ledger, measured, examples, wanted) for e in shown}
    experiments = tuple(
        details.get(e.number) or replace(e, uses=split_experiment(e.record, [])) for e in morning.experiments
    )
    morning = replace(morning, experiments=experiments)
    configs = load_configs(ledger, [e.record for e in shown])
    keys = list(dict.fromkeys(key for config in configs.values() for key in config.values))
    settings = {number: {key: spelled(config.shown(key)) for key in keys} for number, config in configs.items()}
    _, *entries = notebook(morning.story.campaign).rstrip().split("\n")
    return View(
        morning=morning,
        headline=text.headline(morning),
        panels=tuple(key_panels(morning.experiments, morning.story.campaign.kept)),
        chart=progress_chart(morning.experiments, morning.standing),
        nights=tuple(nights([(e.record, e.uses) for e in experiments])),
        compared=data_block(experiments, settings, examples),
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
        "score", "signed", "duration", "short_number", "cut", "brief", "plus_minus", "effect", "share",
        "besides", "local", "half", "certificate_line", "elsewhere_lines",
    )  # fmt: skip
    environment.filters |= {name: getattr(text, name) for name in names}
    environment.filters |= {"n": _coordinate, "path": _path, "plain": _plain, "counted": counted}
    environment.filters |= {"decided_by_user": decided_by_user, "compare_prediction": compare_prediction}
    return environment


def draw_page(root: Path, branch: str | None) -> str:
    """Return the page of a checkout as HTML. Raises UsageError for a branch without experiments."""
    ledger = Ledger(root)
    return render(view_of(ledger, datetime.now(UTC), branch), ledger.is_running())


def render(view: View, is_live: bool = False) -> str:
    """Return the page as one HTML document. `is_live`: the page reloads itself every 30 s."""
    # These files are ours; none holds a closing tag.
    script = "".join((TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = _POLICY.format(digest=digest)
    context = {"uses": list(Use), "script": Markup(script), "policy": policy, "is_live": is_live}
    return _environment().get_template("report.html.j2").render(_context(view) | context)


def _context(view: View) -> dict[str, Any]:
    sizes = {"width": WIDTH, "left": LEFT, "right": RIGHT, "panel_width": PANEL_WIDTH, "panel_height": PANEL_HEIGHT}
    style = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
    return {"view": view, "morning": view.morning, "style": style, **sizes}


def _coordinate(value: float) -> Markup:
    return Markup(f"{value:.1f}".removesuffix(".0"))


def _path(points: Sequence[tuple[float, float]], digits: int = 1) -> Markup:
    return Markup(" ").join(f"{x:.{digits}f},{y:.{digits}f}".replace(".0", "") for x, y in points)


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"

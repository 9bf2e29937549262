"""The morning page: report.html, report.md and progress.png, from the ledger alone.

report.html is one file without a network: style, scripts and data are inside. Text from outside (descriptions,
rollouts, file names) is made visible by `text.visible`, escaped by Jinja, and set as text by the script. The page's
policy allows its own two scripts alone, by their hashes; Vega interprets its expressions without `eval`.
"""

import base64
import hashlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
from nightshift.agents.notebook import compare_prediction, notebook
from nightshift.campaign.commits import short_key
from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import PAGE_NAME, PICTURE_NAME, SUMMARY_NAME
from nightshift.config.train_toml import Config, parse, spelled
from nightshift.errors import EngineError, UsageError
from nightshift.files import cache_dir, write_atomically
from nightshift.report import charts, text
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
from nightshift.report.text import Headline, View
from nightshift.report.timing import Use, nights, split_experiment

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
# Of a row, as the script sorts and filters by them.
_FIELDS = ("number", "now", "eval_score", "strict_score", "effect_at_decision", "p_helps", "total_seconds")


def write_report(
    root: Path, now: datetime, output: Path | None = None, branch: str | None = None, *, is_live: bool = False
) -> tuple[Headline, list[Path]]:
    """Write report.html, report.md and progress.png (not without a measured experiment) into `output`, or runs/.

    `is_live`: see `render`. Raises UsageError for a branch without experiments, EngineError when the disk refuses.
    """
    ledger = Ledger(root)
    folder = output or ledger.runs_dir
    view = view_of(ledger, now, branch)
    morning, picture = view.morning, charts.progress(view.morning.experiments, view.morning.standing, charts.LIGHT)
    files = {PAGE_NAME: render(view, is_live).encode(), SUMMARY_NAME: summary(view, picture is not None).encode()}
    if picture is not None:
        files[PICTURE_NAME] = charts.png(picture, view.headline.title, text.visible(morning.story.branch, 80))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(folder / name, data)
        if picture is None:
            (folder / PICTURE_NAME).unlink(missing_ok=True)  # one of another campaign would lie beside this page
    except OSError as error:
        cause = f"cannot write {folder}: {error.strerror or error}"
        fix = "Free disk space, or write elsewhere: uv run nightshift report --output FOLDER."
        raise EngineError(cause, fix) from None
    return view.headline, [folder / name for name in files]


def view_of(ledger: Ledger, now: datetime, branch: str | None = None) -> View:
    """Read the ledger and the files of its runs, and put together what is to be shown."""
    morning = gather(ledger, branch)
    campaign, records = morning.story.campaign, morning.story.records
    shown = detailed(morning.experiments)
    examples = shown_examples(records[-1].environments if records else (), ledger.root)
    wanted = _dividing([scores for e in shown if (scores := examples.scores(e.record))], examples)
    measured = {e.number: e.record for e in morning.experiments if e.standing}
    details = {e.number: with_details(e, ledger, measured, examples, wanted) for e in shown}
    experiments = tuple(
        details.get(e.number) or replace(e, uses=split_experiment(e.record, [])) for e in morning.experiments
    )
    morning = replace(morning, experiments=experiments)
    configs = morning.story.configs
    keys: tuple[KeyHistory, ...] = ()
    if morning.configs is not None and campaign.baseline is not None:
        found = history(campaign, configs, morning.configs[1]).keys
        keys = tuple(key for key in found if sum(row.mean_score is not None for row in key.values) > 1)
    return View(
        morning=morning,
        headline=text.headline(morning),
        facts=tuple(_facts(morning)),
        copied=tuple(_copied(morning)),
        next_steps=tuple(_next_steps(morning)),
        keys=keys,
        nights=tuple(nights([(e.record, e.uses) for e in experiments])),
        notebook=notebook(campaign).partition("\n")[2].strip(),
        data=_data(morning, keys, configs, examples),
        written=now,
    )


def _facts(morning: Morning) -> Iterator[tuple[str, str]]:
    """Yield what the campaign trains, on what and for how long, and what restricts its agent."""
    if not morning.experiments:
        return
    records = morning.story.records
    last, rules = records[-1], next(filter(None, map(morning.story.rules, reversed(records))), None)
    seconds = rules.budget_text if rules else last.budget_seconds and f"{last.budget_seconds:g} s"
    yield "task", " + ".join(last.environments)
    yield "model", rules.model if rules else "not recorded"
    yield "budget", f"{seconds} of training a run" if seconds else "not recorded"
    yield "hardware", text.brief(last.hardware, 120)
    yield "engine", last.engine
    if morning.direction:
        yield "direction", morning.direction
    if morning.isolation:
        yield "isolation", morning.isolation


def _copied(morning: Morning) -> Iterator[tuple[str, str]]:
    """Yield the commands that print the incumbent's changes to train.toml, each with a sentence. A commit is named only
    if git has it and its train.toml trains as the campaign's does."""
    campaign, repo = morning.story.campaign, Repo(morning.story.ledger.root)
    if morning.configs is None or campaign.baseline is None or not morning.kept:
        return
    commits = list[str]()
    for record in campaign.decided:
        commits += [decision.commit for decision in record.user_decisions if decision.commit]
        commits += record.commits.values()
    commits += [decision.commit for decision in campaign.user_decisions if decision.commit]
    first = campaign.baseline.commit or ""
    tips = [name for name in (*commits[-1:], morning.story.branch) if _trains(repo, name, morning.configs[1])]
    if tips and _trains(repo, first, morning.configs[0]):
        tip = tips[0][:10] if tips[0] in commits else tips[0]
        yield "The incumbent against the baseline:", f"git diff {first[:10]} {shlex.quote(tip)} -- train.toml"
    yield "The incumbent against the baseline, key by key:", "uv run nightshift diff baseline incumbent"


def _trains(repo: Repo, commit: str, config: Config) -> bool:
    """Return True if the train.toml of a commit trains the same as `config`."""
    with suppress(UsageError, EngineError):
        source = repo.config_at(commit)
        return source is not None and parse(source).hash == config.hash
    return False


def _next_steps(morning: Morning) -> Iterator[tuple[str, str]]:
    """Yield what the user may do next: a sentence and its command."""
    posterior = morning.story.campaign.posterior
    if posterior is None:
        yield "Measure the baseline:", "uv run run.py"
        return
    if morning.kept and (morning.certificate is None or morning.obsolete):
        yield "Certify the gain with fresh seeds on the test split:", "uv run nightshift certify"
    least = posterior.rules.keep_at
    for kept in morning.kept:
        if kept.effect.p_helps < least:
            p, limit = text.share(kept.effect.p_helps), text.share(least)
            sentence = f"{kept.change.name} helps with P {p} only, below the {limit} of a keep. To take it out:"
            is_numbered = bool(kept.change.experiment)
            command = f"uv run nightshift revert {kept.change.name}" if is_numbered else f"git revert {kept.commit}"
            yield sentence, command
    yield "Continue the search:", "uv run nightshift night --agent claude --hours 8"
    if morning.kept:
        yield "Take the weights home:", "uv run nightshift export --to model"


def _dividing(scores: Sequence[tuple[float, ...]], examples: SelectionSet) -> frozenset[tuple[str, str]]:
    """Return the examples whose answers are shown: those with the most different scores, by (package, key)."""
    if len(scores) < 2:
        return frozenset()
    spread = np.var(scores, axis=0)
    most = min(_MAX_TEXTS // len(scores), _MAX_EXAMPLES)
    keys = list(examples.texts)
    return frozenset(keys[place] for place in np.argsort(-spread, kind="stable")[:most] if spread[place] > 0)


def _data(
    morning: Morning, keys: Sequence[KeyHistory], configs: Mapping[int, Config], examples: SelectionSet
) -> dict[str, Any]:
    """Return what the script draws: rows, details, settings, answers and the charts."""
    experiments = morning.experiments
    shown = [e for e in experiments if e.is_detailed]
    paths = list(dict.fromkeys(key for e in shown if e.number in configs for key in configs[e.number].values))
    settings = {
        e.number: {key: spelled(configs[e.number].shown(key)) for key in paths} for e in shown if e.number in configs
    }
    first = next(iter(settings.values()), {})
    places = {key: index for index, key in enumerate(examples.texts)}
    told = dict.fromkeys(key for e in shown for key in e.answers)
    scores = {e.number: e.record.evaluation.example_scores for e in shown if e.record.evaluation}
    levels = sorted({value for each in scores.values() for value in set(each)})
    letters = {value: chr(_FIRST_LEVEL + i) for i, value in enumerate(levels)} if len(levels) <= _MAX_LEVELS else {}
    texts = dict[str, int]()  # each answer once
    rows = []
    for e in experiments:
        row = _row(e, len(experiments))
        if e.is_detailed:
            if own := settings.get(e.number):
                row["settings"] = {key: value for key, value in own.items() if value != first.get(key)}
            if letters and e.record.evaluation:
                row["scores"] = "".join(map(letters.__getitem__, scores[e.number]))
                row["set"] = e.record.evaluation.examples_sha256[:12]
                row["answers"] = {
                    places[key]: texts.setdefault(text.cut(answer.completion, _MAX_ANSWER), len(texts))
                    for key, answer in e.answers.items()
                    if e.record.evaluation.examples_sha256 == examples.digest
                }
        rows.append(row)
    span = charts.domain(experiments, morning.standing)
    measured = {e.number: e.row.eval_score for e in experiments}
    names = [name for name in CURVES if any(name in e.curves.get("values", {}) for e in shown)]
    return {
        "rows": rows,
        "settings": first,
        "problems": {places[key]: text.cut(examples.texts[key], _MAX_PROBLEM) for key in told},
        "texts": list(texts),
        "first": [e.number for e in experiments if e.kind in ("baseline", "keep")],
        "specs": {
            "progress": charts.progress(experiments, morning.standing),
            **{f"key-{i}": charts.values(key, measured, span) for i, key in enumerate(keys[:_MAX_KEYS]) if span},
            **{f"curve-{name}": charts.curve(name) for name in names},
        },
    }


def _row(e: Experiment, num_experiments: int) -> dict[str, Any]:
    """Return one line of the table, with what opening it shows."""
    record, row, is_detailed = e.record, e.row, e.is_detailed
    changes = [
        [change.key, short_key(change.key), change.old or "unset", change.new or "unset"] for change in e.changes
    ]
    note = text.brief(record.why, 160) if e.is_crash else text.besides(record)
    most = 2000 if is_detailed else 240
    details = [(label, text.cut(words, most)) for label, words in _details(e) if words]
    if not is_detailed:
        words = f"left out of a page of {counted(num_experiments)}: they are in runs/{e.number:04d}/"
        details.append(("Curves, times, answers", words))
    return {
        **{name: getattr(row, name) for name in _FIELDS},
        "verdict": e.verdict,
        "failure": row.failure or "",
        "kind": e.kind,
        "title": text.brief(record.proposal.description, 120),
        "note": note,
        "changes": changes or [[line, line, "", ""] for line in record.diff],
        "cells": [
            text.score(row.eval_score, text.UNKNOWN),
            text.score(row.strict_score, text.UNKNOWN),
            text.plus_minus(e.effect),
            text.share(row.p_helps),
            text.UNKNOWN if row.total_seconds is None else text.duration(row.total_seconds),
        ],
        "details": details,
        "curves": e.curves or None,
    }


def _details(e: Experiment) -> Iterator[tuple[str, str]]:
    """Yield what the records and files of an experiment say, as a label and a text; the text may be empty."""
    record, proposal, run = e.record, e.record.proposal, e.record.result
    yield "Hypothesis", proposal.description or "none given"
    yield "Proposed by", proposal.proposer
    yield "Prediction", "; ".join(filter(None, (proposal.prediction, compare_prediction(record))))
    yield "Mechanism", proposal.mechanism or ""
    yield "Refuted by", proposal.falsifier or ""
    yield "Outcome, as reported", proposal.reported_outcome or ""
    yield "Also done", "\n".join(proposal.notes)
    yield "Lesson", proposal.lesson or ""
    yield "Changed", "\n".join(text.cut(line, 300) for line in record.diff) or "nothing new"
    yield "Run", f"the baseline{' with ' * bool(e.row.kept)}{', '.join(e.row.kept)}{record.run.with_rider}"
    if e.effect:
        yield "Effect", f"{text.effect(e.effect)} at its decision, P(it helps) {text.share(e.effect.p_helps)}"
    yield "Your commit", "\n".join(decided_by_user(record.user_decisions))
    failure = f" ({record.failure})" if e.is_crash and record.failure else ""
    yield "Verdict", f"{e.row.status}{failure}: {record.why}" if record.judgement else "none yet"
    yield "In git", record.git_action or ""
    yield "Starts", f"{record.starts} on this branch" if record.starts else ""
    yield "Unused keys", text.cut(", ".join(record.unused_keys), 600)
    yield "Health", "\n".join((record.health or "").splitlines()[:8])
    if run is None:
        yield "Result", "no run came to an end"
        return
    parts = [f"seed {run.seed}", f"ended by {run.training.outcome}", f"{run.training.num_steps} steps"]
    if evaluation := run.evaluation:
        parts += [f"score {text.score(evaluation.eval_score)}", f"strict {text.score(evaluation.strict_score)}"]
        parts.append(f"{100 * evaluation.truncated_share:.1f} % cut off")
        parts.append(f"{text.short_number(evaluation.completion_tokens_mean)} tokens an answer")
    yield "Result", ", ".join(parts) + (f"\n{text.cut(run.training.cause, 400)}" if run.training.cause else "")
    if evaluation:
        scores = (
            f"{text.brief(part.environment, 40)} {text.score(part.score)} ± {text.score(text.half(part.stderr))} "
            f"(weight {text.short_number(part.weight)})"
            for part in evaluation.parts
        )
        yield "Environments", "\n".join(scores)
        for name, figures in evaluation.figures.items():
            lines = [f"{text.brief(what, 40)}: {text.short_number(value)}" for what, value in figures.items()]
            yield f"Played in {text.brief(name, 40)}", "\n".join(lines)
    lines = [f"{text.brief(what, 20)}: {text.brief(value, 100)}" for what, value in e.lost_game.items()]
    yield "A game that it lost", "\n".join(lines)
    whole = sum(e.uses.values())
    times = (f"{use} {text.duration(seconds)} ({100 * seconds / whole:.0f} %)" for use, seconds in e.uses.items())
    yield "Time", ", ".join(times) if e.is_detailed else ""
    lines = [
        f"{text.brief(s.name, 80)}: {s.num_examples} examples, {s.fixed} fixed, {s.broken} broken, "
        f"net {s.fixed - s.broken:+d} ± {s.spread:.0f}"
        for s in e.slices
    ]
    yield f"Examples against {record.parent or 0:04d}", "\n".join(lines)


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
        *("score", "signed", "duration", "cut", "brief", "plus_minus", "share", "local"),
        *("certificate_line", "elsewhere_lines", "sentence"),
    )
    environment.filters |= {name: getattr(text, name) for name in names}
    environment.filters |= {"counted": counted, "short_key": short_key}
    return environment


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script. Bundling takes 2 s, so the user's cache has
    the script of each version."""
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
    # These files are ours, or vl-convert's; none holds a closing tag.
    scripts = [_vega(), (TEMPLATES / "report.js").read_text(encoding="utf-8")] if view.morning.experiments else []
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    data = msgspec.json.encode(text.visible(view.data, _MAX_DATA)).decode()
    train_toml = view.morning.configs[1].source.decode(errors="replace") if view.morning.configs else ""
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
            has_bars=len(view.morning.experiments) <= charts.MANY,
            policy=_POLICY.format(hashes=hashes),
            picture=Markup(charts.svg(picture)) if picture else None,
            train_toml=escape(text.visible(train_toml, _MAX_DATA)),
            notebook=escape(text.visible(view.notebook, _MAX_DATA)),
            style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
            scripts=[Markup(script) for script in scripts],
            data=Markup(data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")),
        )
    )

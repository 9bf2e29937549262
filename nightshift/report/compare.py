"""What two experiments are compared by, of all with details: the data that the page's script draws from.

It goes into the page as JSON, which no browser executes: texts in it are made visible, cut, and cannot close their tag.
Answers to all examples would be megabytes: those are told that most divide the experiments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from markupsafe import Markup

from nightshift.report import text
from nightshift.report.data import Experiment
from nightshift.report.rows import Row
from nightshift.report.runs import CURVES
from nightshift.report.settings import Settings, spelled
from nightshift.report.slices import SelectionSet

_MAX_TEXTS = 6000  # answers: with 150 experiments those to 40 examples
_MAX_EXAMPLES = 200
_MAX_ANSWER, _MAX_PROBLEM = 240, 600  # characters
_FIRST_LEVEL, _MAX_LEVELS = 48, 79  # a score is a character, from "0" on to "~"
FIGURES = ("verdict", "score", "strict score", "expected", "expected_then, at its verdict")

Keys = frozenset[tuple[str, str]]  # of examples: (package, key)


def dividing(experiments: Sequence[Experiment], examples: SelectionSet) -> Keys:
    """The examples whose answers are told: those with the most different scores."""
    scores = [told for e in experiments if (told := examples.scores(e.record)) is not None]
    if len(scores) < 2:
        return frozenset()
    spread = np.var(scores, axis=0)
    most = min(_MAX_TEXTS // len(scores), _MAX_EXAMPLES)
    keys = list(examples.texts)
    return frozenset(keys[place] for place in np.argsort(-spread, kind="stable")[:most] if spread[place] > 0)


def data_block(rows: Sequence[Row], settings: Mapping[int, Settings], examples: SelectionSet) -> Markup:
    """The JSON of all rows with details."""
    shown = [row for row in rows if row.rollouts is not None]
    keys = list(dict.fromkeys(key for row in shown for key in row.answers))
    places = {key: index for index, key in enumerate(examples.texts)}
    texts = dict[str, int]()  # the same answer is told once
    levels = _levels(shown)
    first = next(iter(settings.values()), {})
    block = {
        "figures": FIGURES,
        "curves": CURVES,
        "settings": {key: spelled(value) for key, value in first.items()},
        "examples": {
            places[key]: [text.visible(text.cut(examples.texts[key], _MAX_PROBLEM))] for key in keys if key in places
        },
        "experiments": {
            str(row.experiment.number): {
                **_told(row, first, settings.get(row.experiment.number)),
                **_scores(row, levels),
                "answers": {
                    places[key]: texts.setdefault(str(text.visible(text.cut(one.completion, _MAX_ANSWER))), len(texts))
                    for key, one in row.answers.items()
                    if key in places and examples.scores(row.experiment.record) is not None
                },
            }
            for row in shown
        },
    }
    block["texts"] = list(texts)
    encoded = msgspec.json.encode(block).decode()
    return Markup(encoded.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _told(row: Row, first: Settings, own: Settings | None) -> dict[str, Any]:
    e = row.experiment
    figures = (
        text.verdict(e),
        text.score(e.record.score, text.UNKNOWN),
        text.score(e.record.strict_score, text.UNKNOWN),
        text.expected(e.expected),
        text.expected(e.expected_then),
    )
    return {
        "title": text.visible(text.brief(e.record.description, 70)),
        "figures": figures,
        "settings": None if own is None else {key: spelled(v) for key, v in own.items() if v != first.get(key)},
        "curves": [{"steps": run.steps, "values": run.values} for run in row.curves],
    }


def _levels(rows: Sequence[Row]) -> dict[float, str]:
    """A character for each score that an example got; none where they are too many."""
    found = {value for row in rows for value in _example_scores(row)}
    return {value: chr(_FIRST_LEVEL + i) for i, value in enumerate(sorted(found))} if len(found) <= _MAX_LEVELS else {}


def _scores(row: Row, levels: Mapping[float, str]) -> dict[str, str]:
    """Of its first run, an example a character; of the same `set` are the scores of the same examples."""
    scores = _example_scores(row) if levels else ()
    if not scores:
        return {}
    return {
        "scores": "".join(map(levels.__getitem__, scores)),
        "set": row.experiment.record.evaluations[0].examples_sha256[:12],
    }


def _example_scores(row: Row) -> tuple[float, ...]:
    try:
        return row.experiment.record.evaluations[0].example_scores
    except (IndexError, ValueError):  # no run was evaluated, or its record was damaged since it was decided
        return ()

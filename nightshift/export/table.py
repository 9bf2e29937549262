"""The csv: a row an experiment, with a column for every key of train.toml. Safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from nightshift.campaign.results import column_of
from nightshift.export.story import Story
from nightshift.text import clean
from nightshift.train_toml.config import spelled
from nightshift.train_toml.values import Value, number_text

# What a spreadsheet computes where a cell begins so, in half and full width; where it takes a ; for the end of a cell,
# as those of half of Europe do, also after one, and a quotation mark there begins a cell as nothing would.
_FORMULA = re.compile(r"(?:^|(?<=;))(?=[\s\"]*[=+\-@\uff1d\uff0b\uff0d\uff20])")
_TOGETHER = ("changes", "environment_scores")


def as_csv(story: Story) -> bytes:
    """UTF-8 with a header. An empty cell is "not measured", or a key that does not apply or cannot be read any more.

    Numbers stand as numbers; a text that a spreadsheet would compute is preceded by an apostrophe.
    """
    environments = dict.fromkeys(name for each in story.experiments for name in each.environment_scores)
    keys = dict.fromkeys(path for config in story.configs.values() for path in config.resolved)
    rows = []
    for each in story.experiments:
        fields: dict[str, Any] = msgspec.to_builtins(each)
        config = story.configs.get(each.number)
        row = {name: value for name, value in fields.items() if name not in _TOGETHER}
        row |= {column_of(name): each.environment_scores.get(name) for name in environments}
        row["changes"] = "; ".join(change.line for change in each.changes)
        row |= {path: _key(config.resolved[path]) if config and path in config.resolved else "" for path in keys}
        rows.append(row)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_cells(rows[0]))
    writer.writerows(_cells(row.values()) for row in rows)
    return file.getvalue().encode(errors="replace")


def _key(value: Value) -> str | float | bool:
    return value if isinstance(value, bool | int | float) else spelled(value)


def _cells(values: Iterable[Any]) -> list[str]:
    return [cell(value) for value in values]


def cell(value: str | float | bool | None) -> str:
    """One cell, harmless."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return number_text(value) if abs(value) < float("inf") else ""
        case _:
            return _FORMULA.sub("'", clean(str(value)))

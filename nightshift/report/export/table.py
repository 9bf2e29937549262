"""`nightshift export --to csv`, and what it shares with W&B: the keys of an experiment's config."""

import csv
import io

from nightshift.config.allowlist import Value, number_text
from nightshift.config.train_toml import Config
from nightshift.report.data import Story
from nightshift.text import clean, escape_formula


def as_csv(story: Story) -> bytes:
    """UTF-8 with a header. An empty cell is "not measured", or a key that does not apply or cannot be read any more.

    Numbers stand as numbers; a text that a spreadsheet would compute is preceded by an apostrophe. The table is the
    user's own file: `description` and `why` are the texts of agents and of verdicts, whatever these contain.
    """
    table = [row.cells | values(story.configs.get(row.number)) for row in story.rows]
    names = dict.fromkeys(name for cells in table for name in cells)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(cell, names))
    writer.writerows([cell(cells.get(name)) for name in names] for cells in table)
    return file.getvalue().encode(errors="replace")


def cell(value: Value | None) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return number_text(value)
        case _:
            return escape_formula(clean(str(value)))


def values(config: Config | None) -> dict[str, Value]:
    """Return the values of the keys that apply in an experiment's config, as cells of csv and settings of W&B."""
    return {key: config.shown(key) for key in config.resolved} if config else {}

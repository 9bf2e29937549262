"""`nightshift export --to csv`, and the cells of a config, which csv and W&B share."""

import csv
import io

from nightshift.config.allowlist import Value
from nightshift.config.train_toml import Config
from nightshift.report.data import Story
from nightshift.text import clean, escape_formula


def as_csv(story: Story) -> bytes:
    """Return the table in UTF-8, with a header. An empty cell: not measured, or a key that does not apply. A text that
    a spreadsheet would compute begins with an apostrophe."""
    table = [row.cells | values(story.configs.get(row.number)) for row in story.rows]
    names = dict.fromkeys(name for cells in table for name in cells)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(cell, names))
    writer.writerows([cell(cells.get(name)) for name in names] for cells in table)
    return file.getvalue().encode(errors="replace")


def cell(value: Value | None) -> str:
    if isinstance(value, str):
        return escape_formula(clean(value))
    return "" if value is None else str(value).lower()


def values(config: Config | None) -> dict[str, Value]:
    """Return the keys that apply in an experiment's config, with their values."""
    return {key: config.shown(key) for key in config.resolved} if config else {}

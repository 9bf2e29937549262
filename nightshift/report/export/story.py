"""What all exports tell: the experiments of one campaign, with their configs and the steps of their runs.

All of it lies where agents write: files are read by files.py's readers, which follow no link and have a bound, and a
train.toml counts only as far as the allow-list takes it.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from nightshift.agents.history import load_configs
from nightshift.campaign.git import CAMPAIGN_PREFIX
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import METRICS_NAME, Step, read_steps
from nightshift.campaign.records import JOB_NAME, Job, Record
from nightshift.campaign.results import Row
from nightshift.config.allowlist import Value, number_text
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config, spelled
from nightshift.errors import UsageError
from nightshift.files import read_json
from nightshift.report.data import Shown, shown_campaign
from nightshift.text import clean, escape_formula


def as_csv(story: Story) -> bytes:
    """UTF-8 with a header. An empty cell is "not measured", or a key that does not apply or cannot be read any more.

    Numbers stand as numbers; a text that a spreadsheet would compute is preceded by an apostrophe. The table is the
    user's own file: `description` and `why` are the texts of agents and of verdicts, whatever these contain.
    """
    table = [(row.cells, story.values(row)) for row in story.experiments]
    names, keys = (dict.fromkeys(name for pair in table for name in pair[part]) for part in (0, 1))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(cell, (*names, *keys)))
    for cells, values in table:
        writer.writerow([*(cell(cells.get(name)) for name in names), *(cell(values.get(key)) for key in keys)])
    return file.getvalue().encode(errors="replace")


def cell(value: Value | None) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return number_text(value) if abs(value) < float("inf") else ""
        case _:
            return escape_formula(clean(str(value)))


@dataclass(frozen=True, slots=True)
class Story:
    """One campaign. `experiments` in the order of `shown.records`; `configs` by number, without those that are gone."""

    ledger: Ledger
    shown: Shown
    experiments: tuple[Row, ...]
    configs: Mapping[int, Config]

    @classmethod
    def of(cls, ledger: Ledger, branch: str | None, head_branch: str) -> Story:
        """Of a branch, as report chooses it. UsageError where there is no experiment."""
        shown = shown_campaign(ledger, branch, head_branch)
        if not shown.records:
            raise UsageError("no experiment was run here yet", "Start one: uv run run.py.")
        experiments = tuple(shown.campaign.rows(shown.records))
        return cls(ledger, shown, experiments, load_configs(ledger, shown.records))

    @property
    def tag(self) -> str:
        """A name for files and studies: the branch's, of plain letters."""
        name = self.shown.branch.removeprefix(CAMPAIGN_PREFIX)
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip(".-") or "campaign"

    def values(self, row: Row) -> dict[str, Value]:
        """Return the values of the keys that apply in an experiment's config, as cells of csv and settings of W&B."""
        config = self.configs.get(row.number)
        values = config.resolved if config else {}
        return {key: v if isinstance(v, bool | int | float) else spelled(v) for key, v in values.items()}

    def steps(self, record: Record) -> list[Step]:
        return read_steps(self.ledger.run_dir(record.number) / METRICS_NAME) if record.result else []

    def rules(self, record: Record) -> Rules | None:
        """Return the rules of a record's job; None if job.json is gone, or has other rules."""
        with suppress(UsageError):
            job = read_json(self.ledger.run_dir(record.number) / JOB_NAME, Job, "")
            return job.rules if job and job.rules_hash == record.rules_hash else None
        return None


def measured(step: Step) -> dict[str, float]:
    """The finite numbers of a step by name, rewards as `rewards/ENVIRONMENT`."""
    fields = msgspec.to_builtins(step)
    rewards = {f"rewards/{name}": value for name, value in (fields.pop("rewards") or {}).items()}
    del fields["step"]
    return {name: value for name, value in {**fields, **rewards}.items() if value is not None and math.isfinite(value)}

"""What all exports tell: the experiments of one campaign, with their configs and the steps of their runs.

All of it lies where agents write: files are read by files.py's readers, which follow no link and have a bound, and a
train.toml counts only as far as the allow-list takes it.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from nightshift.agents.history import load_configs
from nightshift.campaign.git import CAMPAIGN_PREFIX
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import METRICS_NAME, Step, read_steps
from nightshift.campaign.records import JOB_NAME, Job, Record
from nightshift.campaign.results import column_of
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config, spelled
from nightshift.config.values import Value, number_text
from nightshift.errors import UsageError
from nightshift.files import read_json
from nightshift.report.data import Shown, shown_campaign
from nightshift.report.experiment_view import Experiment, told
from nightshift.text import clean

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


_SCORES = (
    *("eval_score", "eval_stderr", "strict_score", "expected", "expected_stderr", "expected_then", "p_better"),
    *("expected_then_stderr", "num_steps", "reward_mean", "training_seconds", "total_seconds", "memory_gb"),
)


@dataclass(frozen=True, slots=True)
class Story:
    """One campaign. `experiments` in the order of `shown.records`; `configs` by number, without those that are gone."""

    ledger: Ledger
    shown: Shown
    experiments: tuple[Experiment, ...]
    configs: Mapping[int, Config]

    @classmethod
    def of(cls, ledger: Ledger, branch: str | None, head_branch: str) -> Story:
        """Of a branch, as report chooses it. UsageError where there is no experiment."""
        shown = shown_campaign(ledger, branch, head_branch)
        if not shown.records:
            raise UsageError("no experiment was run here yet", "Start one: uv run run.py.")
        experiments = told(shown.records, shown.campaign)
        return cls(ledger, shown, experiments, load_configs(ledger, shown.records))

    @property
    def tag(self) -> str:
        """A name for files and studies: the branch's, of plain letters."""
        name = self.shown.branch.removeprefix(CAMPAIGN_PREFIX) or "detached"
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip(".-") or "campaign"

    def rows(self) -> Iterator[tuple[Record, Experiment]]:
        """Record and what is told of it."""
        return zip(self.shown.records, self.experiments, strict=True)

    def steps(self, record: Record) -> list[Step]:
        """The training steps of its run; none if the run left none."""
        return read_steps(self.ledger.files_dir(record) / METRICS_NAME) if record.result else []

    def rules(self, record: Record) -> Rules | None:
        """What it was run by: of the job whose hash was entered into the journal before its worker started, which
        refused rules of another hash. None where that is not there any more, or another one is."""
        path = self.ledger.files_dir(record) / JOB_NAME
        with suppress(UsageError, OSError):
            job = read_json(path, Job, "") if self.ledger.holds(path) else None
            return job.rules if job and job.rules_hash == record.rules_hash else None
        return None


def measured(step: Step) -> dict[str, float]:
    """The finite numbers of a step by name, rewards as `rewards/ENVIRONMENT`."""
    fields = msgspec.to_builtins(step)
    rewards = {f"rewards/{name}": value for name, value in (fields.pop("rewards") or {}).items()}
    del fields["step"]
    return {name: value for name, value in {**fields, **rewards}.items() if value is not None and math.isfinite(value)}


def scores(experiment: Experiment) -> dict[str, float]:
    """The numbers that an experiment came to, without those that were not measured."""
    found = {name: value for name in _SCORES if (value := getattr(experiment, name)) is not None}
    found |= {column_of(name): value for name, value in experiment.environment_scores.items()}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}

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
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.git import CAMPAIGN_PREFIX
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import METRICS_NAME, Step, read_steps
from nightshift.campaign.records import JOB_NAME, Failure, Job, Record, Verdict
from nightshift.campaign.results import column_of, figures
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config, changes_of, spelled
from nightshift.config.values import Value, number_text
from nightshift.errors import UsageError
from nightshift.files import read_json
from nightshift.report.data import Shown, shown_campaign
from nightshift.text import clean, escape_formula

_OUTCOMES = {
    Verdict.KEEP: "kept",
    Verdict.DISCARD: "discarded",
    Verdict.MEASURED: "measured",
    Verdict.CRASH: "crashed",
}

Row = dict[str, Any]  # one experiment as every export tells it, by the names of results.tsv; None: not measured


def outcome_of(record: Record, since: str = "") -> str:
    """In the words of campaign.results.Counts; `since`: what became of its change, see Campaign.since."""
    if record.is_keep and record.parent is None:
        return "baseline"
    if record.failure is Failure.INTERRUPTED:
        return "interrupted"
    if since.startswith(("reverted", "replaced", "adopted")):
        return since.partition(",")[0]
    return _OUTCOMES.get(Verdict(record.status), "undecided") if record.status in {*Verdict} else "undecided"


def rows_of(records: Iterable[Record], campaign: Campaign) -> tuple[Row, ...]:
    """A row for each of these records of one campaign. `effect` is what its change adds to the incumbent, as it is
    believed now."""
    decided = {record.number for record in campaign.decided}
    return tuple(_row(r, campaign, campaign.since(r) if r.number in decided else "") for r in records)


def _row(record: Record, campaign: Campaign, since: str) -> Row:
    known, now = figures(record), campaign.effect(record)
    then = record.decision.estimate if record.decision else None
    return {
        "number": record.number,
        "outcome": outcome_of(record, since),
        "since": since or None,
        "parent": record.parent,
        "kept": " ".join(change.name for change in record.run.kept) or None,
        "rider": known["rider"],
        "branch": record.branch,
        **{name: known[name] for name in ("rules", "started", "description")},
        "proposer": record.proposal.proposer or None,
        **{name: known[name] for name in ("eval_score", "eval_stderr", "strict_score", "incumbent_score")},
        "effect": now and now.mean,
        "effect_stderr": now and now.sd,
        "effect_at_decision": then and then.mean,
        "effect_at_decision_stderr": then and then.sd,
        "p_helps": known["p_helps"],
        "why": known["why"],
        "failure": record.failure,
        **{name: known[name] for name in ("num_steps", "reward_mean", "training_seconds", "total_seconds")},
        "memory_gb": known["memory_gb"],
        "kept_commit": record.kept_commit,
        **{column_of(name): score for name, score in record.environment_scores.items()},
        "changes": "; ".join(change.line for change in changes_of(record.diff)),
    }


def as_csv(story: Story) -> bytes:
    """UTF-8 with a header. An empty cell is "not measured", or a key that does not apply or cannot be read any more.

    Numbers stand as numbers; a text that a spreadsheet would compute is preceded by an apostrophe. The table is the
    user's own file: `description` and `why` are the texts of agents and of verdicts, whatever these contain.
    """
    environments = dict.fromkeys(column_of(name) for r in story.shown.records for name in r.environment_scores)
    keys = dict.fromkeys(path for config in story.configs.values() for path in config.resolved)
    rows = []
    for each in story.experiments:
        config, changes = story.configs.get(each["number"]), each["changes"]
        row = {name: value for name, value in each.items() if name not in environments and name != "changes"}
        row |= {name: each.get(name) for name in environments} | {"changes": changes}
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
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return number_text(value) if abs(value) < float("inf") else ""
        case _:
            return escape_formula(clean(str(value)))


_SCORES = (
    *("eval_score", "eval_stderr", "strict_score", "effect", "effect_stderr", "effect_at_decision", "p_helps"),
    *("effect_at_decision_stderr", "num_steps", "reward_mean", "training_seconds", "total_seconds", "memory_gb"),
)


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
        experiments = rows_of(shown.records, shown.campaign)
        return cls(ledger, shown, experiments, load_configs(ledger, shown.records))

    @property
    def tag(self) -> str:
        """A name for files and studies: the branch's, of plain letters."""
        name = self.shown.branch.removeprefix(CAMPAIGN_PREFIX)
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip(".-") or "campaign"

    def rows(self) -> Iterator[tuple[Record, Row]]:
        return zip(self.shown.records, self.experiments, strict=True)

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


def scores(record: Record, row: Row) -> dict[str, float]:
    """The numbers that an experiment came to, without those that were not measured."""
    names = (*_SCORES, *map(column_of, record.environment_scores))
    found = {name: value for name in names if (value := row[name]) is not None}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}

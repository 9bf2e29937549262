"""The cost of agents (tokens, dollars) and of runs (hours, GPU-hours). A figure that was not reported is None, not 0.
`runs/proposals.jsonl` has one line for each proposal that a night asked for, refused or not."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from nightshift.campaign.ledger import append
from nightshift.campaign.records import NOTHING, Cost, Record
from nightshift.files import read_rows

PROPOSALS_NAME = "proposals.jsonl"


class _Line(msgspec.Struct, frozen=True):
    branch: str
    rules_hash: str
    night: str  # when the night started
    cost: Cost


def log_proposal(runs_dir: Path, branch: str, rules_hash: str, night: str, cost: Cost) -> None:
    """Append the cost of a proposal to proposals.jsonl. EngineError if the disk refuses."""
    append(runs_dir / PROPOSALS_NAME, _Line(branch, rules_hash, night, cost))


def proposals_cost(runs_dir: Path, branch: str, rules_hash: str, night: str | None = None) -> Cost:
    """Return the cost of the proposals of one campaign, or of one of its nights. Damaged lines are left out."""
    lines = read_rows(runs_dir / PROPOSALS_NAME, _Line)
    ours = [line for line in lines if (line.branch, line.rules_hash) == (branch, rules_hash)]
    return sum((line.cost for line in ours if night in (None, line.night)), NOTHING)


def runs_cost(records: Iterable[Record]) -> Cost:
    """Return the cost of the runs that these experiments made."""
    runs = [(run.total_seconds, gpus_of(record.hardware)) for record in records if (run := record.result)]
    on_gpus = [seconds * gpus for seconds, gpus in runs if gpus is not None]
    total_seconds = sum(seconds for seconds, _ in runs) if runs else None
    return Cost(num_proposals=0, run_seconds=total_seconds, gpu_seconds=sum(on_gpus) if on_gpus else None)


def campaign_cost(runs_dir: Path, records: Sequence[Record]) -> Cost:
    """Return the cost of these experiments and of all proposals of their campaigns."""
    campaigns = {(record.branch, record.rules_hash) for record in records}
    return sum((proposals_cost(runs_dir, *campaign) for campaign in campaigns), runs_cost(records))


def gpus_of(hardware: str) -> int | None:
    """Return the number of GPUs of `2 x NVIDIA H100 80GB HBM3, 2 side by side, 8 cores each` or `A + B`; else None."""
    if match := re.match(r"(\d{1,3}) x ", hardware):
        return int(match[1])
    return hardware.count(" + ") + 1 if " + " in hardware else None

"""What work cost: tokens and dollars of agents, hours of runs and GPUs. A figure that nobody reported is None, not 0.
`runs/proposals.jsonl` has one line for each proposal that a night asked for, refused or not.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from nightshift.campaign.records import NOTHING, Cost, Record, Result
from nightshift.files import disk_error, open_regular, read_rows

PROPOSALS_NAME = "proposals.jsonl"


class _Line(msgspec.Struct, frozen=True):
    """A line of proposals.jsonl. `night` is when the night started."""

    branch: str
    rules_hash: str
    night: str
    cost: Cost


def log_proposal(runs_dir: Path, branch: str, rules_hash: str, night: str, cost: Cost) -> None:
    """Append what a proposal cost. Raises EngineError if the disk refuses."""
    path = runs_dir / PROPOSALS_NAME
    try:
        with open_regular(path, "ab") as file:
            # It begins a line of its own: a line that a power cut or a full disk tore takes no other with it.
            file.write(b"\n" + msgspec.json.encode(_Line(branch, rules_hash, night, cost)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path) from None


def proposals_cost(runs_dir: Path, branch: str, rules_hash: str, night: str | None = None) -> Cost:
    """Return what the proposals of one campaign cost, or those of one of its nights. A damaged line is left out."""
    lines = read_rows(runs_dir / PROPOSALS_NAME, _Line)
    ours = [line for line in lines if (line.branch, line.rules_hash) == (branch, rules_hash)]
    return sum((line.cost for line in ours if night in (None, line.night)), NOTHING)


def runs_cost(records: Iterable[Record]) -> Cost:
    """What the runs of these experiments cost; not a run whose result an experiment took over from another."""
    runs = [(run.total_seconds, gpus_of(record.hardware)) for record in records if (run := own_run(record))]
    on_gpus = [seconds * gpus for seconds, gpus in runs if gpus is not None]
    total_seconds = sum(seconds for seconds, _ in runs) if runs else None
    return Cost(num_proposals=0, run_seconds=total_seconds, gpu_seconds=sum(on_gpus) if on_gpus else None)


def campaign_cost(runs_dir: Path, records: Sequence[Record]) -> Cost:
    campaigns = {(record.branch, record.rules_hash) for record in records}
    proposals = (proposals_cost(runs_dir, branch, rules_hash) for branch, rules_hash in campaigns)
    return sum(proposals, runs_cost(records))


def own_run(record: Record) -> Result | None:
    """The run that an experiment made itself; None if it made none, or took over the result of another experiment."""
    return record.result if record.baseline is None else None


def gpus_of(hardware: str) -> int | None:
    """How many GPUs a run had: `2 x NVIDIA H100 80GB HBM3, 2 side by side, 8 cores each`, `A + B`; else None."""
    if match := re.match(r"(\d{1,3}) x ", hardware):
        return int(match[1])
    return hardware.count(" + ") + 1 if " + " in hardware else None

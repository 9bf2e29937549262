"""What work cost: tokens and dollars of agents, hours of runs and GPUs. A figure that nobody reported is None, not 0.

`runs/proposals.jsonl` has one line for each proposal that a night asked for, refused or not: the one source of what the
agents of a night and of a campaign cost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from nightshift.files import disk_error, open_regular, read_rows

if TYPE_CHECKING:
    from nightshift.campaign.records import Record, Result

PROPOSALS_NAME = "proposals.jsonl"
_HOUR = 3600.0
Tokens = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Number = TypeVar("Number", int, float)
Figure = Literal["tokens_in", "tokens_out", "dollars"]
FIGURES: tuple[Figure, ...] = ("tokens_in", "tokens_out", "dollars")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one proposal cost, or the sum over `num_proposals` and their runs.

    `tokens_in` includes tokens from a cache, `tokens_out` those of thinking; `dollars` are the agent program's own
    figure, US; `seconds` is the agents' wall-clock time. `run_seconds` adds up the wall-clock time of runs, though some
    ran side by side; `gpu_seconds` is the same times the GPUs of each run. `at_least`: the figures that are lower
    bounds, because not every agent reported its part.
    """

    tokens_in: Tokens | None = None
    tokens_out: Tokens | None = None
    dollars: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    seconds: Seconds | None = None
    at_least: tuple[Figure, ...] = ()
    num_proposals: Annotated[int, Meta(ge=0, le=2**53)] = 1
    run_seconds: Seconds | None = None
    gpu_seconds: Seconds | None = None

    def is_whole(self, figure: Figure) -> bool:
        """True if every agent that was asked reported `figure`."""
        return figure not in self.at_least and (self.num_proposals == 0 or getattr(self, figure) is not None)

    def __add__(self, other: Cost) -> Cost:
        """The sum; a figure is None if neither side has it."""
        total = Cost(
            _sum(self.tokens_in, other.tokens_in),
            _sum(self.tokens_out, other.tokens_out),
            _sum(self.dollars, other.dollars),
            _sum(self.seconds, other.seconds),
            num_proposals=self.num_proposals + other.num_proposals,
            run_seconds=_sum(self.run_seconds, other.run_seconds),
            gpu_seconds=_sum(self.gpu_seconds, other.gpu_seconds),
        )
        reported = [figure for figure in FIGURES if getattr(total, figure) is not None]
        return replace(total, at_least=tuple(f for f in reported if not (self.is_whole(f) and other.is_whole(f))))

    def __str__(self) -> str:
        """One line: `1.2 h of runs, 2.4 GPU-hours; 5 proposals: 0.3 h, 120,345 tokens in, 4,321 out, $1.23`."""
        machine = [] if self.run_seconds is None else [f"{self.run_seconds / _HOUR:.2f} h of runs"]
        machine += [] if self.gpu_seconds is None else [f"{self.gpu_seconds / _HOUR:.2f} GPU-hours"]
        agents = [] if self.seconds is None else [f"{self.seconds / _HOUR:.2f} h"]
        if self.tokens_in is None and self.tokens_out is None:
            agents.append("tokens not reported")
        else:
            agents += [f"{self._text('tokens_in')} tokens in", f"{self._text('tokens_out')} out"]
        agents.append("dollars not reported" if self.dollars is None else self.dollars_text)
        num = self.num_proposals
        proposals = f"{num:,} proposal{'' if num == 1 else 's'}: {', '.join(agents)}" if num else ""
        return "; ".join(filter(None, (", ".join(machine), proposals))) or "nothing yet"

    @property
    def dollars_text(self) -> str:
        """`$1.23`, or `at least $1.23`."""
        return f"{self._at_least('dollars')}${self.dollars or 0.0:,.2f}"

    def _text(self, figure: Figure) -> str:
        value = getattr(self, figure)
        return "?" if value is None else f"{self._at_least(figure)}{value:,}"

    def _at_least(self, figure: Figure) -> str:
        return "" if self.is_whole(figure) else "at least "


NOTHING = Cost(num_proposals=0)


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
    """What the runs of these experiments cost; not the runs that an experiment took over from another."""
    runs = [(run.total_seconds, gpus_of(record.hardware)) for record in records for run in own_runs(record)]
    on_gpus = [seconds * gpus for seconds, gpus in runs if gpus is not None]
    total_seconds = sum(seconds for seconds, _ in runs) if runs else None
    return Cost(num_proposals=0, run_seconds=total_seconds, gpu_seconds=sum(on_gpus) if on_gpus else None)


def campaign_cost(runs_dir: Path, records: Sequence[Record]) -> Cost:
    """What the runs of one campaign's experiments and its proposals cost."""
    campaigns = {(record.branch, record.rules_hash) for record in records}
    proposals = (proposals_cost(runs_dir, branch, rules_hash) for branch, rules_hash in campaigns)
    return sum(proposals, runs_cost(records))


def own_runs(record: Record) -> tuple[Result, ...]:
    """The runs that an experiment made itself."""
    return record.runs if record.baseline is None else ()


def gpus_of(hardware: str) -> int | None:
    """How many GPUs a run had, by its record: `2 x NVIDIA H100 80GB HBM3, 2 side by side, 8 cores each`, `A + B`.

    None if it had none, or if the record does not say.
    """
    if match := re.match(r"(\d{1,3}) x ", hardware):
        return int(match[1])
    return hardware.count(" + ") + 1 if " + " in hardware else None


def together(costs: Iterable[Cost | None]) -> Cost | None:
    """Return the cost of one proposal that several agents made; None if no agent was asked."""
    asked = [cost for cost in costs if cost is not None]
    return replace(sum(asked, NOTHING), num_proposals=1) if asked else None


def _sum(one: Number | None, other: Number | None) -> Number | None:
    return other if one is None else one if other is None else one + other

"""What a night must remember beside the ledger, and when it is over: runs/night.json.

All that the records can tell is counted from them each time, so a killed night goes on with true counts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from nightshift.agents.base import Answer
from nightshift.campaign import results
from nightshift.campaign.cost import proposals_cost
from nightshift.campaign.ledger import STARTED, Ledger
from nightshift.campaign.records import NIGHT_NAME, Cost, Failure, Record, Request
from nightshift.campaign.waits import FILL, NightStatus, parse_time
from nightshift.config.scope import scope_of
from nightshift.files import read_json, write_json

STOP_NAME = "STOP"  # a file in the checkout's root
MAX_CRASHES = 5  # in a row: a campaign in which nothing runs any more is looked at by its user


@dataclass(frozen=True, slots=True)
class NightRequest:
    """The flags of `nightshift night`: the same ones resume a night. `plateau`: experiments without a keep."""

    agent: str
    hours: Annotated[float, Meta(gt=0, le=10_000)] | None = None
    experiments: int | None = None
    plateau: int | None = None
    budget_seconds: float | None = None
    engine: str | None = None
    gpus: str | None = None
    agent_timeout_seconds: float = 900.0
    seed: int = 0
    sandbox: str = "auto"
    pairs: int = 1
    slurm: str | None = None
    riders: Literal[0, 1] = 1  # discarded changes that each run measures once more
    max_cost: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # dollars, as the agents tell them
    direction: str | None = None  # a text, or the file that holds it
    only: str | None = None  # the keys and tables that may change, separated by commas
    until: Annotated[float, Meta(gt=0, le=1)] | None = None  # the score that ends the night
    agent_model: str | None = None
    agent_effort: str | None = None
    fill: bool | None = None  # proposals by tpe while the agent cannot be asked; None: if the night has no direction
    certify: Annotated[int, Meta(ge=1, le=100)] | None = None  # fresh runs of each side at the end
    agent_env: tuple[str, ...] = ()  # more variables that the agent gets
    agent_sees: tuple[str, ...] = ()  # more files and folders that it may read

    @property
    def request(self) -> Request:
        """The part that is for every experiment."""
        return Request(
            budget_seconds=self.budget_seconds,
            engine=self.engine,
            gpus=self.gpus,
            pairs=self.pairs,
            slurm=None if self.slurm is None else Path(self.slurm),
        )


@dataclass(frozen=True, slots=True)
class NightState(NightStatus):
    """`runs/night.json`. `pid` is the controller's.

    `pending`: the answers that were taken and are not decided yet. `refusals`: why those since the last one were not;
    `notes`: what their proposers did besides. `certificate`: the line with which the night ends (--certify).
    """

    request: NightRequest
    rules_hash: str
    sandbox: str = ""  # in which its agents work; empty for a search
    pending: tuple[Answer, ...] = ()
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_planned: bool = True  # a stop rule or the user ended it
    certificate: str | None = None
    pid: Annotated[int, Meta(ge=0, lt=2**31)] = field(default_factory=os.getpid)
    version: Literal[5] = 5

    def __post_init__(self) -> None:
        """Raise ValueError for a time that cannot be read, or an answer without a change."""
        parse_time(self.started)
        if any(answer.change is None for answer in self.pending):
            raise ValueError("a pending answer has no change")

    @property
    def fills(self) -> bool:
        """Whether tpe proposes while the agent cannot be asked. Of a direction it reads the scope only."""
        is_readable = not self.direction or bool(scope_of(self.direction))
        return is_readable if self.request.fill is None else self.request.fill

    @property
    def deadline(self) -> datetime | None:
        """When the hours are over; None without --hours."""
        if self.request.hours is None:
            return None
        return datetime.fromisoformat(self.started) + timedelta(hours=self.request.hours)

    def own(self, records: Sequence[Record]) -> list[Record]:
        closed = [record for record in records if record.number >= self.first and record.status != STARTED]
        return [r for r in closed if (r.branch, r.rules_hash) == (self.branch, self.rules_hash)]


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a night is over."""

    cause: str
    is_planned: bool = True  # a rule or the user ended it; nothing went wrong
    by_user: bool = False


def save(ledger: Ledger, state: NightState) -> None:
    """Write night.json: whole or not at all. UsageError if runs/ was moved away."""
    ledger.require_in_place()
    ledger.runs_dir.mkdir(exist_ok=True)
    write_json(ledger.runs_dir / NIGHT_NAME, state)


def load(ledger: Ledger) -> NightState | None:
    """Read the last night of this checkout; None if there was none. UsageError if the file is damaged."""
    return read_json(ledger.runs_dir / NIGHT_NAME, NightState, "Delete it: the next night starts anew.")


def night_cost(state: NightState, ledger: Ledger) -> Cost:
    return proposals_cost(ledger.runs_dir, state.branch, state.rules_hash, state.started)


def decided(records: Sequence[Record]) -> list[Record]:
    """Return the records that count as experiments, in the order of the decisions: an interrupted run does not, nor
    one that infrastructure ended."""
    return sorted((record for record in records if record.decided is not None), key=lambda r: r.decided or 0)


def num_since_keep(records: Sequence[Record]) -> int:
    """Count the experiments since the last keep. One that filled a slot while the agent could not be asked counts only
    if it was kept."""
    return results.num_since_keep([r for r in decided(records) if r.is_keep or r.proposal.proposer != FILL])


def num_crashes(records: Sequence[Record]) -> int:
    """Count the crashes in a row at the end; interrupted runs aside."""
    ended = by_end(records)
    return next((i for i, r in enumerate(reversed(ended)) if r.status != "crash"), len(ended))


def by_end(records: Sequence[Record]) -> list[Record]:
    """Return the records that were not interrupted, in the order in which their runs ended."""
    ended = [record for record in records if record.failure is not Failure.INTERRUPTED]
    return sorted(ended, key=lambda r: datetime.fromisoformat(r.started).timestamp() + (r.total_seconds or 0.0))

"""What a night must remember beside the ledger, and when it is over: runs/night.json.

All that the records can tell is counted from them each time, so a killed night goes on with true counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median_low
from typing import Annotated, Literal

from msgspec import Meta

from nightshift.agents.base import Answer
from nightshift.campaign import results
from nightshift.campaign.ledger import STARTED, Ledger, proposals_cost
from nightshift.campaign.records import NIGHT_NAME, NOTHING, Z95, Cost, Record, Request
from nightshift.campaign.waits import FILL, NightStatus, parse_time
from nightshift.config.scope import scope_of
from nightshift.errors import Failure
from nightshift.experiment.experiment import Controller
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


def runs_left(state: NightState, own: Sequence[Record], num_started: int, controller: Controller) -> float:
    """Return how many runs the night can still start after `num_started`; infinite without --experiments and --hours.

    `own`: the night's closed experiments, whose last runs say how long a run takes.
    """
    left = math.inf
    if state.request.experiments is not None:
        left = state.request.experiments - num_started
    if state.deadline is not None:
        seconds = run_seconds(own, controller.bench.rules.budget_seconds)
        num_slots = controller.bench.executor.num_slots
        seconds_left = (state.deadline - controller.now()).total_seconds()
        seconds_left -= certificate_seconds(state, seconds, num_slots)
        rounds = math.floor(max(seconds_left, 0.0) / max(seconds, 1.0))
        left = min(left, rounds * num_slots)
    return left


def is_spent(state: NightState, cost: Cost) -> bool:
    """Return True if the night's proposals have cost --max-cost, by their agents' own figures."""
    most = state.request.max_cost
    return most is not None and cost.dollars is not None and cost.dollars >= most


def certificate_seconds(state: NightState, run_seconds: float, num_slots: int) -> float:
    """Return the time that the runs of --certify take in all slots."""
    return math.ceil(2 * (state.request.certify or 0) / num_slots) * run_seconds


def run_seconds(own: Sequence[Record], at_first: float) -> float:
    """Return the expected time of the next run: the median of the last three, `at_first` before there is one."""
    seconds = [record.result.total_seconds for record in own if record.result and record.result.evaluation]
    return median_low(seconds[-3:]) if seconds else at_first  # one slow run alone does not begin the night's last runs


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


def stop_rule(
    state: NightState,
    own: Sequence[Record],
    now: datetime,
    run_seconds: float,
    cost: Cost = NOTHING,
    num_slots: int = 1,
) -> Stop | None:
    """Return the first rule by which nothing new begins; None to go on. `own`: the night's closed experiments;
    `run_seconds`: expected of the next run; `cost`: of all proposals of the night."""
    request, num_without = state.request, num_since_keep(own)
    if request.experiments is not None and len(decided(own)) >= request.experiments:
        return Stop(f"{request.experiments} experiments are done")
    needed = run_seconds + certificate_seconds(state, run_seconds, num_slots)
    if state.deadline is not None and now + timedelta(seconds=needed) > state.deadline:
        certificate = " and the certificate" if request.certify else ""
        return Stop(
            f"{request.hours:g} hours are over, or too short for another run of {run_seconds:.0f} s{certificate}"
        )
    if request.plateau is not None and num_without > request.plateau:
        return Stop(f"plateau: nothing kept in {num_without} experiments, the last of them in a new direction")
    standing = next((r.judgement.standing for r in reversed(own) if r.judgement and r.judgement.standing), None)
    if request.until is not None and standing is not None:
        bound = standing.incumbent - Z95 * standing.incumbent_sd
        if bound >= request.until:
            return Stop(f"--until {request.until:g}: the incumbent's score is at least {bound:.4f} (95 % interval)")
    if is_spent(state, cost) and not state.pending:  # what is paid for is run
        return Stop(f"--max-cost {request.max_cost:g}: its proposals cost {cost.text('dollars')}")
    if num_crashes(own) >= MAX_CRASHES:
        return Stop(f"{num_crashes(own)} crashes in a row, the last one: {own[-1].why}", is_planned=False)
    return None

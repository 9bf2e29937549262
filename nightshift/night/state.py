"""The state of a night (runs/night.json), its stop rules, its waits, and the events for its observers."""

import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from enum import Enum, auto
from itertools import takewhile
from pathlib import Path
from statistics import median_low
from typing import Any, Literal, NamedTuple

from nightshift.agents.base import Answer
from nightshift.agents.presets import SEARCHES
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import STARTED, Ledger, proposals_cost
from nightshift.campaign.posterior import next_stage
from nightshift.campaign.records import NIGHT_NAME, Z95, Cost, Record, Request, Stage, Verdict
from nightshift.campaign.waits import FILL, NightStatus, Wait, WaitKind
from nightshift.config.scope import scope_of
from nightshift.errors import EngineError, Failure, UsageError
from nightshift.experiment.experiment import Controller
from nightshift.files import read_json, write_json

STOP_NAME = "STOP"  # a file in the checkout
MAX_CRASHES = 5  # in a row; then the user has to act
FIRST_SECONDS, MAX_SECONDS = 30.0, 900.0  # pause after a failed try; it doubles with each failure


@dataclass(frozen=True, slots=True)
class NightRequest:
    """The flags of `nightshift night`. The same flags resume a night."""

    agent: str
    hours: float | None = None
    experiments: int | None = None
    plateau: int | None = None  # experiments without a keep
    budget_seconds: float | None = None
    engine: str | None = None
    gpus: str | None = None
    agent_timeout_seconds: float = 900.0
    seed: int = 0
    sandbox: str = "auto"
    pairs: int = 1
    slurm: str | None = None
    riders: int = 1  # discarded changes that each run re-tests
    max_cost: float | None = None  # dollars, as the agents report them
    direction: str | None = None  # a text or a file
    only: str | None = None  # the keys and tables that may change, separated by commas
    until: float | None = None  # the score that ends the night
    agent_model: str | None = None
    agent_effort: str | None = None
    fill: bool | None = None  # TPE proposes while the agent is unavailable; None: if the night has no direction
    certify: int | None = None  # fresh runs of each side at the end
    agent_env: tuple[str, ...] = ()  # more variables for the agent
    agent_sees: tuple[str, ...] = ()  # more files and folders that the agent may read

    @property
    def command(self) -> str:
        """The command of a night with these flags."""
        words = ["uv", "run", "nightshift", "night"]
        for flag in fields(self):
            value = getattr(self, flag.name)
            name = f"--{flag.name}".replace("_", "-").replace("-timeout-seconds", "-timeout")
            if isinstance(value, bool):
                words.append(name if value else "--no-fill")
            elif value != flag.default:
                for item in value if isinstance(value, tuple) else [value]:
                    words += name, "auto" if (name, item) == ("--pairs", 0) else str(item).removesuffix(".0")
        return shlex.join(words)

    @property
    def request(self) -> Request:
        """The flags that apply to each experiment."""
        flags = {name: getattr(self, name) for name in ("budget_seconds", "engine", "gpus", "pairs")}
        return Request(**flags, slurm=Path(self.slurm) if self.slurm else None)


@dataclass(frozen=True, slots=True)
class NightState(NightStatus):
    """`runs/night.json`."""

    request: NightRequest
    rules_hash: str
    sandbox: str = ""  # of the agents; "" for a search
    pending: tuple[Answer, ...] = ()  # accepted proposals that are not decided yet
    is_planned: bool = True  # a stop rule or the user ended the night
    certificate: str | None = None  # the result of --certify in one line
    version: Literal[5] = 5

    @property
    def fills(self) -> bool:
        """True if TPE proposes while the agent is unavailable. TPE can only follow the scope of a direction."""
        is_readable = not self.direction or bool(scope_of(self.direction))
        is_wanted = is_readable if self.request.fill is None else self.request.fill
        return is_wanted and self.request.agent not in SEARCHES

    @property
    def deadline(self) -> datetime | None:
        """The end of --hours; None without."""
        hours = self.request.hours
        return None if hours is None else datetime.fromisoformat(self.started) + timedelta(hours=hours)

    def closed(self, records: Sequence[Record]) -> list[Record]:
        """Return the night's closed experiments."""
        ours = [record for record in records if record.campaign == (self.branch, self.rules_hash)]
        return [record for record in ours if record.number >= self.first and record.status != STARTED]


class Stop(NamedTuple):
    """Why a night is over."""

    cause: str
    is_planned: bool = True  # a stop rule or the user ended the night


def save(ledger: Ledger, state: NightState) -> None:
    """Write night.json atomically. Raises UsageError if runs/ was moved."""
    ledger.require_in_place()
    ledger.runs_dir.mkdir(exist_ok=True)
    write_json(ledger.runs_dir / NIGHT_NAME, state)


def load(ledger: Ledger) -> NightState | None:
    """Read night.json; None without a night. Raises UsageError if the file is damaged."""
    return read_json(ledger.runs_dir / NIGHT_NAME, NightState, "Delete it, then start a new night.")


def night_cost(state: NightState, ledger: Ledger) -> Cost:
    """Return the cost of the night's proposals."""
    return proposals_cost(ledger.runs_dir, state.branch, state.rules_hash, state.started)


def decided(records: Sequence[Record]) -> list[Record]:
    """Return the decided experiments in the order of their decisions, without interrupted and lost runs."""
    return sorted((record for record in records if record.place), key=lambda record: record.place)


def num_since_keep(records: Sequence[Record]) -> int:
    """Count the experiments with a new change since the last keep, without those of TPE for an unavailable agent."""
    since = takewhile(lambda record: not record.is_keep, reversed(decided(records)))
    return sum(record.status != Verdict.MEASURED and record.proposal.proposer != FILL for record in since)


class Kind(Enum):
    """The events for the observers of a night. A record is an event, too: its experiment was closed."""

    IDLE = auto()  # nothing to do at this moment
    STOPPED = auto()  # no run is in flight, and the state is on disk
    OVER = auto()  # the night is over, for the reason `Desk.over`: the same command starts another night


class Desk:
    """State, controller, waits, stop rules and observers of a night."""

    over: Stop | None = None  # set when the night cannot continue

    def __init__(self, state: NightState, controller: Controller) -> None:
        self.state, self.controller = state, controller
        self.bench, self.ledger = controller.bench, controller.ledger
        self.executor, self.note = controller.bench.executor, controller.reporter.note
        self.observers = list[Observer]()

    def update(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        save(self.ledger, self.state)

    def emit(self, event: Kind | Record) -> None:
        for observer in self.observers:
            observer(self, event)

    def open_waits(self, kind: str) -> list[Wait]:
        """Return the open waits of this kind. The kind run has one wait per place."""
        return [wait for wait in self.state.waits if wait.kind == kind and wait.ended is None]

    def begin_wait(self, kind: WaitKind, cause: str, ends_when: str, *, at_once: int = 0, **more: Any) -> None:
        """Begin a wait, or note another failed try. `at_once`: tries without a pause. `more`: fields of Wait.

        Before the next try of an agent or a run, the pause doubles with each failure.
        """
        before = next((w for w in self.open_waits(kind) if w.place == more.get("place", "")), None)
        # Runs that are lost together count as one try.
        num = before.num_checks + (before.place not in self.pauses(kind)) if before else 1 - at_once
        now, checks_at = self.controller.now(), None
        if kind in ("agent", "run"):
            pause = min(FIRST_SECONDS * 2 ** min(num - 1, 10), MAX_SECONDS) if num else 0.0
            checks_at = now + timedelta(seconds=pause)
        elif before and before.cause == cause:
            return
        wait = Wait(kind, cause, ends_when, before.since if before else now, checks_at, num, **more)
        self._set_waits(*(other for other in self.state.waits if other is not before), wait)
        self.note(wait.describe())

    def end_wait(self, kind: WaitKind, place: str = "") -> None:
        """End the open waits of this kind at this place, and at an unknown place."""
        if waits := [wait for wait in self.open_waits(kind) if wait.place in (place, "")]:
            now = self.controller.now()
            self._set_waits(*(replace(w, ended=now) if w in waits else w for w in self.state.waits))

    def _set_waits(self, *waits: Wait) -> None:
        with suppress(EngineError):  # if the disk is full, the next update writes the waits
            self.update(waits=waits)

    def pauses(self, kind: WaitKind) -> dict[str, float]:
        """Return the seconds until the next try, by place, of the waits of this kind whose pause is not over."""
        now, waits = self.controller.now(), self.open_waits(kind)
        return {w.place: (w.checks_at - now).total_seconds() for w in waits if w.checks_at and w.checks_at > now}

    def require_disk(self) -> None:
        """Raise EngineError if runs/ is not writable."""
        path = self.ledger.runs_dir / ".disk-probe"
        write_json(path, "0" * 1_000_000)  # more than a record and a page
        path.unlink()

    def closed(self) -> list[Record]:
        """Return the night's closed experiments."""
        return self.state.closed(self.ledger.records())

    def campaign(self) -> Campaign:
        """Return the campaign. Raises EngineError, a reason to wait, if a user's commit has no valid train.toml."""
        try:
            return self.controller.campaign()
        except UsageError as error:
            raise EngineError(str(error)) from None

    def runs(self) -> list[Record]:
        """Return the night's decided and running experiments."""
        return [*decided(self.closed()), *self.controller.in_flight]

    def runs_left(self) -> float:
        """Return the number of runs that the night can still start; infinite without --experiments and --hours."""
        most, seconds = self.state.request.experiments or math.inf, self.usable_seconds()
        in_time = seconds if math.isinf(seconds) else seconds // self.run_seconds() * self.executor.num_slots
        return max(min(most - len(self.runs()), in_time), 0.0)

    def seconds_left(self) -> float:
        """Return the seconds until the deadline; infinite without --hours."""
        deadline = self.state.deadline
        return math.inf if deadline is None else (deadline - self.controller.now()).total_seconds()

    def usable_seconds(self) -> float:
        """Return the seconds until the deadline, minus the time of --certify; infinite without --hours."""
        num_waves = math.ceil(2 * (self.state.request.certify or 0) / self.executor.num_slots)
        return self.seconds_left() - num_waves * self.run_seconds()

    def run_seconds(self) -> float:
        """Return the expected seconds of the next run: the low median of the last three, or else the budget."""
        seconds = [r.result.total_seconds for r in self.closed() if r.result and r.result.evaluation]
        # A single slow run does not start the final check runs.
        return median_low(seconds[-3:]) if seconds else self.bench.rules.budget_seconds

    def stage(self, num_queued: int = 0) -> Stage:
        """Return the stage of the night's next run, after `num_queued` others."""
        runs = self.runs()
        num_last = sum(record.run.stage is not Stage.SEARCH for record in runs)
        return next_stage(len(runs) + num_queued, num_last, self.runs_left() - num_queued, self.executor.num_slots)

    def num_free(self) -> int:
        """Return the number of free slots. A slot or node that lost a run is avoided until its next try."""
        self.executor.avoided = self.pauses("run")
        return self.executor.num_free

    def is_spent(self) -> bool:
        """Return True if the reported cost of the proposals has reached --max-cost."""
        return (night_cost(self.state, self.ledger).dollars or 0.0) >= (self.state.request.max_cost or math.inf)

    def stop_rule(self) -> Stop | None:
        """Return the first stop rule that applies, or None."""
        request, closed, seconds = self.state.request, self.closed(), self.run_seconds()
        done = decided(closed)
        if request.experiments and len(done) >= request.experiments:
            return Stop(f"{request.experiments} experiments are done")
        if self.usable_seconds() < seconds:
            return Stop(f"{request.hours:g} hours are over, or too short for another run of {seconds:.0f} s")
        if request.plateau and num_since_keep(done) >= request.plateau:
            return Stop(f"plateau: nothing kept in {num_since_keep(done)} experiments")
        standing = next((r.judgement.standing for r in reversed(done) if r.judgement and r.judgement.standing), None)
        if request.until and standing:
            bound = standing.incumbent - Z95 * standing.incumbent_sd
            if bound >= request.until:
                return Stop(f"--until {request.until:g}: the incumbent's score is at least {bound:.4f} (95 % interval)")
        # Proposals that were paid for run first, except those of an earlier direction, which never run.
        if self.is_spent() and all(answer.direction != self.state.direction for answer in self.state.pending):
            return Stop(f"--max-cost {request.max_cost:g} is reached")
        ended = [record for record in closed if record.failure is not Failure.INTERRUPTED]
        for records, most in ((done, MAX_CRASHES), (ended, MAX_CRASHES * self.executor.num_slots)):  # lost together
            crashes = [*takewhile(lambda record: record.status == Verdict.CRASH, reversed(records))]
            if len(crashes) >= most:
                return Stop(f"{len(crashes)} crashes in a row, the last one: {crashes[0].why}", is_planned=False)
        return None


Observer = Callable[[Desk, Kind | Record], None]

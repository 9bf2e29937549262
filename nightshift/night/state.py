"""What a night must remember beside the ledger, and when it is over: runs/night.json.

Everything that the records can tell (how many, kept when, crashed in a row) is counted from them each time,
so a night that was killed at any moment goes on with true counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from filelock import FileLock, Timeout

from nightshift.campaign.ledger import Ledger
from nightshift.errors import UsageError
from nightshift.files import write_atomically
from nightshift.records import Failure, Record

STATE_NAME = "night.json"
LOCK_NAME = ".night.lock"
STOP_NAME = "STOP"  # a file in the checkout's root
STATE_VERSION = 1
MAX_CRASHES = 5  # in a row: a campaign in which nothing runs any more is looked at by a person
MAX_WITHOUT_EDIT = 3
MAX_GIVEN_UP = 3


@dataclass(frozen=True, slots=True)
class Order:
    """What the person asked for. The same order goes on with a night that was cut off.

    `experiments` counts the baseline too; `plateau`: experiments in a row without a keep.
    """

    agent: str
    hours: float | None = None
    experiments: int | None = None
    plateau: int | None = None
    max_runs: int = 3
    budget_seconds: float | None = None
    engine: str | None = None
    gpus: str | None = None
    agent_timeout_seconds: float = 900.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Pending:
    """A proposal that was made and is not decided yet. `number`: of the first experiment that can be its own."""

    number: int
    source: str
    hypothesis: str
    prediction: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NightState:
    """`runs/night.json`. Times are ISO 8601, UTC; `cause` is set when the night is over."""

    order: Order
    branch: str
    rules_hash: str
    started: str
    first: int  # number of the night's first experiment
    pending: Pending | None = None
    num_without_edit: int = 0  # proposals in a row
    num_given_up: int = 0  # experiments in a row for which no valid proposal came
    doing: str = ""
    doing_since: str = ""
    cause: str | None = None
    ended: str | None = None

    @property
    def deadline(self) -> datetime | None:
        """When the hours are over; None without --hours."""
        if self.order.hours is None:
            return None
        return datetime.fromisoformat(self.started) + timedelta(hours=self.order.hours)

    def own(self, records: Sequence[Record]) -> list[Record]:
        """The closed experiments of this night."""
        return [
            r
            for r in records
            if r.number >= self.first
            and (r.branch, r.rules_hash) == (self.branch, self.rules_hash)
            and r.status != "started"
        ]


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a night is over. `is_planned`: a rule or a person said so, nothing went wrong."""

    cause: str
    is_planned: bool = True


def save(ledger: Ledger, state: NightState) -> None:
    """Write night.json: whole or not at all."""
    ledger.runs_dir.mkdir(exist_ok=True)
    data = json.dumps({"version": STATE_VERSION, **asdict(state)}, indent=1)
    write_atomically(ledger.runs_dir / STATE_NAME, data.encode() + b"\n")


def load(ledger: Ledger) -> NightState | None:
    """The last night of this checkout; None if there was none. UsageError when the file is damaged."""
    path = ledger.runs_dir / STATE_NAME
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        if data.pop("version") != STATE_VERSION:
            raise ValueError("another version of Nightshift wrote it")
        pending = data.pop("pending")
        if pending is not None:
            pending = Pending(**{**pending, "notes": tuple(pending["notes"])})
        return NightState(**{**data, "order": Order(**data["order"]), "pending": pending})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {error}", "Delete it: the next night starts anew.") from None


def lock(ledger: Ledger) -> FileLock:
    """One night at a time in a checkout; the kernel drops it when its holder dies. UsageError while it is held."""
    ledger.runs_dir.mkdir(exist_ok=True)
    held = FileLock(ledger.runs_dir / LOCK_NAME, timeout=1.0)
    try:
        held.acquire()
    except Timeout:
        raise UsageError("another night is running in this checkout", "See uv run nightshift status.") from None
    return held


def is_running(ledger: Ledger) -> bool:
    """True while a night runs in this checkout."""
    path = ledger.runs_dir / LOCK_NAME
    if not path.exists():
        return False
    probe = FileLock(path, timeout=0)
    try:
        probe.acquire()
    except Timeout:
        return True
    probe.release()
    return False


def decided(records: Sequence[Record]) -> list[Record]:
    """Those that count as experiments: not interrupted, not ended by broken machinery."""
    return [r for r in records if r.failure not in (Failure.MACHINERY, Failure.INTERRUPTED)]


def num_since_keep(records: Sequence[Record]) -> int:
    """Decided experiments since the last keep."""
    ours = decided(records)
    return next((i for i, r in enumerate(reversed(ours)) if r.status == "keep"), len(ours))


def num_crashes(records: Sequence[Record]) -> int:
    """Crashes in a row at the end; an interruption is nobody's fault."""
    ours = [r for r in records if r.failure is not Failure.INTERRUPTED]
    return next((i for i, r in enumerate(reversed(ours)) if r.status != "crash"), len(ours))


def stop_rule(state: NightState, own: Sequence[Record], now: datetime, run_seconds: float) -> Stop | None:
    """The first rule that says the night is over; None to go on.

    `own`: the night's closed experiments; `run_seconds`: what the next run is expected to take.
    """
    order, num_without = state.order, num_since_keep(own)
    if order.experiments is not None and len(decided(own)) >= order.experiments:
        return Stop(f"{order.experiments} experiments are done")
    if state.deadline is not None and now + timedelta(seconds=run_seconds) > state.deadline:
        return Stop(f"{order.hours:g} hours are over, or too short for another run of {run_seconds:.0f} s")
    if order.plateau is not None and num_without > order.plateau:
        return Stop(f"plateau: nothing kept in {num_without} experiments, the last of them in a new direction")
    if num_crashes(own) >= MAX_CRASHES:
        why = own[-1].judgement.why if own[-1].judgement else ""
        return Stop(f"{num_crashes(own)} crashes in a row, the last one: {why}", is_planned=False)
    return None


def lesson_of(record: Record) -> str:
    """What the numbers say, where the agent said nothing: one line, written after the verdict."""
    change, judgement = "; ".join(record.diff) or record.description, record.judgement
    if record.status == "crash" or judgement is None:
        return f"{change}: crashed, {judgement.why if judgement else 'no cause known'}"
    if judgement.delta is None or judgement.delta_stderr is None:
        return f"{change}: {judgement.why}"
    if abs(judgement.delta) < judgement.delta_stderr:
        word = "no difference that shows"
    else:
        word = "better" if judgement.delta > 0 else "worse"
    return f"{change}: {word}, {100 * judgement.delta:+.1f} +-{100 * judgement.delta_stderr:.1f} pp"


def ended(state: NightState, cause: str, now: datetime) -> NightState:
    """The night with its end."""
    return replace(state, cause=cause, ended=now.isoformat(timespec="seconds"), doing="")

"""What the parts of a night share: its state on disk, the table of its waits, and the observers of its events."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, NamedTuple

from nightshift.agents.base import Answer
from nightshift.campaign.ledger import log_proposal
from nightshift.campaign.posterior import next_stage
from nightshift.campaign.records import Cost, Record, Stage
from nightshift.campaign.waits import FILL, Wait, WaitKind, parse_time
from nightshift.errors import EngineError
from nightshift.experiment.experiment import Controller
from nightshift.files import write_atomically
from nightshift.night.state import NightState, Stop, decided, night_cost, run_seconds, runs_left, save

FIRST_SECONDS, MAX_SECONDS = 30.0, 900.0  # from one try in vain to the next: each wait is twice as long
PROBE_NAME = ".disk-probe"
_PROBE_BYTES = 1_000_000  # a record and a page need less


class Kind(StrEnum):
    """The kinds of events."""

    ANSWERED = "answered"  # `answer`: the first of an agent's answers, which has the cost of all
    CLOSED = "closed"  # `record`: an experiment that has its verdict
    WAITING = "waiting"  # a wait began, was in vain again, or ended
    IDLE = "idle"  # nothing is left to do at this moment
    STOPPED = "stopped"  # no run is in flight any more, and the state is on disk
    OVER = "over"  # the night: the same command begins another


class Event(NamedTuple):
    """Something that the observers of a night act on."""

    kind: Kind
    why: str = ""
    record: Record | None = None
    answer: Answer | None = None


class Desk:
    """What the parts of a night share."""

    def __init__(self, state: NightState, controller: Controller) -> None:
        self.state, self.controller = state, controller
        self.bench, self.ledger = controller.bench, controller.ledger
        self.executor, self.note = controller.bench.executor, controller.reporter.note
        self.observers = list[Callable[[Desk, Event], None]]()
        self.over: Stop | None = None  # set when the night cannot go on

    def update(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        save(self.ledger, self.state)

    def emit(self, kind: Kind, why: str = "", record: Record | None = None, answer: Answer | None = None) -> None:
        for observer in self.observers:
            observer(self, Event(kind, why, record, answer))

    def wait_for_kind(self, kind: str) -> Wait | None:
        """Return the wait of this kind that has not ended."""
        return next((wait for wait in self.state.waits if wait.kind == kind and wait.ended is None), None)

    def begin_wait(
        self, kind: WaitKind, cause: str, ends_when: str, seconds: float | None, meaning: str = "", meanwhile: str = ""
    ) -> None:
        """Begin a wait, or note that it was in vain once more. `seconds`: until the next try; None: its condition is
        looked at every few seconds."""
        now, before = self.controller.now(), self.wait_for_kind(kind)
        if before is not None and seconds is None:
            return
        since = before.since if before else now.isoformat(timespec="seconds")
        checks_at = None if seconds is None else (now + timedelta(seconds=seconds)).isoformat(timespec="seconds")
        wait = Wait(kind, cause, ends_when, since, checks_at, self._num_tries(kind), meaning, meanwhile)
        self._set_waits([*(other for other in self.state.waits if other is not before), wait])
        self.note(wait.describe())

    def pause_seconds(self, kind: str, at_once: bool = False) -> float:
        """Return the seconds until the next try: after each try in vain twice as many. `at_once`: 0 for the first."""
        num = self._num_tries(kind) - at_once
        return min(FIRST_SECONDS * 2 ** min(num - 1, 10), MAX_SECONDS) if num else 0.0

    def _num_tries(self, kind: str) -> int:
        """Return how many tries were in vain, this one included. Several runs that are lost at once count as one."""
        before = self.wait_for_kind(kind)
        return before.num_checks + self.is_due(kind) if before else 1

    def end_wait(self, *kinds: str) -> None:
        """End the waits of these kinds that have not ended."""
        waits = [wait for wait in map(self.wait_for_kind, kinds) if wait is not None]
        if waits:
            now = self.controller.now().isoformat(timespec="seconds")
            self._set_waits([replace(wait, ended=now) if wait in waits else wait for wait in self.state.waits])

    def _set_waits(self, waits: Sequence[Wait]) -> None:
        self.state = replace(self.state, waits=tuple(waits))
        with suppress(EngineError):  # the disk may be what is waited for: the table is written with the next change
            save(self.ledger, self.state)
        self.emit(Kind.WAITING)

    def is_due(self, kind: str) -> bool:
        """Return True if nothing of this kind is waited for, or its next try is due."""
        return self.seconds_until(kind) <= 0.0

    def seconds_until(self, kind: str) -> float:
        """Return the seconds until the next try; 0 without a wait of this kind."""
        wait, now = self.wait_for_kind(kind), self.controller.now()
        return (parse_time(wait.checks_at) - now).total_seconds() if wait and wait.checks_at else 0.0

    def disk_problem(self) -> str | None:
        """Return why runs/ cannot be written; None if it can."""
        path = self.ledger.runs_dir / PROBE_NAME
        try:
            write_atomically(path, bytes(_PROBE_BYTES))
            path.unlink()
        except OSError as error:
            return f"cannot write to {path.parent}: {error.strerror or error}"
        return None

    def own(self) -> list[Record]:
        """Return the night's closed experiments."""
        return self.state.own(self.ledger.records())

    def runs(self) -> list[Record]:
        """Return the night's experiments that are decided or in flight."""
        return [*decided(self.own()), *self.controller.in_flight]

    def run_seconds(self) -> float:
        """Return how long the next run is expected to take."""
        return run_seconds(self.own(), self.bench.rules.budget_seconds)

    def stage(self, num_queued: int = 0) -> Stage:
        """Return the stage of the night's next run, after `num_queued` others."""
        runs = self.runs()
        num_last = sum(record.run.stage is not Stage.SEARCH for record in runs)
        num_left = runs_left(self.state, self.own(), len(runs), self.controller) - num_queued
        return next_stage(len(runs) + num_queued, num_last, num_left, self.executor.num_slots)

    def num_free(self) -> int:
        return max(self.executor.num_slots - len(self.executor.in_flight()), 0)

    def cost(self) -> Cost:
        return night_cost(self.state, self.ledger)


class Price:
    """An observer that logs what answers cost, and notes once that --max-cost lacks dollars."""

    def __init__(self, agent: str) -> None:
        self._agent, self._is_noted = agent, False

    def __call__(self, desk: Desk, event: Event) -> None:
        if event.answer is None or event.answer.proposal.proposer == FILL:
            return
        cost, state = event.answer.proposal.cost, desk.state
        if cost is not None:
            log_proposal(desk.ledger.runs_dir, state.branch, state.rules_hash, state.started, cost)
        is_priced = cost is not None and cost.is_whole("dollars")
        if state.request.max_cost is None or is_priced or self._is_noted or event.answer.unavailable is not None:
            return  # an agent that is unavailable may have spent nothing
        self._is_noted = True
        num = "no" if cost is None or cost.dollars is None else "not all"
        rule = f"--max-cost {state.request.max_cost:g}"
        desk.note(f"{rule}: {self._agent} reported {num} dollars, so this rule cannot hold; others stop it")

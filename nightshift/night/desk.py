"""What the parts of a night share: its state on disk, the table of its waits, and the observers of its events."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from statistics import median_low
from typing import Any, NamedTuple

from nightshift.agents.base import Answer
from nightshift.campaign.cost import log_proposal
from nightshift.campaign.posterior import next_stage
from nightshift.campaign.records import Z95, Record, Stage
from nightshift.campaign.waits import FILL, Wait, WaitKind, parse_time
from nightshift.errors import EngineError
from nightshift.experiment.experiment import Controller
from nightshift.files import write_atomically
from nightshift.night.state import (
    MAX_CRASHES,
    NightState,
    Stop,
    by_end,
    decided,
    night_cost,
    num_crashes,
    num_since_keep,
    save,
)

FIRST_SECONDS, MAX_SECONDS = 30.0, 900.0  # from one try in vain to the next: each wait is twice as long
LOOK_SECONDS = 30.0  # between two looks at what a night has to do, and at a machine that is not ready
PROBE_NAME = ".disk-probe"
_PROBE_BYTES = 1_000_000  # a record and a page need less


class Kind(StrEnum):
    """The kinds of events."""

    ANSWERED = "answered"  # `answer`: the first of an agent's answers, which has the cost of all
    CLOSED = "closed"  # `record`: an experiment that has its verdict
    WAITING = "waiting"  # a wait began, was in vain again, or ended
    IDLE = "idle"  # nothing is left to do at this moment
    STOPPED = "stopped"  # no run is in flight any more, and the state is on disk
    OVER = "over"  # the night, for the reason `why`: the same command begins another


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

    def emit(self, kind: Kind, **fields: Any) -> None:
        for observer in self.observers:
            observer(self, Event(kind, **fields))

    def open_wait(self, kind: str) -> Wait | None:
        """Return the wait of this kind that has not ended."""
        return next((wait for wait in self.state.waits if wait.kind == kind and wait.ended is None), None)

    def begin_wait(
        self, kind: WaitKind, cause: str, ends_when: str, *, meaning: str = "", meanwhile: str = "", at_once: int = 0
    ) -> None:
        """Begin a wait, or note that it was in vain once more. `at_once`: so many first tries follow without a pause.

        A branch and a disk are looked at every few seconds, a machine every LOOK_SECONDS. An agent, and a run after
        one that was lost, are tried after a pause that doubles with each try in vain.
        """
        now, before = self.controller.now(), self.open_wait(kind)
        if before is not None and before.checks_at is None:
            return
        since, num_tries = now.isoformat(timespec="seconds"), 1
        if before is not None:  # several runs that are lost at once count as one try
            since, num_tries = before.since, before.num_checks + self.is_due(kind)
        seconds = LOOK_SECONDS
        if kind in ("agent", "run"):
            num = num_tries - at_once
            seconds = min(FIRST_SECONDS * 2 ** min(num - 1, 10), MAX_SECONDS) if num else 0.0
        checks_at = (now + timedelta(seconds=seconds)).isoformat(timespec="seconds")
        wait = Wait(kind, cause, ends_when, since, checks_at, num_tries, meaning, meanwhile)
        if kind in ("branch", "disk"):
            wait = replace(wait, checks_at=None)
        self._set_waits(*(other for other in self.state.waits if other is not before), wait)
        self.note(wait.describe())

    def end_wait(self, *kinds: str) -> None:
        """End the waits of these kinds that have not ended."""
        if any(map(self.open_wait, kinds)):
            now, waits = self.controller.now().isoformat(timespec="seconds"), self.state.waits
            self._set_waits(*(replace(w, ended=w.ended or now) if w.kind in kinds else w for w in waits))

    def _set_waits(self, *waits: Wait) -> None:
        with suppress(EngineError):  # the disk may be what is waited for: the table is written with the next change
            self.update(waits=waits)
        self.emit(Kind.WAITING)

    def is_due(self, kind: str) -> bool:
        """Return True if nothing of this kind is waited for, or its next try is due."""
        return self.seconds_until(kind) <= 0.0

    def seconds_until(self, kind: str) -> float:
        """Return the seconds until the next try; 0 without a wait of this kind."""
        wait, now = self.open_wait(kind), self.controller.now()
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

    def runs_left(self) -> float:
        """Return how many runs the night can still start; infinite without --experiments and --hours."""
        most, usable = self.state.request.experiments, self.usable_seconds()
        in_time = math.inf
        if not math.isinf(usable):
            in_time = max(usable // max(self.run_seconds(), 1.0), 0.0) * self.executor.num_slots
        return in_time if most is None else min(most - len(self.runs()), in_time)

    def usable_seconds(self) -> float:
        """Return the seconds until the deadline, less those of the runs of --certify in all slots; infinite without
        --hours."""
        deadline, num_runs = self.state.deadline, 2 * (self.state.request.certify or 0)
        if deadline is None:
            return math.inf
        certificate_seconds = math.ceil(num_runs / self.executor.num_slots) * self.run_seconds()
        return (deadline - self.controller.now()).total_seconds() - certificate_seconds

    def run_seconds(self) -> float:
        """Return the expected time of the next run: the median of the last three, the budget before there is one."""
        seconds = [r.result.total_seconds for r in self.own() if r.result and r.result.evaluation]
        # One slow run alone does not begin the night's last runs.
        return median_low(seconds[-3:]) if seconds else self.bench.rules.budget_seconds

    def stage(self, num_queued: int = 0) -> Stage:
        """Return the stage of the night's next run, after `num_queued` others."""
        runs = self.runs()
        num_last = sum(record.run.stage is not Stage.SEARCH for record in runs)
        return next_stage(len(runs) + num_queued, num_last, self.runs_left() - num_queued, self.executor.num_slots)

    def num_free(self) -> int:
        return max(self.executor.num_slots - len(self.executor.in_flight()), 0)

    def is_spent(self) -> bool:
        """Return True if the night's proposals have cost --max-cost, by their agents' own figures."""
        most, dollars = self.state.request.max_cost, night_cost(self.state, self.ledger).dollars
        return most is not None and dollars is not None and dollars >= most

    def stop_rule(self) -> Stop | None:
        """Return the first rule by which nothing new begins; None to go on."""
        request, own, seconds = self.state.request, self.own(), self.run_seconds()
        num_without, num_crashed = num_since_keep(own), num_crashes(own)
        if request.experiments is not None and len(decided(own)) >= request.experiments:
            return Stop(f"{request.experiments} experiments are done")
        if self.usable_seconds() < seconds:
            certificate = " and the certificate" if request.certify else ""
            cause = f"{request.hours:g} hours are over, or too short for another run of {seconds:.0f} s{certificate}"
            return Stop(cause)
        if request.plateau is not None and num_without > request.plateau:
            return Stop(f"plateau: nothing kept in {num_without} experiments, the last of them in a new direction")
        standing = next((r.judgement.standing for r in reversed(own) if r.judgement and r.judgement.standing), None)
        if request.until is not None and standing is not None:
            bound = standing.incumbent - Z95 * standing.incumbent_sd
            if bound >= request.until:
                cause = f"--until {request.until:g}: the incumbent's score is at least {bound:.4f} (95 % interval)"
                return Stop(cause)
        if self.is_spent() and not self.state.pending:  # what is paid for is run
            cost = night_cost(self.state, self.ledger).text("dollars")
            return Stop(f"--max-cost {request.max_cost:g}: its proposals cost {cost}")
        if num_crashed >= MAX_CRASHES:
            cause = f"{num_crashed} crashes in a row, the last one: {by_end(own)[-1].why}"
            return Stop(cause, is_planned=False)
        return None


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
        if state.request.max_cost is None or is_priced or self._is_noted or event.answer.source is None:
            return  # an agent that was stopped, or is unavailable, may report nothing
        self._is_noted = True
        num = "no" if cost is None or cost.dollars is None else "not all"
        rule = f"--max-cost {state.request.max_cost:g}"
        desk.note(f"{rule}: {self._agent} reported {num} dollars, so this rule cannot hold; others stop it")

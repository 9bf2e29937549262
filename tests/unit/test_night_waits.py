"""What a night waits for, on a clock that a test moves: the seconds that are lost, and the words in every place."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from nightshift.agents.base import Context, Proposing
from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Job, Record, Result
from nightshift.cli.status import Status
from nightshift.errors import EngineError, Failure
from nightshift.experiment import experiment
from nightshift.experiment.experiment import Controller
from nightshift.night.loop import Night
from nightshift.night.state import Stop, load
from nightshift.report.data import gather
from nightshift.report.sections import sections
from tests.conftest import CAMPAIGN, git
from tests.unit import test_night_agent
from tests.unit.test_night_agent import Sent, Thinker, Timed, a_night, busy_share
from tests.waiting import Clock

controller = test_night_agent.controller
RUN_SECONDS = 300.0
BEGINS = 1_000.0  # of what a night waits for: a run is under way, and an answer waits for it


def page_lines(ledger: Ledger) -> Sequence[str]:
    return sections(gather(ledger, CAMPAIGN), {})["night"].lines


class Watched(Timed):
    """A stand-in for an executor, and for a user who acts (`acts`: by second) and reads `status` and the page."""

    def __init__(self, clock: Clock, controller: Controller, acts: dict[float, Callable[[], object]], num_slots=1):
        super().__init__(num_slots, clock, RUN_SECONDS)
        self.controller, self.acts = controller, acts
        self.status, self.page = list[str](), list[str]()

    def wait(self, timeout_seconds: float) -> None:
        self.clock.now += 5.0
        for second in [second for second in self.acts if second <= self.clock.now]:
            self.acts.pop(second)()
        ledger = self.controller.ledger
        state = load(ledger) if ledger.runs_dir.exists() else None
        if state is not None and set(state.waiting) - set(self.page):
            status = Status.of(ledger, self.controller.now())
            assert status.night is not None
            self.status += [line.partition(" ")[2].strip() for line in status.lines() if line.startswith("waiting:")]
            self.page += [line for line in page_lines(ledger) if line.startswith("waiting since")]


def idle_seconds(records: list[Record], executor: Timed) -> float:
    """Return how long the slots did not train, from the end of the baseline to the last start."""
    first, last = min(executor.begins.values()) + RUN_SECONDS, max(executor.begins.values())
    return round((1 - busy_share(records, executor, RUN_SECONDS)) * (last - first) * executor.num_slots)


def waited(controller: Controller) -> list[str]:
    return [note for note in controller.reporter.notes if note.startswith("waiting since")]


def a_locked_night(controller: Controller, *arguments: Any, **asked: object) -> tuple[Night, Stop, Sent]:
    with controller.ledger.lock():  # `status` looks at the lock
        return a_night(controller, *arguments, **asked)


@contextmanager
def full_disk(begins: float, ends: float) -> Iterator[dict[float, Callable[[], object]]]:
    """Yield what a user does: from `begins` to `ends` no file can have a byte."""
    kind, (soft, hard) = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        change = partial(resource.setrlimit, kind)
        yield {begins: partial(change, (0, hard)), ends: partial(change, (soft, hard))}
    finally:
        resource.setrlimit(kind, (soft, hard))


def test_a_disk_that_is_full_for_a_minute(controller: Controller, clock: Clock) -> None:
    with full_disk(1_190.0, 1_250.0) as acts:  # a run ends at 1,200 s
        executor = Watched(clock, controller, acts)
        _, stop, sent = a_locked_night(controller, executor, Thinker(clock, 15.0), experiments=8)
    assert stop.is_planned, stop
    assert idle_seconds(controller.ledger.records(), executor) <= 60 + 30 + 5 + 30
    [sentence] = waited(controller)
    assert f": cannot write {controller.ledger.runs_dir}" in sentence
    assert sentence.endswith("; ends when this machine is ready; next check within 30 s")
    assert [event for event, why in sent.events if event == "paused"] == ["paused"]
    assert not [record.why for record in controller.ledger.records() if record.failure]
    [line] = [line for line in page_lines(controller.ledger) if line.startswith("Paused")]
    assert "cannot write" in line


def test_a_night_certifies_nothing_while_another_branch_is_checked_out(controller: Controller, clock: Clock) -> None:
    switch = {BEGINS: lambda: git(controller.bench.root, "switch", "--quiet", "--force", "main")}
    executor = Watched(clock, controller, switch)
    _, stop, _ = a_locked_night(controller, executor, Thinker(clock, 15.0), hours=1, certify=1)
    assert stop.cause.startswith("1 hours are over")
    assert controller.ledger.records()[-1].why.endswith("it ended while it could not be judged")
    assert load(controller.ledger).certificate == f"not certified: main is checked out instead of {CAMPAIGN}"


def test_a_branch_switch_pauses_the_night_and_the_sentence_names_what_is_checked_out(controller, clock) -> None:
    root, begins = controller.bench.root, 1_190.0
    acts = {
        begins: lambda: git(root, "switch", "--quiet", "--force", "main"),
        begins + 40: lambda: git(root, "switch", "--quiet", "--create", "other"),
        begins + 80: lambda: git(root, "switch", "--quiet", CAMPAIGN),
    }
    executor = Watched(clock, controller, acts)
    night, stop, _ = a_locked_night(controller, executor, Thinker(clock, 15.0), experiments=8)
    assert stop.cause == "8 experiments are done"
    assert idle_seconds(controller.ledger.records(), executor) <= 80 + 30 + 5 + 30
    [minute] = {f"{wait.since:%M}" for wait in night.state.waits}
    sentences = [
        f"waiting since 2026-11-25 01:{minute} UTC: the checkout moved from autoresearch/test to {branch}; "
        "ends when autoresearch/test is checked out again; next check within 30 s"
        for branch in ("main", "other")
    ]
    assert waited(controller) == executor.status == executor.page == sentences
    assert [record.failure for record in controller.ledger.records()] == [None] * 8
    assert [line[:6] for line in page_lines(controller.ledger)] == ["Paused"]


def test_a_branch_that_is_gone_ends_the_night_which_says_so(controller: Controller, clock: Clock) -> None:
    remove = partial(git, controller.bench.root, "branch", "--move", CAMPAIGN, "mine")
    _, stop, _ = a_night(controller, Watched(clock, controller, {BEGINS: remove}), Thinker(clock, 15.0), hours=3.0)
    assert stop.cause.startswith(f"the night's branch {CAMPAIGN} was deleted or renamed")
    assert not stop.is_planned
    assert CAMPAIGN not in Repo(controller.bench.root).branches()


def test_an_agent_that_cannot_be_started_is_waited_for_and_tpe_fills_the_slots(controller: Controller, clock: Clock):
    class Broken(Thinker):
        def propose(self, context: Context) -> Proposing:
            if BEGINS < self.clock.now < BEGINS + 600:
                yield
                raise EngineError("bwrap cannot be started")
            return (yield from super().propose(context))

    executor = Timed(1, clock, RUN_SECONDS)
    night, stop, sent = a_night(controller, executor, Broken(clock, 15.0), hours=1.0)
    assert stop.is_planned, stop
    assert [wait.kind for wait in night.state.waits] == ["agent"]
    assert ": thinker: program: bwrap cannot be started; ends when thinker answers" in waited(controller)[0]
    assert idle_seconds(controller.ledger.records(), executor) <= 60
    assert [event for event, _ in sent.events if event != "keep"] == ["agent unavailable", "end"]
    lines = "\n".join(page_lines(controller.ledger))
    assert "Agent unavailable: 2026-11-25 01:" in lines
    assert " by TPE (agent unavailable)" in lines


class Placed(Watched):
    """A stand-in for two slots, of which the first loses each run until `mended`. `places`: of each run."""

    mended = 3_000.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, num_slots=2)
        self.places = dict[Path, str]()

    @property
    def num_free(self) -> int:
        return len(self.free_names)

    @property
    def free_names(self) -> list[str]:
        taken = {*self.avoided, *(self.places[folder] for folder in self.in_flight())}
        return [name for name in ("slot 1", "slot 2") if name not in taken]

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        self.places[folder] = self.free_names[0]
        super().submit(folder, job, enter)

    def place(self, folder: Path) -> str:
        return self.places[folder]

    def result(self, folder: Path) -> Result:
        made = super().result(folder)
        if self.places[folder] == "slot 1" and folder.name != "0001" and self.clock.now < self.mended:
            raise EngineError("the worker returned no result: no driver")
        return structs.replace(made, slot=self.places[folder])


def test_only_the_slot_that_lost_a_run_pauses_and_no_other_run_is_lost(controller: Controller, clock: Clock) -> None:
    executor = Placed(clock, controller, {})
    made, stop, _ = a_locked_night(controller, executor, Thinker(clock, 15.0), experiments=14, riders=0)
    assert stop.cause == "14 experiments are done"
    ours = controller.ledger.records()
    lost = [record for record in ours if record.failure is Failure.INFRASTRUCTURE]
    assert {executor.places[controller.ledger.run_dir(record.number)] for record in lost} == {"slot 1"}
    assert len(lost) < 6, "each pause is longer than the one before"
    first = controller.ledger.run_dir(lost[0].number)
    cause = f"experiment {lost[0].number:04d} was lost on slot 1 (runs/{first.name}/worker.log): the worker returned no"
    assert any(cause in line and "ends when a run on slot 1 ends normally" in line for line in waited(controller))
    begins = sorted(executor.begins[f] for f, place in executor.places.items() if place == "slot 2" and f != first)
    assert max(late - early for early, late in itertools.pairwise(begins)) <= RUN_SECONDS + 60.0, "slot 2 paused"
    assert made.state.waits[0].ended is not None


def test_a_suspended_machine_is_reported_and_costs_no_training_time(controller: Controller, clock: Clock) -> None:
    asleep, now = [0.0], controller.now

    class Slept(Watched):
        def result(self, folder: Path) -> Result:
            assert self.clock.now >= self.begins[folder] + RUN_SECONDS, "a run was cut short"
            return super().result(folder)

    controller = replace(controller, now=lambda: now() + timedelta(seconds=asleep[0]))
    executor = Slept(clock, controller, {BEGINS: lambda: asleep.append(asleep.pop() + 7_200.0)})
    _, stop, _ = a_locked_night(controller, executor, Thinker(clock, 15.0), experiments=6)
    assert stop.cause == "6 experiments are done"
    text = "this machine was suspended for 2 h 0 min, or its clock was set forward"
    assert controller.reporter.notes.count(f"{text}; this does not count as training time") == 1
    assert max(record.total_seconds for record in controller.ledger.records()) < 7_200.0


def test_a_night_waits_for_the_disk_that_its_last_run_used(controller, clock, monkeypatch) -> None:
    free = [0.5]

    class Measured(Watched):
        def result(self, folder: Path) -> Result:
            return structs.replace(super().result(folder), disk_bytes=200_000_000)

    monkeypatch.setattr(experiment, "free_disk_gb", lambda path: free[0])
    acts = {BEGINS: lambda: free.append(free.pop() - 0.4), 2_000.0: lambda: free.append(free.pop() + 0.4)}
    executor = Measured(clock, controller, acts)
    _, stop, _ = a_locked_night(controller, executor, Thinker(clock, 15.0), experiments=6)
    assert stop.cause == "6 experiments are done"
    assert [record.failure for record in controller.ledger.records()] == [None] * 6
    text = "0.100 GB of disk are free, and the runs in flight and the next one need 0.200 GB. Run: du -sh runs/*"
    assert text in waited(controller)[0]
    assert not any(1_300.0 < begin < 2_000.0 for begin in executor.begins.values())

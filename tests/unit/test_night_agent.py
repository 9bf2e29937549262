"""A night and its agent, on a clock that a test moves: slots stay busy, an agent that cannot be asked is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from nightshift.agents.availability import Availability, Meaning
from nightshift.agents.base import Answer, Context, Proposing
from nightshift.campaign.records import Action, Job, Proposal, Record, Result
from nightshift.campaign.waits import FILL
from nightshift.config.train_toml import parse, set_values
from nightshift.experiment.experiment import Controller
from nightshift.night import observers
from nightshift.night.loop import Night
from nightshift.night.observers import Notifier
from nightshift.night.start import begin
from nightshift.night.state import NightRequest, Stop, load
from tests.campaigns import replace
from tests.conftest import slow
from tests.stand_in_controller import make_poor, with_bench
from tests.stand_in_proposer import StandInProposer
from tests.unit.test_parallel import RULES, AnyOrder
from tests.waiting import Clock

START = datetime(2026, 11, 25, 1, 0, tzinfo=UTC)
TICK_SECONDS = 15.0
LR, DECAY, NORM = "trainer.optim.lr", "trainer.optim.weight_decay", "trainer.optim.max_norm"
KEYS = (DECAY, NORM, LR, "orchestrator.train.sampling.temperature", "trainer.optim.betas2", "trainer.optim.betas1")


class Timed(AnyOrder):
    """A stand-in for an executor whose runs take `run_seconds` of a clock that its `wait` moves."""

    def __init__(self, num_slots: int, clock: Clock, run_seconds: float = 600.0) -> None:
        super().__init__(num_slots, seed=0)
        self.clock, self.run_seconds, self.begins = clock, run_seconds, dict[Path, float]()

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        super().submit(folder, job, enter)
        self.begins[folder] = self.clock.now

    def is_over(self, folder: Path) -> bool:
        return folder not in self._jobs or self.clock.now >= self.begins[folder] + self.run_seconds

    def wait(self, timeout_seconds: float) -> None:
        self.clock.now += TICK_SECONDS

    def result(self, folder: Path) -> Result:
        made = super().result(folder)
        return replace(made, total_seconds=self.run_seconds)


class Thinker(StandInProposer):
    """A stand-in for an agent that thinks for `seconds`, then changes one key after the other. `says`: by second,
    why it is unavailable then."""

    name, is_instant = "thinker", False

    def __init__(self, clock: Clock, seconds: float, says: Callable[[float], Availability | None] = lambda t: None):
        self.clock, self.seconds, self.says, self.num = clock, seconds, says, 0
        self.contexts, self.asked_at = list[Context](), list[float]()

    def propose(self, context: Context) -> Proposing:
        self.contexts.append(context)
        self.asked_at.append(self.clock.now)
        until = self.clock.now + self.seconds
        while self.clock.now < until:
            if (yield):
                return (Answer(None, cause="stopped"),)
        match self.says(self.clock.now):
            case Availability() as found:
                return (Answer(None, cause=found.text, unavailable=found),)
        return tuple(self.answer(context) for _ in range(context.num_proposals))

    def answer(self, context: Context) -> Answer:
        self.num += 1
        key, config = KEYS[self.num % len(KEYS)], parse(context.source)
        value = (config.resolved.get(key) or 1.0) * (1 - 0.01 * (1 + self.num % 17))
        return Answer(set_values(context.source, {key: value}), Proposal(description=f"{key} {self.num}"))


class Filler(Thinker):
    name, is_instant = "tpe", True

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, 0.0)
        self.num = 100


@pytest.fixture
def controller(checkout: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Controller:
    """A controller whose times are those of `clock`, and which writes no page: each takes a second."""
    monkeypatch.setattr(observers, "write_summary", lambda state, controller: "")
    made = make_poor(checkout, RULES, monkeypatch)
    return replace(made, clock=clock, now=lambda: START + timedelta(seconds=clock.now))


class Sent(Notifier):
    """A stand-in for a person with a phone."""

    def __init__(self) -> None:
        super().__init__(None, lambda text: None, Path())
        self.messages = list[Mapping[str, Any]]()

    def send(self, event: str, message: Mapping[str, Any]) -> None:
        assert message["event"] == event
        self.messages.append(message)

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(message["event"], message["why"]) for message in self.messages]


def a_night(
    controller: Controller, executor: AnyOrder, proposer: StandInProposer, fills: bool = True, **asked: object
) -> tuple[Night, Stop, Sent]:
    controller, sent = with_bench(controller, executor=executor), Sent()
    state = begin(NightRequest("thinker", fill=fills, **asked), controller)
    night = Night(state, controller, proposer, lambda text: None, Filler(controller.clock))
    night.observers.append(sent)
    return night, night.run(), sent


def busy_share(records: Sequence[Record], executor: Timed, seconds: float) -> float:
    """Of the slots' time between the end of the baseline and the last start: the share in which a run trains."""
    first, last = min(executor.begins.values()) + executor.run_seconds, max(executor.begins.values())
    trained = sum(min(begin + executor.run_seconds, last) - begin for begin in sorted(executor.begins.values())[1:])
    return trained / (executor.num_slots * (last - first))


@pytest.mark.slow
def test_slots_train_while_an_agent_thinks(controller: Controller, clock: Clock) -> None:
    executor = Timed(8, clock)
    _, stop, _ = a_night(controller, executor, Thinker(clock, 180.0), hours=2.0)
    assert stop.is_planned, stop
    assert busy_share(controller.ledger.records(), executor, 600.0) >= 0.85


@pytest.mark.slow
def test_a_wave_of_three_at_three_slots(controller: Controller, clock: Clock) -> None:
    executor, proposer = Timed(3, clock), Thinker(clock, 15.0)
    a_night(controller, executor, proposer, experiments=7)
    assert [context.num_proposals for context in proposer.contexts][:2] == [3, 1]
    ours = controller.ledger.records()
    assert len({executor.begins[controller.ledger.run_dir(number)] for number in (2, 3, 4)}) == 1
    assert len({key for record in ours[1:4] for key in record.run.new.keys}) == 3
    adopted = [decision for record in ours for decision in record.moved if decision.action is Action.ADOPT]
    num_kept = len(adopted) + sum(record.is_keep for record in ours[1:])  # at some time
    assert max(len(record.run.changes) for record in ours) <= 1 + num_kept + 1


class Rates(Thinker):
    """Changes the learning rate only, and predicts +1 pp."""

    def __init__(self, clock: Clock, rates: Sequence[float]) -> None:
        super().__init__(clock, 15.0)
        self.rates = rates

    def answer(self, context: Context) -> Answer:
        rate = self.rates[self.num]
        self.num += 1
        return Answer(set_values(context.source, {LR: rate}), Proposal(description=f"lr {rate}", prediction="+1 pp"))


def test_a_proposal_whose_key_was_kept_meanwhile_replaces_the_value(controller: Controller, clock: Clock) -> None:
    proposer = Rates(clock, (3e-6, 3e-6, 2.9e-6, 2.8e-6, 2.7e-6))
    _, stop, _ = a_night(controller, Timed(1, clock), proposer, experiments=3)
    assert stop.is_planned, stop
    _, second, third = controller.ledger.records()
    assert second.is_keep
    assert [second.proposal.description, third.proposal.description] == ["lr 3e-06", "lr 2.9e-06"]
    assert any("proposal refused: " in note and "0002" in note for note in controller.reporter.notes), "3e-6 again"
    assert third.run.kept == (second.run.new,)
    assert third.diff == ("trainer.optim.lr 3e-6 -> 2.9e-6",)


def test_what_was_proposed_and_not_run_is_run_by_the_next_night(controller: Controller, clock: Clock) -> None:
    proposer = Thinker(clock, 15.0)

    class Stopping(Timed):
        def result(self, folder: Path) -> Result:
            if folder.name == "0002":
                (controller.bench.root / "STOP").touch()
            return super().result(folder)

    night, stop, _ = a_night(controller, Stopping(1, clock), proposer, experiments=9)
    assert stop.cause == "file STOP found"
    assert [answer.proposal.description for answer in night.state.pending] == ["trainer.optim.lr 2"]
    (controller.bench.root / "STOP").unlink()
    num_asked = proposer.num
    night, stop, _ = a_night(controller, Timed(1, clock), proposer, experiments=1)
    assert controller.ledger.records()[2].proposal.description == "trainer.optim.lr 2"
    assert proposer.num == num_asked


def test_a_night_begins_with_the_baseline_if_its_last_run_is_an_hour_old(controller: Controller, clock: Clock) -> None:
    begins_with_baseline, proposer = [], Thinker(clock, 15.0)
    for pause in (0.0, 60.0, 4_000.0):
        clock.now += pause
        num_before = len(controller.ledger.records())
        a_night(controller, Timed(1, clock), proposer, experiments=2)
        begins_with_baseline.append(controller.ledger.records()[num_before].run.is_baseline)
    assert begins_with_baseline == [True, False, True]


@pytest.mark.parametrize("fills", [slow(True), False])
def test_without_fill_the_slots_wait_and_nothing_is_a_refusal(controller, clock, fills) -> None:
    away = Availability(Meaning.LOGIN, "Not logged in")
    proposer = Thinker(clock, 15.0, lambda now: away if now > 1_800 else None)
    _, stop, _ = a_night(controller, Timed(1, clock), proposer, fills=fills, hours=1.0 + fills, plateau=4)
    assert " hours are over" in stop.cause, stop  # the experiments of tpe count for no plateau
    num_fills = sum(record.proposal.proposer == FILL for record in controller.ledger.records())
    assert num_fills > 5 if fills else num_fills == 0
    assert len(proposer.asked_at) < 5 + 6 + 1.5 * 4  # soon at first, then every 15 minutes


def test_an_edit_of_the_direction_holds_for_the_next_proposal(controller: Controller, clock: Clock) -> None:
    path = controller.bench.root.parent / "direction.md"
    path.write_text("the schedule only")

    class Editing(Timed):
        def result(self, folder: Path) -> Result:
            if folder.name == "0002":
                path.write_text("the optimizer only")
            return super().result(folder)

    proposer = Thinker(clock, 15.0)
    proposer.is_instant = True  # asked when the slot is free
    a_night(controller, Editing(1, clock), proposer, experiments=4, direction=str(path))
    texts = ["the schedule only", "the optimizer only"]
    assert [context.direction for context in proposer.contexts] == [texts[0], texts[1], texts[1]]
    assert load(controller.ledger).directions == ((1, texts[0]), (3, texts[1]))


def test_changes_outside_the_scope_are_not_measured_again(controller: Controller, clock: Clock) -> None:
    def riders() -> list[Record]:
        return [record for record in controller.ledger.records() if record.run.rider]

    a_night(controller, Timed(1, clock), Thinker(clock, 10.0), experiments=6)
    num_before = len(riders())
    assert num_before, "this test needs a change that is measured again"
    proposer = Rates(clock, [2.9e-6 - 7e-8 * number for number in range(30)])
    a_night(controller, Timed(1, clock), proposer, experiments=5, only=LR)
    assert {key for record in riders()[num_before:] for key in record.run.rider.keys} <= {LR}
    assert proposer.num > 3

"""However a night ends, who sleeps is told so: on a disk that takes nothing, with damaged records, by a bug."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from nightshift.agents.base import Answer, Context
from nightshift.agents.search import SearchProposer
from nightshift.campaign.records import NIGHT_NAME, Result
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.experiment.experiment import Controller
from nightshift.night import observers, state
from nightshift.night.loop import Night
from nightshift.night.state import NightRequest, NightState
from nightshift.report import page
from tests.conftest import CAMPAIGN
from tests.stand_in_controller import make_poor, with_bench
from tests.stand_in_proposer import StandInProposer
from tests.unit.test_night_agent import Sent
from tests.unit.test_parallel import RULES, AnyOrder

WRITE_SUMMARY = observers.write_summary


class Acting(StandInProposer):
    """A stand-in proposer, which does something to the night instead of proposing."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def answer(self, context: Context) -> Answer:
        self._act()
        return Answer(None)


@pytest.fixture
def controller(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    monkeypatch.setattr(observers, "write_summary", lambda state, controller: "the summary")  # a page takes a second
    monkeypatch.setattr(state, "FIRST_SECONDS", 0.0)
    made = make_poor(checkout, RULES, monkeypatch)
    return with_bench(made, executor=AnyOrder(num_slots=1, seed=0))


def night(controller: Controller, act: Callable[[], object]) -> tuple[Night, Sent, list[str]]:
    rules_hash, started = controller.bench.rules_hash, controller.now().isoformat()
    state = NightState(NightRequest("acting"), rules_hash, started=started, first=1, branch=CAMPAIGN)
    told, said = Sent(), list[str]()
    night = Night(state, controller, Acting(act), said.append, SearchProposer("tpe", 0))
    night.observers.append(told)
    return night, told, said


def test_a_page_that_cannot_be_written_stops_neither_summary_nor_notification(controller, monkeypatch):
    monkeypatch.setattr(observers, "write_summary", WRITE_SUMMARY)
    monkeypatch.setattr(page, "write_report", Mock(side_effect=OSError(28, "No space left on device")))
    made, told, said = night(controller, lambda: None)
    stop = made.run()
    assert stop.cause.startswith("8 proposals in a row were refused")
    assert told.events == [("end", stop.cause)]
    assert "\nstopped:          8 proposals in a row were refused" in said[-1]
    assert "the page cannot be written: OSError: [Errno 28] No space left on device" in controller.reporter.notes


def test_damaged_records_are_an_end_without_counts(controller: Controller) -> None:
    def damage() -> None:
        controller.ledger.run_dir(2).mkdir()
        (controller.ledger.run_dir(2) / "record.json").write_text("{")

    made, told, _ = night(controller, damage)
    with pytest.raises(UsageError, match="damaged"):
        made.run()
    [message] = told.messages
    assert (message["event"], message["counts"]) == ("end", None)
    assert "damaged" in message["why"]


def test_a_bug_is_told_and_a_reboot_which_the_same_command_goes_on_after_is_not(controller: Controller) -> None:
    made, told, _ = night(controller, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        made.run()
    assert [event for event, _ in told.events] == ["end"]
    assert told.events[0][1].startswith("ZeroDivisionError: ")
    made, told, said = night(controller, Mock(side_effect=Interrupted("stopped by SIGTERM")))  # a reboot
    with pytest.raises(Interrupted):
        made.run()
    assert told.events == []
    assert said[-1] == "the summary"
    assert json.loads((controller.ledger.runs_dir / NIGHT_NAME).read_text())["cause"] is None


def test_a_baseline_that_is_lost_three_times_ends_a_night_that_measured_nothing(controller: Controller) -> None:
    causes = ["no driver, pid 71", "the disk is slow", "no driver"]

    class Losing(AnyOrder):
        def result(self, folder: Path) -> Result:
            self.cancel([folder])
            raise EngineError(causes.pop(0))

    made, told, _ = night(with_bench(controller, executor=Losing(num_slots=1, seed=0)), lambda: None)
    stop = made.run()
    assert causes == []
    assert not stop.is_planned
    assert stop.cause.startswith("the baseline crashed: no driver")
    assert told.events[-1] == ("end", stop.cause)

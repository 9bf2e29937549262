"""However a night ends, who sleeps is told so: on a disk that takes nothing, with damaged records, by a bug."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from nightshift.agents.base import Answer, Context
from nightshift.campaign.metrics import PROGRESS_NAME
from nightshift.campaign.records import NIGHT_NAME, Phase, Progress, Result
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.experiment.experiment import Controller
from nightshift.files import write_json
from nightshift.night import observers, state
from nightshift.night.loop import Night
from nightshift.night.state import STOP_NAME, NightRequest, NightState, Stop
from tests.conftest import CAMPAIGN
from tests.stand_in_controller import make_poor, with_bench
from tests.stand_in_proposer import StandInProposer
from tests.unit.test_night_agent import START, Sent
from tests.unit.test_parallel import RULES, AnyOrder
from tests.waiting import Clock


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
    state = NightState(
        NightRequest("acting"),
        controller.bench.rules_hash,
        started=controller.now().isoformat(),
        first=1,
        branch=CAMPAIGN,
    )
    told, said = Sent(), list[str]()
    return Night(state, controller, Acting(act), said.append, notifier=told), told, said


def refuse_the_state(controller: Controller) -> None:
    """Root may write anywhere: a folder in the place of a file is refused to everybody."""
    path = controller.ledger.runs_dir / NIGHT_NAME
    if not path.is_dir():
        path.unlink(missing_ok=True)
        path.mkdir()


class Clocked(AnyOrder):
    """A stand-in for an executor whose waits take a second of a clock; `act` is called after each."""

    def __init__(self, num_slots: int, clock: Clock, act: Callable[[], object]) -> None:
        super().__init__(num_slots, seed=0)
        self.clock, self.act = clock, act

    def wait(self, timeout_seconds: float) -> None:
        super().wait(timeout_seconds)
        self.clock.now += 1.0
        self.act()


def clocked(controller: Controller, executor: AnyOrder, clock: Clock) -> Controller:
    controller = replace(with_bench(controller, executor=executor), clock=clock)
    return replace(controller, now=lambda: START + timedelta(seconds=clock.now))


def test_a_state_that_cannot_be_written_pauses_the_night_and_the_user_is_notified(controller, monkeypatch):
    monkeypatch.setattr(state, "FIRST_SECONDS", 30.0)
    clock, path = Clock(), controller.ledger.runs_dir / NIGHT_NAME

    def mend() -> None:
        if clock.now > 100.0 and path.is_dir():
            path.rmdir()
            (controller.bench.root / STOP_NAME).touch()

    made, told, said = night(clocked(controller, Clocked(1, clock, mend), clock), lambda: refuse_the_state(controller))
    stop = made.run()
    assert stop.cause == f"file {STOP_NAME} found"
    (event, why), end = told.events
    assert event == "paused"
    assert f": cannot write {path}: " in why
    assert "; ends when this machine is ready; next check at " in why
    assert end == ("end", stop.cause)
    assert [line[:11] for line in said] == ["0001 the ba", "the summary"]
    assert [wait.kind for wait in made.state.waits] == ["machine"]


def test_a_night_that_cannot_write_from_the_start_says_so(controller: Controller) -> None:
    controller.ledger.runs_dir.mkdir()
    refuse_the_state(controller)
    made, told, _ = night(controller, lambda: None)
    with pytest.raises(EngineError, match="cannot write"):
        made.run()
    [(event, why)] = told.events
    assert event == "end"
    assert why.startswith("EngineError: cannot write")


def test_a_summary_that_cannot_be_written_takes_no_notice_with_it(controller, monkeypatch):
    def refused(state: NightState, controller: Controller) -> str:
        raise OSError(28, "No space left on device")

    made, told, _ = night(controller, lambda: monkeypatch.setattr(observers, "write_summary", refused))
    stop = made.run()
    assert stop.cause.startswith("8 proposals in a row were refused")
    assert told.events == [("end", stop.cause)]
    assert controller.reporter.notes[-1].startswith("the summary cannot be written: ")


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
    assert json.loads((controller.ledger.runs_dir / NIGHT_NAME).read_text())["cause"] == message["why"]


def test_a_bug_is_told_and_a_reboot_which_the_same_command_goes_on_after_is_not(controller: Controller) -> None:
    made, told, _ = night(controller, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        made.run()
    assert [event for event, _ in told.events] == ["end"]
    assert told.events[0][1].startswith("ZeroDivisionError: ")

    def reboot() -> None:
        raise Interrupted("stopped by SIGTERM")

    made, told, said = night(controller, reboot)
    with pytest.raises(Interrupted):
        made.run()
    assert told.events == []
    assert said[-1] == "the summary"
    assert json.loads((controller.ledger.runs_dir / NIGHT_NAME).read_text())["cause"] is None


def test_a_machine_that_is_not_ready_is_waited_for_and_told_once(controller, monkeypatch):
    monkeypatch.setattr(state, "FIRST_SECONDS", 30.0)
    clock, causes = Clock(), ["busy", "port 2048", "port 2049", "port 2050"]
    made, told, _ = night(clocked(controller, Clocked(1, clock, lambda: None), clock), lambda: None)

    def fail(stop: Stop | None) -> bool:
        if causes:
            raise EngineError(causes.pop(0))
        made.desk.over = Stop("enough")
        return stop is None

    monkeypatch.setattr(made, "_act", fail)
    stop = made.run()
    [(event, why), end] = told.events
    assert event == "paused"
    assert ": port 2048; ends when this machine is ready; next check at " in why
    assert end == ("end", stop.cause)
    assert clock.now <= 4 * 30 + 4
    [wait] = made.state.waits
    assert (wait.cause, wait.num_checks) == ("port 2050", 4)


def lose_runs(controller: Controller, causes: list[str], trains: bool = False) -> tuple[Controller, list[Path]]:
    """A set-up that loses each run with the next cause, after a step if it `trains`, and the folders of the runs."""
    folders = list[Path]()

    class Losing(AnyOrder):
        def result(self, folder: Path) -> Result:
            self.cancel([folder])
            folders.append(folder)
            if trains:
                write_json(folder / PROGRESS_NAME, Progress(Phase.TRAINING, num_steps=3))
            raise EngineError(causes[len(folders) - 1])

    return with_bench(controller, executor=Losing(num_slots=1, seed=0)), folders


@pytest.mark.parametrize("trains", [False, True])
def test_a_baseline_that_is_lost_three_times_ends_a_night_that_measured_nothing(controller, monkeypatch, trains):
    monkeypatch.setattr("nightshift.engines.trl.engine.free_disk_gb", lambda path: 0.1)
    controller, folders = lose_runs(controller, ["no driver, pid 71", "the disk is slow", "no driver"], trains)
    made, told, _ = night(controller, lambda: None)
    stop = made.run()
    assert len(folders) == 3
    assert not stop.is_planned
    assert stop.cause.startswith("the baseline crashed: no driver")
    assert "0.10 GB of disk are free. Run: du -sh runs/*" in stop.cause  # the warning beside it
    assert told.events[-1] == ("end", stop.cause)

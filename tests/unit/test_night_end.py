"""However a night ends, who sleeps is told so: on a disk that takes nothing, with damaged records, by a bug."""

import json
import math
import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightshift.agents.base import Answer, Context
from nightshift.campaign.metrics import PROGRESS_NAME
from nightshift.campaign.records import NIGHT_NAME, Phase, Progress, Result
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.experiment.experiment import Controller
from nightshift.files import write_json
from nightshift.night import desk, summary
from nightshift.night.loop import Night
from nightshift.night.notify import Notifier
from nightshift.night.state import NightRequest, NightState
from tests.conftest import CAMPAIGN
from tests.stand_in_controller import make_poor, with_bench
from tests.stand_in_proposer import StandInProposer
from tests.unit.test_parallel import RULES, AnyOrder, Rates
from tests.waiting import Clock


class Told(Notifier):
    """A stand-in for a person with a phone."""

    def __init__(self) -> None:
        super().__init__(None, lambda text: None)
        self.messages = list[dict[str, Any]]()

    def send(self, event: str, message: Mapping[str, Any]) -> None:
        assert message["event"] == event
        self.messages.append(dict(message))

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(message["event"], message["why"]) for message in self.messages]


class Acting(StandInProposer):
    """A stand-in proposer, which does something to the night instead of proposing."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def answer(self, context: Context) -> Answer:
        self._act()
        return Answer(None)


@pytest.fixture
def controller(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    monkeypatch.setattr(summary, "write_summary", lambda state, controller: "the summary")  # a page takes a second
    made = make_poor(checkout, RULES, monkeypatch)
    return with_bench(made, executor=AnyOrder(num_slots=1, seed=0))


def night(controller: Controller, act: Callable[[], object]) -> tuple[Night, Told, list[str]]:
    state = NightState(
        NightRequest("acting"), controller.bench.rules_hash, started=controller.now().isoformat(), first=1, branch=CAMPAIGN
    )
    told, said = Told(), list[str]()
    return Night(state, controller, Acting(act), said.append, notifier=told), told, said


def refuse_the_state(controller: Controller) -> None:
    """Root may write anywhere: a folder in the place of a file is refused to everybody."""
    path = controller.ledger.runs_dir / NIGHT_NAME
    if not path.is_dir():
        path.unlink(missing_ok=True)
        path.mkdir()


def test_a_disk_that_takes_nothing_is_told_and_the_summary_is_shown_all_the_same(controller: Controller) -> None:
    made, told, said = night(controller, lambda: refuse_the_state(controller))
    stop = made.run()
    cause = f"cannot write {controller.ledger.runs_dir / NIGHT_NAME}: "
    assert stop.cause.startswith(f"4 infrastructure failures in a row: {cause}")
    (crash, why), end = told.events
    assert crash == "repeated crash"
    assert why.startswith(cause)
    assert end == ("end", stop.cause)
    assert told.messages[-1]["counts"]["verdict"] == {"baseline": 1}
    assert said == ["the summary"]
    assert [
        note for note in controller.reporter.notes if note.startswith(f"the night's last traces are not whole: {cause}")
    ]


def test_a_disk_that_is_full_for_a_while_costs_no_run_that_ends_meanwhile(controller: Controller) -> None:
    limit, (soft, hard), clock = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE), Clock()

    class Executor(AnyOrder):
        def wait(self, timeout_seconds: float) -> None:
            super().wait(timeout_seconds)
            clock.now += 1.0
            if clock.now > full_at + 30.0:
                resource.setrlimit(limit, (soft, hard))

        def result(self, folder: Path) -> Result:
            nonlocal full_at
            if folder.name == "0004" and full_at == math.inf:
                full_at = clock.now
                resource.setrlimit(limit, (0, hard))
            return super().result(folder)

    full_at, controller = math.inf, replace(with_bench(controller, executor=Executor(num_slots=2, seed=0)), clock=clock)
    state = NightState(
        NightRequest("rates", experiments=6),
        controller.bench.rules_hash,
        started=controller.now().isoformat(),
        first=1,
        branch=CAMPAIGN,
    )
    try:
        stop = Night(state, controller, Rates(0), lambda text: None, pauses=(60.0,) * 3, notifier=Told()).run()
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert stop.cause == "6 experiments are done"
    assert len([note for note in controller.reporter.notes if "-- once more in 60 s" in note]) == 1
    assert [r.number for r in controller.ledger.records() if r.failure] == [4], "another run was lost"


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

    made, told, _ = night(controller, lambda: monkeypatch.setattr(summary, "write_summary", refused))
    stop = made.run()
    assert told.events == [("end", stop.cause)]
    assert controller.reporter.notes[-1].endswith("No space left on device")


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


def test_the_second_failure_of_infrastructure_with_one_cause_is_told_once(controller, monkeypatch):
    causes = ["busy", "port 2048", "port 2049", "port 2050"]
    made, told, _ = night(controller, lambda: None)

    def fail() -> None:
        raise EngineError(causes.pop(0))

    monkeypatch.setattr(made, "_step", fail)
    stop = made.run()
    assert stop.cause == "4 infrastructure failures in a row: port 2050"
    assert told.events == [("repeated crash", "port 2049"), ("end", stop.cause)]


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


@pytest.mark.parametrize(
    ("causes", "trains", "num_starts", "cause"),
    [
        (["no driver, pid 71", "no driver, pid 82"], False, 2, "two starts in a row failed: no driver, pid 82"),
        (["no driver", "the disk is full", "no driver"], False, 3, "the baseline crashed: no driver"),
        (["killed"] * 3, True, 3, "the baseline crashed: killed"),
    ],
)
def test_two_starts_that_fail_with_the_same_cause_end_a_night_that_measured_nothing(
    controller, monkeypatch, causes, trains, num_starts, cause
):
    monkeypatch.setattr("nightshift.engines.trl.engine.free_disk_gb", lambda path: 0.1)
    controller, folders = lose_runs(controller, causes, trains)
    made, told, _ = night(controller, lambda: None)
    stop = made.run()
    assert len(folders) == num_starts
    assert not stop.is_planned
    assert stop.cause.startswith(cause)
    assert ("0.10 GB of disk are free. Run: du -sh runs/*" in stop.cause) == (num_starts == 2)  # the warning beside it
    assert told.events[-1] == ("end", stop.cause)

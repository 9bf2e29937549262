"""One run in a worker: what it refuses, whose fault a failed start is, and its end without a gradient."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nightshift.campaign.metrics import NO_GRADIENT_STEPS, Step, num_without_gradient, read_steps
from nightshift.campaign.records import JOB_NAME, Job, Outcome, Phase, Progress, Record, Request, Result, Training
from nightshift.cli.output import summary
from nightshift.engines.base import NoGradient
from nightshift.engines.machine import Machine
from nightshift.errors import EngineError, Failure
from nightshift.experiment import worker
from nightshift.experiment.experiment import Controller
from nightshift.experiment.worker import ending
from tests.campaigns import replace as change
from tests.conftest import git
from tests.rules import ARITHMETIC_TRL, ROOT
from tests.stand_in_controller import furnish, make_controller
from tests.stand_ins import fault, quick
from tests.unit.test_composite import Parrot

RULES = ARITHMETIC_TRL
GOOD, BAD = {"lr": 1e-6}, {"lr": 1.0}  # settings of jobs


class Session(Parrot):
    """Trains one step, then answers everything wrong."""

    training = Training(Outcome.BUDGET, num_steps=1)

    def __init__(self, close: EngineError | None) -> None:
        super().__init__(["#### -1"] * RULES.environments[0].num_validation)
        self._close = close

    def train(self, budget_seconds: float, progress: Any) -> Training:
        progress(Progress(phase="training", num_steps=1))
        return self.training

    def confirm(self) -> None:
        """Nothing else was served."""

    def close(self) -> None:
        if self._close:
            raise self._close


class Engine(SimpleNamespace):
    """A stand-in. `starts`: settings that start; `close`: what ending a session raises."""

    machine = Machine()

    def hardware(self) -> str:
        return "CPU"

    def versions(self) -> dict[str, str]:
        return {}

    def open(self, settings: dict[str, float], seed: int, folder: Path, deadline_seconds: float) -> Session:
        if settings not in self.starts:
            raise EngineError("exit code 1", failure=Failure.UNKNOWN)
        return Session(self.close)


def run(monkeypatch: Any, folder: Path, starts: list[Any], close: EngineError | None = None, **job: Any) -> Result:
    monkeypatch.setattr(worker, "open_engine", lambda *arguments: Engine(starts=starts, close=close))
    made = Job(RULES, RULES.hash(ROOT), BAD, seed=1, deadline_seconds=60.0, token="", incumbent=GOOD)
    return worker.make_run(replace(made, **job), ROOT, folder)


@pytest.mark.parametrize(
    ("starts", "failure", "cause"),
    [
        ([GOOD], Failure.CONFIG, "exit code 1; the incumbent starts, so the config is at fault"),
        ([], Failure.INFRASTRUCTURE, "exit code 1; the incumbent does not start either: exit code 1"),
    ],
)
def test_a_start_that_fails_for_no_known_cause_has_the_incumbent_s_tried(starts, failure, cause, monkeypatch, tmp_path):
    training = run(monkeypatch, tmp_path, starts).training
    assert (training.failure, training.cause) == (failure, cause)


def test_a_training_that_fails_for_no_known_cause_has_the_incumbent_s_start_tried(monkeypatch, tmp_path) -> None:
    """As a kernel that is compiled in the first step, and raises there."""
    failed = Training(Outcome.CRASHED, 0, 12.0, cause="trainer ended: exit code 1", log="trainer.log")
    monkeypatch.setattr(Session, "training", failed)
    training = run(monkeypatch, tmp_path, [GOOD, BAD]).training
    cause = "trainer ended: exit code 1; the incumbent starts, so the config is at fault"
    assert training == replace(failed, failure=Failure.CONFIG, cause=cause)
    other = tmp_path / "baseline"
    other.mkdir()
    assert run(monkeypatch, other, [BAD], incumbent=None).training == replace(failed, failure=Failure.INFRASTRUCTURE)
    late = tmp_path / "late"
    late.mkdir()
    monkeypatch.setattr(Session, "training", replace(failed, num_steps=3))
    assert run(monkeypatch, late, [GOOD, BAD]).training == replace(failed, num_steps=3, failure=Failure.INFRASTRUCTURE)


def test_a_result_records_what_machine_toml_sets(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(Engine, "machine", Machine(environment={"CC": "gcc-12"}))
    assert run(monkeypatch, tmp_path, [BAD]).versions == {"machine.toml": "CC = gcc-12"}


def test_a_worker_refuses_other_rules_and_other_hardware_than_its_job_s(monkeypatch, tmp_path) -> None:
    for job in ({"rules_hash": "other"}, {"hardware": "H100"}):
        result = run(monkeypatch, tmp_path, [BAD], **job)
        assert (result.training.failure, result.evaluation) == (Failure.INFRASTRUCTURE, None)
        assert result.training.cause.startswith("the worker's rules hash or hardware differs from the job's: ")


def test_a_run_whose_processes_cannot_be_ended_has_no_score(monkeypatch, tmp_path) -> None:
    assert run(monkeypatch, tmp_path, [BAD]).evaluation.eval_score == 0.0
    ended = run(monkeypatch, tmp_path, [BAD], EngineError("a process is left", failure=Failure.INFRASTRUCTURE))
    assert (ended.training.cause, ended.training.failure) == ("a process is left", Failure.INFRASTRUCTURE)
    assert ended.evaluation is None


ALIVE, DEAD, UNKNOWN = Step(1, grad_norm=0.3), Step(1, grad_norm=0.0), Step(1)
CONFIG_OF_RATE = b"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = %s\n"


@pytest.fixture
def controller(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """Runs of about 50 stand-in steps."""
    furnish(checkout)
    return make_controller(checkout, quick(ARITHMETIC_TRL), monkeypatch)


def experiment(controller: Controller, lr: bytes, asked: str) -> Record:
    (controller.bench.root / "train.toml").write_bytes(CONFIG_OF_RATE % lr)
    fault(controller.bench.root, asked, once=False)
    return controller.run(Request())


def baseline(controller: Controller, asked: str) -> Record:
    (controller.bench.root / "train.toml").write_bytes(CONFIG_OF_RATE % b"3e-6")
    git(controller.bench.root, "commit", "--quiet", "--all", "-m", "baseline config")
    return experiment(controller, b"3e-6", asked)


def end_of(steps: list[Step], budget_seconds: float = 100.0) -> int | None:
    """The step at which a run with steps of 1 s is ended; None if it is not."""
    watch = ending(lambda reading: None, budget_seconds)
    for number in range(1, len(steps) + 1):
        reading = Progress(Phase.TRAINING, number, budget_seconds - number)
        try:
            so_far = steps[:number]
            num_with = sum(step.has_gradient is True for step in so_far)
            watch(replace(reading, num_with_gradient=num_with, num_without_gradient=num_without_gradient(so_far)))
        except NoGradient:
            return number
    return None


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (Step(1, grad_norm=0.0), False),
        (Step(1, grad_norm=1e-9, equal_share=1.0), False),  # a mean of equal fractions is rounded
        (Step(1, grad_norm=0.2), True),
        (Step(1, grad_norm=float("nan")), True),
        (Step(1), None),  # not measured is not 0
        (Step(1, all_right_share=0.4, all_wrong_share=0.6), None),  # of rewards that nobody knows to be 0 or 1
    ],
)
def test_a_step_has_no_gradient_if_its_norm_is_0_or_every_group_is_equal(step: Step, expected: bool | None) -> None:
    assert step.has_gradient is expected


def test_ten_steps_in_a_row_end_a_run() -> None:
    good = [ALIVE] * 10
    assert end_of([*good, *[DEAD] * 30]) == 10 + NO_GRADIENT_STEPS == 20
    assert end_of([*good, *[DEAD] * 9, ALIVE, *[DEAD] * 9]) is None
    assert end_of([*good, *[DEAD] * 9, UNKNOWN, *[DEAD] * 9]) is None
    assert end_of([UNKNOWN] * 100) is None
    assert num_without_gradient([]) == 0


def test_a_run_without_a_gradient_since_its_first_step_goes_on_for_half_of_its_budget() -> None:
    assert end_of([DEAD] * 100) == 50
    assert end_of([*[DEAD] * 49, ALIVE, *[DEAD] * 50]) is None  # its only gradient came late
    assert end_of([DEAD] * 9, budget_seconds=10.0) is None


def test_a_run_with_reward_0_ends_after_half_of_its_budget_and_is_scored(controller: Controller) -> None:
    baseline(controller, "rewards")
    record = experiment(controller, b"3e-5", "no_gradient")
    result = record.result
    assert record.status in ("keep", "discard")
    assert result.training.outcome is Outcome.NO_GRADIENT
    assert (result.training.cause, result.training.failure) == (None, None)
    assert 25 <= result.training.num_steps < 45
    assert result.evaluation.weights.step == result.training.num_steps
    assert "\noutcome:          no_gradient: training ended early" in summary(record)
    found = "no gradient from step 1 on: every answer is wrong; keys to try: orchestrator.group_size"
    assert (record.health or "").startswith(found)


def test_health_compares_the_steps_of_a_run_with_one_without_the_new_change(controller: Controller) -> None:
    first = baseline(controller, "rewards")
    training = replace(first.result.training, num_steps=1000)
    controller.ledger.write(change(first, result=change(first.result, training=training)))
    health = experiment(controller, b"3e-5", "rewards").health or ""
    assert "without the new change, a run made 1000; keys to try: trainer.optim.lr" in health
    assert "in the budget" not in (controller.run(Request(baseline=True)).health or "")


def test_a_baseline_is_never_ended(controller: Controller) -> None:
    record = baseline(controller, "late_no_gradient")
    assert record.result.training.outcome is Outcome.BUDGET
    assert "outcome:" not in summary(record)
    steps = read_steps(controller.ledger.run_dir(record.number) / "metrics.jsonl")
    assert len(steps) - num_without_gradient(steps) == 3
    job = msgspec.json.decode((controller.ledger.run_dir(1) / JOB_NAME).read_bytes(), type=Job)
    assert job.incumbent is None

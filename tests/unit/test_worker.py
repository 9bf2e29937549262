"""One run in a worker: what it refuses, and whose fault a failed start is."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nightshift.campaign.records import Failure, Job, Outcome, Progress, Result, Training
from nightshift.errors import EngineError
from nightshift.experiment import worker
from tests.rules import ARITHMETIC_TRL, ROOT
from tests.unit.test_form import Parrot

RULES = ARITHMETIC_TRL
GOOD, BAD = {"lr": 1e-6}, {"lr": 1.0}  # settings of jobs


class Session(Parrot):
    """Trains one step, then answers everything wrong."""

    def __init__(self, close: EngineError | None) -> None:
        super().__init__(["#### -1"] * RULES.environments[0].num_validation)
        self._close = close

    def train(self, budget_seconds: float, progress: Any) -> Training:
        progress(Progress(phase="training", num_steps=1))
        return Training(Outcome.BUDGET, num_steps=1)

    def close(self) -> None:
        if self._close:
            raise self._close


class Engine(SimpleNamespace):
    """A stand-in. `starts`: settings that start; `close`: what ending a session raises."""

    def hardware(self) -> str:
        return "CPU"

    def versions(self) -> dict[str, str]:
        return {}

    def open(self, settings: dict[str, float], seed: int, folder: Path, deadline_seconds: float) -> Session:
        if settings not in self.starts:
            raise EngineError("exit code 1", is_config_fault=None)
        return Session(self.close)


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, starts: list[Any], close: EngineError | None = None, **job: Any
) -> Result:
    monkeypatch.setattr(worker, "open_engine", lambda *arguments: Engine(starts=starts, close=close))
    made = Job(RULES, RULES.hash(ROOT), BAD, seed=1, deadline_seconds=60.0, token="", incumbent=GOOD)
    return worker.make_run(replace(made, **job), ROOT, folder)


@pytest.mark.parametrize(
    ("starts", "failure", "cause"),
    [
        ([GOOD], Failure.TRAINING, "exit code 1; the incumbent starts, so it is the config's fault"),
        ([], Failure.MACHINERY, "exit code 1; the incumbent does not start either: exit code 1"),
    ],
)
def test_a_start_that_fails_for_no_known_cause_has_the_incumbent_s_tried(starts, failure, cause, monkeypatch, tmp_path):
    training = run(monkeypatch, tmp_path, starts).training
    assert (training.failure, training.cause) == (failure, cause)


def test_a_worker_refuses_other_rules_and_other_hardware_than_its_job_s(monkeypatch, tmp_path) -> None:
    for job, what in (({"rules_hash": "other"}, "rules"), ({"hardware": "H100"}, "hardware")):
        result = run(monkeypatch, tmp_path, [BAD], **job)
        assert (result.training.failure, result.evaluation) == (Failure.MACHINERY, None)
        assert result.training.cause.startswith(f"the worker has other {what} than its job: ")


def test_a_run_whose_processes_cannot_be_ended_has_no_score(monkeypatch, tmp_path) -> None:
    assert run(monkeypatch, tmp_path, [BAD]).evaluation.eval_score == 0.0
    ended = run(monkeypatch, tmp_path, [BAD], EngineError("a process is left", is_config_fault=False))
    assert (ended.training.cause, ended.training.failure) == ("a process is left", Failure.MACHINERY)
    assert ended.evaluation is None

"""What every executor must do: the one of the tests, local with real workers, slurm with a real cluster.

Another executor is a param of `executor`, with a way to lose a run.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.records import JOB_NAME, LOG_NAME, RESULT_NAME, STARTED_NAME
from nightshift.errors import EngineError, Failure
from nightshift.executors import slurm
from nightshift.executors.base import Executor, Slot
from nightshift.executors.local import LocalExecutor
from nightshift.executors.slurm import SlurmExecutor
from tests import slurm_cluster, stand_ins
from tests.conftest import slow
from tests.night_checkout import furnish, leftovers
from tests.slurm_cluster import CONFIG, Cluster
from tests.stand_in_pool import Case, StandInExecutor, last_word
from tests.waiting import wait_for


@pytest.fixture(params=["stand-in", "local", slow("slurm")])
def case(request: pytest.FixtureRequest, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    furnish(checkout)
    environ = dict(os.environ)
    if request.param == "stand-in":
        monkeypatch.setattr("nightshift.experiment.worker.open_engine", stand_ins.trl_engine)
        executor: Executor[Any] = StandInExecutor(checkout, num_slots=2)
    elif request.param == "local":
        stand_ins.install("trl")
        executor = LocalExecutor(checkout, environ, [Slot(cores=(n % 2,), name=f"slot {n + 1}") for n in range(2)])
    else:
        if why := slurm_cluster.missing():
            pytest.skip(why)
        stand_ins.install("trl")
        cluster: Cluster = request.getfixturevalue("cluster")
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        monkeypatch.setattr(slurm, "RESULT_SECONDS", 5.0)
        executor = SlurmExecutor(checkout, dict(os.environ), CONFIG)
    executor.require_ready()
    yield Case(executor, checkout)
    executor.cancel(executor.in_flight())
    wait_for(lambda: not leftovers(checkout))


cluster = slurm_cluster.cluster


def test_runs_side_by_side_come_back_each_with_its_own_result(case: Case) -> None:
    folders = [case.submit(number, seed=number) for number in (1, 2)]
    assert set(case.executor.in_flight()) == {*folders}
    assert case.executor.num_free == case.executor.num_slots - 2
    for number, folder in enumerate(folders, 1):
        case.until_over(folder)
        assert case.executor.has_begun(folder)
        result = case.executor.result(folder)
        assert (result.seed, result.training.failure, result.slot) == (number, None, case.executor.place(folder))
        assert result.evaluation is not None
    assert case.executor.in_flight() == {}
    assert case.executor.num_free == case.executor.num_slots


def test_job_json_is_there_before_the_journal_has_the_job_and_both_before_a_worker(case: Case) -> None:
    folder, seen = case.folder(), list[tuple[bool, bool]]()

    def refuse() -> None:
        seen.append(((folder / JOB_NAME).is_file(), bool(case.executor.in_flight())))
        raise EngineError("the disk is full")

    with pytest.raises(EngineError, match="the disk is full"):
        case.executor.submit(folder, case.job(), refuse)
    assert (seen, case.executor.in_flight()) == ([(True, False)], {})
    assert not (folder / LOG_NAME).exists()


def test_a_lost_run_is_an_infrastructure_failure_and_no_other_run_is_lost(case: Case) -> None:
    lost, other = case.submit(1, holds=True), case.submit(2, seed=2)
    case.until_training(lost)
    case.lose(lost)
    case.until_over(lost)
    with pytest.raises(EngineError, match=r"(0001 has no|ended without a|returned no) result") as error:
        case.executor.result(lost)
    assert error.value.failure is Failure.INFRASTRUCTURE
    assert [*case.executor.in_flight()] == [other]
    case.until_over(other)
    assert case.executor.result(other).evaluation is not None


def test_a_cancelled_run_leaves_nothing_though_it_ignores_sigterm(case: Case) -> None:
    folder = case.submit(holds=True)
    case.until_training(folder)
    for process in leftovers(case.root):
        if last_word(process).endswith("spec.json"):  # the trainer; its worker ends it
            process.suspend()
    case.executor.cancel([folder, case.root / "runs" / "0009"])
    wait_for(lambda: not leftovers(case.root))
    assert case.executor.in_flight() == {}
    case.executor.cancel([folder])


def test_a_run_that_is_started_or_collected_twice_is_refused(case: Case) -> None:
    folder = case.submit()
    case.until_over(folder)
    case.executor.result(folder)
    for number in (1, 9):
        with pytest.raises(EngineError, match=f"no job was submitted for .*{number:04d}"):
            case.executor.result(case.root / "runs" / f"{number:04d}")
    if not isinstance(case.executor, StandInExecutor):  # which starts no worker
        folder = case.folder(2)
        (folder / STARTED_NAME).touch()
        case.executor.submit(folder, case.job(), lambda: None)
        case.until_over(folder)
        with pytest.raises(EngineError, match="result: "):
            case.executor.result(folder)
        assert not (folder / RESULT_NAME).exists()


def test_a_run_past_its_deadline_is_over(case: Case) -> None:
    folder = case.submit()
    case.executor._flights[folder] = replace(case.executor._flights[folder], ends_at=0.0)
    assert case.executor.is_over(folder)


def test_no_run_begins_where_one_was_lost(case: Case) -> None:
    case.executor.avoided = {""} if not case.executor.free_slots else {case.executor.free_slots[0].name}
    assert case.executor.num_free == (1 if isinstance(case.executor, LocalExecutor) else 0)

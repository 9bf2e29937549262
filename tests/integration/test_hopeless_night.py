"""Whole nights whose runs stop when they are hopeless. The stand-in's rewards are what its policy would score."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from nightshift.campaign.hopeless import is_spared
from nightshift.foretelling import window
from nightshift.records import Outcome, Record
from nightshift.worker import Job
from tests.night_checkout import finish, furnish, leftovers, nightshift, problems, records, start
from tests.stand_in_night import EARLY_STOP_SECONDS
from tests.stand_ins import fault
from tests.waiting import wait_for

BASELINE = b"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 6e-7  # poor\n"
SURE = [[0.25, 1.0, 0.05], [0.5, 1.0, 0.03]]  # share, growth, sd
ASKED = {"agent": "lr", "proposer": "lr", "budget_seconds": None, "early_stop": SURE}


@pytest.fixture
def root(checkout: Path) -> Iterator[Path]:
    furnish(checkout, BASELINE)
    fault(checkout, "rewards", once=False)
    yield checkout
    for process in leftovers(checkout):
        process.kill()


def missed(root: Path, record: Record) -> bool:
    """Whether the rewards of its run lay below what its job asked of them."""
    job = msgspec.json.decode((root / "runs" / f"{record.number:04d}" / "run-1" / "job.json").read_bytes(), type=Job)
    seen = [(window(record.runs[0].curve, rung.foretelling.share), rung.least) for rung in job.rungs]
    assert len(seen) == 2
    return any(reward is not None and reward < least for reward, least in seen)


def test_a_night_stops_what_is_hopeless_and_books_what_it_foretold(root: Path) -> None:
    code, _, stderr = finish(start(root, experiments=9, **ASKED))
    assert code == 0, stderr
    assert problems(root) == []
    ours = records(root)
    hopeless = [record for record in ours if any(run.forecast for run in record.runs)]
    assert [r.number for r in hopeless] == [r.number for r in ours if r.parent is not None and missed(root, r)]
    assert "lr 3e-05" in [record.description for record in hopeless]  # a tenth of what the others learn
    # Which files are spared is for their hashes to say, and those for the sets that the night draws.
    spared, stopped = ([r for r in hopeless if is_spared(r) is told] for told in (True, False))
    assert all(record.score is not None and record.forecast is None for record in spared)
    assert spared or stopped
    for record in stopped:
        (run,), forecast = record.runs, record.forecast
        assert forecast is not None
        assert (record.status, record.score, run.evaluation, run.training.outcome) == (
            "discard", None, None, Outcome.STOPPED,
        )  # fmt: skip
        assert forecast.reward < forecast.parent_reward
        assert record.judgement is not None
        assert (record.judgement.delta or 0.0) < 0.0
        assert f"at {forecast.share:.0%} of its budget, stopped" in record.judgement.why
        # It stopped about there: a stand-in's step is 0.1 s of a budget of 2 s.
        assert (run.training.training_seconds or 0.0) < (forecast.share + 0.25) * EARLY_STOP_SECONDS
        assert record.total_seconds is not None
    assert {record.status for record in ours} == {"keep", "discard"}
    assert leftovers(root) == []
    code, _, stderr = nightshift(root, "report")
    assert code == 0, stderr
    page = (root / "runs" / "report.html").read_text()
    assert f"{len(stopped)} stopped early; {len(spared)} more trained to the end to test that, 0 of them better" in page
    summary = (root / "runs" / "report.md").read_text()
    assert ("discard, stopped" in summary) is bool(stopped)


def test_it_is_off_unless_the_rules_say_so(root: Path) -> None:
    code, _, stderr = finish(start(root, experiments=3, agent="lr", proposer="lr", budget_seconds=2.0))
    assert code == 0, stderr
    assert all(run.forecast is None and run.evaluation for record in records(root) for run in record.runs)


def test_a_run_that_stops_while_there_is_no_head_is_adopted(root: Path) -> None:
    night = start(root, experiments=4, **ASKED)
    attempt = root / "runs" / "0003" / "run-1" / "attempt-0"
    wait_for((attempt / "metrics.jsonl").exists)
    night.kill()
    night.communicate()
    wait_for((attempt / "result.json").exists)
    code, _, stderr = finish(start(root, experiments=4, **ASKED))
    assert code == 0, stderr
    assert problems(root) == []
    third = records(root)[2]
    assert third.runs[0].forecast is not None
    assert (third.forecast is None) is is_spared(third)
    assert len(third.runs) == 1
    assert third.decided == 3

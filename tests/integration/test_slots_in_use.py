"""How much of a night's time its slots are in use: stand-in runs of a minute in four slots.

40 with a proposer of 6 s, of which two crash, and a worker is lost; 24 with a search. Up to twelve minutes each, so
among the slow tests.
"""

import random
import time
from pathlib import Path

import pytest

from nightshift.campaign.records import Failure, Record
from nightshift.report.data import span
from nightshift.report.timing import timeline
from tests.night_checkout import finish, leftovers, problems, records, start
from tests.stand_ins import fault

NUM_SLOTS, NUM_EXPERIMENTS, RUN_SECONDS, PROPOSAL_SECONDS = 4, 40, 60.0, 6.0
LEAST_USED = 0.9
BASELINE = b"max_steps = 3000\n[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 6e-7  # poor\n"


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("least", "most"), [(1.0, 1.0), (0.4, 1.6)], ids=["same length", "lengths by a factor of 4"])
def test_slots_are_in_use(root: Path, least: float, most: float) -> None:
    drawn = random.Random(606)
    lengths = [RUN_SECONDS * drawn.uniform(least, most) for _ in range(NUM_EXPERIMENTS)]
    asked = {"agent": "lr", "proposal_seconds": PROPOSAL_SECONDS, "lengths": lengths}
    night = start(root, **asked, slots=NUM_SLOTS, experiments=NUM_EXPERIMENTS, budget_seconds=most * RUN_SECONDS)
    for number in (10, 20, 30):
        while len(records(root)) < number:
            assert night.poll() is None, night.communicate()
            time.sleep(1)
        if number < 30:
            fault(root, "error")
    next(process for process in leftovers(root) if Path(process.cmdline()[-1]).parent.name == "runs").kill()
    code, _, stderr = finish(night)
    assert code == 0, stderr
    assert problems(root) == []
    ours = records(root)
    failures = [r.failure for r in ours if r.failure]
    assert sorted(failures) == sorted([Failure.TRAINING, Failure.TRAINING, Failure.MACHINERY])
    assert share_in_use(ours) >= LEAST_USED


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_slots_are_in_use_with_a_search_that_learns(root: Path) -> None:
    """Its Gaussian process is fitted by the head, on the cores that the runs leave over."""
    night = start(root, agent="search", slots=NUM_SLOTS, experiments=24, budget_seconds=RUN_SECONDS)
    code, _, stderr = finish(night)
    assert code == 0, stderr
    assert problems(root) == []
    ours = records(root)
    assert not [r.failure for r in ours if r.failure]
    assert share_in_use(ours) >= LEAST_USED


def share_in_use(ours: list[Record]) -> float:
    """Of the time of all slots, from the second run's start to the last one's end: the first baseline runs alone."""
    ours = ours[1:]
    found = timeline(ours)
    assert found is not None
    assert len(found.lanes) == NUM_SLOTS
    spans = [ran for r in ours if (run := r.result) and (ran := span(run.started, run.total_seconds))]
    seconds = (max(span[1] for span in spans) - min(span[0] for span in spans)).total_seconds()
    in_use = sum(r.result.total_seconds for r in ours if r.result)
    in_use += sum(r.total_seconds or 0.0 for r in ours if r.result is None)  # the lost one left no result
    print(f"in use: {in_use / NUM_SLOTS / seconds:.4f} of {seconds:.0f} s")
    return in_use / NUM_SLOTS / seconds

"""How much of a night's time its slots are in use: 40 stand-in runs of a minute in four slots, a proposer of 6 s.

Two of them crash, and a worker is lost. Ten minutes each, so among the slow tests.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightshift.records import Failure
from nightshift.report.slots import span_of_run, timeline
from tests.night_checkout import finish, furnish, leftovers, problems, records, start

NUM_SLOTS, NUM_EXPERIMENTS, RUN_SECONDS, PROPOSAL_SECONDS = 4, 40, 60.0, 6.0
LEAST_USED = 0.9


@pytest.fixture
def root(checkout: Path) -> Iterator[Path]:
    yield furnish(checkout, b"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 6e-7  # poor\n")
    for process in leftovers(checkout):
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("shortest", [1.0, 0.25], ids=["same length", "lengths by a factor of 4"])
def test_slots_are_in_use(root: Path, shortest: float) -> None:
    drawn = random.Random(606)
    lengths = [RUN_SECONDS * drawn.uniform(shortest, 1.0) for _ in range(NUM_EXPERIMENTS)]
    asked = {"agent": "lr", "proposal_seconds": PROPOSAL_SECONDS, "lengths": lengths}
    night = start(root, **asked, slots=NUM_SLOTS, experiments=NUM_EXPERIMENTS, budget_seconds=RUN_SECONDS)
    for number in (10, 20, 30):
        while len(records(root)) < number:
            assert night.poll() is None, night.communicate()
            time.sleep(1)
        if number < 30:
            (root / "stand-in.json").write_text(json.dumps({"fault": "error", "once": True}))
    next(process for process in leftovers(root) if process.cmdline()[-1].endswith("run-1")).kill()
    code, _, stderr = finish(night)
    assert code == 0, stderr
    assert problems(root) == []
    ours = records(root)
    failures = [r.failure for r in ours if r.failure]
    assert sorted(failures) == sorted([Failure.TRAINING, Failure.TRAINING, Failure.MACHINERY])
    found = timeline(ours)
    assert found is not None
    assert len(found.lanes) == NUM_SLOTS
    spans = [span for r in ours for run in r.runs if (span := span_of_run(run))]
    seconds = (max(span[1] for span in spans) - min(span[0] for span in spans)).total_seconds()
    in_use = sum(run.total_seconds for r in ours for run in r.runs)
    in_use += sum(r.total_seconds or 0.0 for r in ours if not r.runs)  # the lost one left no result
    print(f"in use: {in_use / NUM_SLOTS / seconds:.4f} of {seconds:.0f} s")
    assert in_use / NUM_SLOTS / seconds >= LEAST_USED

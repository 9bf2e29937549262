"""Nights with several runs side by side, as processes, with the stand-in engine: who decides, who survives whom."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from nightshift.processes.watchdog import is_alive
from nightshift.records import Record
from tests.night_checkout import finish, furnish, leftovers, nightshift, problems, records, start, whole_night
from tests.waiting import wait_for

SIDE_BY_SIDE = {"agent": "lr", "proposer": "lr", "pairs": 2}


@pytest.fixture
def root(checkout: Path) -> Iterator[Path]:
    yield furnish(checkout)
    for process in leftovers(checkout):
        process.kill()


def fault(root: Path, name: str, once: bool = True) -> None:
    (root / "stand-in.json").write_text(json.dumps({"fault": name, "once": once}))


def workers(root: Path) -> list[psutil.Process]:
    found = [process for process in leftovers(root) if process.cmdline()[-1].rpartition("/")[2].startswith("run-")]
    assert len(found) == 2, found
    return sorted(found, key=lambda process: process.pid)


def seeds_twice(found: list[Record]) -> list[tuple[str, int]]:
    """What no config may see: a seed of an evaluated run again."""
    seen = [(record.effective_hash, run.seed) for record in found for run in record.runs if run.evaluation]
    return [one for one in seen if seen.count(one) > 1]


def test_two_side_by_side_are_one_campaign(root: Path) -> None:
    code, _, stderr = whole_night(root, **SIDE_BY_SIDE, experiments=7)
    assert code == 0, stderr
    assert problems(root) == []
    ours = records(root)
    assert len(ours) == 7
    assert [r.number for r in ours if r.decided is None] == []
    assert sorted(r.decided or 0 for r in ours) == [*range(1, 8)]
    assert all(r.hardware.endswith(", 2 side by side, 1 core each") for r in ours)
    assert seeds_twice(ours) == []
    assert {run.place for r in ours for run in r.runs} == {"slot 1", "slot 2"}
    began = {r.number: datetime.fromisoformat(r.started).timestamp() for r in ours}
    ended = {r.number: began[r.number] + (r.total_seconds or 0) for r in ours}
    assert any(began[b] < ended[a] for a in began for b in began if a < b), "none ran beside another"
    kept = [r for r in ours if r.is_keep]
    assert all(r.parent in {k.number for k in kept} for r in ours[1:])
    assert leftovers(root) == []


def test_runs_outlive_a_killed_head_and_the_same_command_adopts_them(root: Path) -> None:
    asked = {**SIDE_BY_SIDE, "experiments": 3}
    fault(root, "hold", once=False)
    night = start(root, **asked)
    wait_for(lambda: len([*(root / "runs").glob("0001/run-*/**/metrics.jsonl")]) == 2)
    survivors = workers(root)
    night.kill()
    night.communicate()
    time.sleep(3)
    assert all(map(is_alive, survivors)), "a worker died with its head"
    status = nightshift(root, "status")[1]
    assert f"left:     0001 outlived its head, in process {', '.join(str(p.pid) for p in survivors)}\n" in status
    assert "the same command goes on with it and adopts what still runs; nightshift night --stop ends it" in status
    (root / "stand-in.json").unlink()
    code, _, stderr = finish(start(root, **asked))
    assert code == 0, stderr
    assert "adopted what an earlier head of this night left running: 0001" in stderr
    ours = records(root)
    assert [(r.number, r.failure) for r in ours] == [(1, None), (2, None), (3, None)]
    assert len(ours[0].runs) == 2
    assert problems(root) == []
    assert leftovers(root) == []


def test_what_nobody_adopts_can_be_stopped_and_is_named(root: Path) -> None:
    fault(root, "hold", once=False)
    night = start(root, **SIDE_BY_SIDE, experiments=3)
    wait_for(lambda: len([*(root / "runs").glob("0001/run-*/**/metrics.jsonl")]) == 2)
    assert nightshift(root, "night", "--stop")[0] == 2, "its head lives"
    night.kill()
    night.communicate()
    code, stdout, stderr = nightshift(root, "night", "--stop")
    assert code == 0, stderr
    assert "processes of an earlier start in this checkout still ran and were ended: " in stdout
    assert "is over" in stdout
    assert leftovers(root) == []
    assert [(r.status, r.failure) for r in records(root)] == [("crash", "interrupted")]
    assert nightshift(root, "night", "--stop")[1] == "nothing of a night is left here\n"


def test_a_worker_that_nobody_comes_back_for_is_gone_soon_after_its_deadline(root: Path) -> None:
    fault(root, "hold", once=False)
    night = start(root, **SIDE_BY_SIDE, experiments=3, deadline=4.0)
    wait_for(lambda: len([*(root / "runs").glob("0001/run-*/**/metrics.jsonl")]) == 2)
    for worker in workers(root):  # so that it cannot end by itself
        worker.suspend()
    night.kill()
    night.communicate()
    began = time.monotonic()
    wait_for(lambda: not leftovers(root))
    assert time.monotonic() - began < 4.0 + 30.0

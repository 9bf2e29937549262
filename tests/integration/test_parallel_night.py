"""Nights with several runs side by side, as processes, with the stand-in engine: who decides, who survives whom."""

from __future__ import annotations

import json
import re
import signal
import time
from datetime import datetime
from pathlib import Path

import psutil

from nightshift.campaign.records import Failure
from nightshift.engines.trl.engine import TrlEngine
from nightshift.executors.watchdog import is_alive
from tests.checkouts import ROOT
from tests.night_checkout import finish, leftovers, nightshift, problems, records, start, state, whole_night
from tests.rules import ARITHMETIC_TRL
from tests.stand_ins import fault
from tests.waiting import wait_for

SIDE_BY_SIDE = {"agent": "lr", "proposer": "lr", "pairs": 2}


def workers(root: Path) -> list[psutil.Process]:
    found = [process for process in leftovers(root) if Path(process.cmdline()[-1]).parent.name == "runs"]
    assert len(found) == 2, found
    return sorted(found, key=lambda process: process.pid)


def test_two_side_by_side_are_one_campaign(root: Path) -> None:
    asked = {"lengths": [4.0], "proposal_seconds": 0.0}  # seconds: longer than it takes to begin another run
    code, _, stderr = whole_night(root, **asked, agent="lengths", pairs=2, experiments=7)
    assert code == 0, stderr
    assert problems(root) == []
    ours = records(root)
    assert len(ours) == 7
    assert [r.number for r in ours if r.decided is None] == []
    assert sorted(r.decided or 0 for r in ours) == [*range(1, 8)]
    assert all(r.hardware.endswith(", 2 side by side, 1 core each") for r in ours)
    assert len({r.result.seed for r in ours if r.result}) == len(ours), "a seed ran twice"
    assert {r.result.slot for r in ours if r.result} == {"slot 1", "slot 2"}
    began = {r.number: datetime.fromisoformat(r.started).timestamp() for r in ours}
    ended = {r.number: began[r.number] + (r.total_seconds or 0) for r in ours}
    assert any(began[b] < ended[a] for a in began for b in began if a < b), "none ran beside another"
    kept = [r for r in ours if r.is_keep]
    assert all(r.parent in {k.number for k in kept} for r in ours[1:])
    assert leftovers(root) == []


def test_ctrl_c_once_waits_for_what_runs_and_twice_ends_all_of_it(root: Path) -> None:
    night = start(root, **SIDE_BY_SIDE)
    wait_for(lambda: len(records(root)) >= 1 and records(root)[0].is_keep)
    fault(root, "hold", once=False)  # whatever begins from here on does not end by itself
    held = lambda: [r.number for r in records(root) if r.status == "started" and r.number > 1]  # noqa: E731
    wait_for(
        lambda: len(held()) == 2 and len([p for n in held() for p in root.glob(f"runs/{n:04d}/metrics.jsonl")]) == 2
    )
    numbers, before = held(), workers(root)
    night.send_signal(signal.SIGINT)
    time.sleep(2)
    assert all(map(is_alive, before)), "the first Ctrl-C is to let them finish"
    assert held() == numbers, "nothing new begins"
    night.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(night)
    assert code == 130
    assert "Traceback" not in stderr
    assert "stopped:      stopped by SIGINT" in stdout
    interrupted = [r for r in records(root) if r.number in numbers]
    assert [(r.status, r.failure) for r in interrupted] == [("crash", Failure.INTERRUPTED)] * 2
    assert all("stopped by SIGINT" in r.judgement.why for r in interrupted if r.judgement)
    assert state(root)["cause"].startswith("stopped by SIGINT")
    assert problems(root) == []
    assert leftovers(root) == []


def test_a_night_that_was_killed_can_be_stopped(root: Path) -> None:
    assert whole_night(root, **SIDE_BY_SIDE, experiments=1)[0] == 0
    fault(root, "hold", once=False)
    night = start(root, **SIDE_BY_SIDE, experiments=3)
    wait_for(lambda: len([*(root / "runs").glob("*/metrics.jsonl")]) == 3)
    assert nightshift(root, "night", "--stop")[0] == 2, "its controller lives"
    night.kill()
    night.communicate()
    wait_for(lambda: not leftovers(root))
    assert "run the same command again to resume\n" in nightshift(root, "status")[1]
    code, stdout, stderr = nightshift(root, "night", "--stop")
    assert code == 0, stderr
    assert "is over" in stdout
    assert [r.failure for r in records(root)] == [None, *[Failure.INTERRUPTED] * 2]
    assert nightshift(root, "night", "--stop")[1] == "nothing of a night is left here\n"


def test_a_night_with_pairs_auto_has_the_slots_that_doctor_says_each_on_cores_of_its_own(root: Path) -> None:
    _, told, _ = nightshift(ROOT, "doctor", "--engine", "trl")
    [num_slots] = map(int, re.findall(r"^trl +runs +ok +(\d+) side by side", told, re.MULTILINE))
    asked = {"lengths": [4.0], "proposal_seconds": 0.0, "agent": "lengths", "pairs": 0}
    code, _, stderr = whole_night(root, **asked, experiments=num_slots + 2)
    assert code == 0, stderr
    assert f"--pairs auto: {num_slots} side by side: " in stderr
    ours = records(root)
    jobs = [json.loads((root / f"runs/{r.number:04d}/job.json").read_bytes()) for r in ours]
    cores = {job["slot"]: tuple(job["cores"]) for job in jobs}
    assert len(cores) == num_slots
    assert len(set().union(*cores.values())) == sum(map(len, cores.values())), "two slots share a core"
    if num_slots > 1:
        assert {r.result.contention.num_cores for r in ours if r.result and r.result.contention} == {
            len(cores["slot 1"])
        }
    assert problems(root) == []


def test_a_campaign_keeps_its_number_of_slots(root: Path) -> None:
    """Free memory changes, and results of another number do not compare."""
    assert whole_night(root, agent="lr", proposer="lr", pairs=1, experiments=1)[0] == 0
    code, _, stderr = whole_night(root, agent="lr", proposer="lr", pairs=0, experiments=1)
    assert code == 0, stderr
    assert ("began with 1 and keeps to that" in stderr) == (TrlEngine(ARITHMETIC_TRL, ROOT, {}).capacity().num_runs > 1)
    assert len({r.hardware for r in records(root)}) == 1

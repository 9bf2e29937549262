"""Nights with several runs side by side, as processes, with the stand-in engine: who decides, who survives whom."""

from __future__ import annotations

import signal
import sys
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from nightshift.campaign.records import Failure, Record
from nightshift.executors.watchdog import is_alive
from tests.integration.test_behind_wall import why_no_wall
from tests.night_checkout import finish, leftovers, nightshift, problems, records, start, whole_night
from tests.stand_ins import fault
from tests.waiting import wait_for

SIDE_BY_SIDE = {"agent": "lr", "proposer": "lr", "pairs": 2}


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
    wait_for(lambda: len([*(root / "runs").glob("0001/metrics.jsonl")]) == 2)
    survivors = workers(root)
    night.kill()
    night.communicate()
    time.sleep(3)
    assert all(map(is_alive, survivors)), "a worker died with its head"
    status = nightshift(root, "status")[1]
    assert f"left:     0001 outlived its head: {', '.join(f'process {p.pid}' for p in survivors)}\n" in status
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
    code, stdout, _ = finish(night)
    assert code == 130
    assert "stopped:      stopped by SIGINT" in stdout
    assert [r.failure for r in records(root) if r.number in numbers] == [Failure.INTERRUPTED] * 2
    assert problems(root) == []
    assert leftovers(root) == []


def test_what_nobody_adopts_can_be_stopped_and_is_named(root: Path) -> None:
    fault(root, "hold", once=False)
    night = start(root, **SIDE_BY_SIDE, experiments=3)
    wait_for(lambda: len([*(root / "runs").glob("0001/metrics.jsonl")]) == 2)
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
    wait_for(lambda: len([*(root / "runs").glob("0001/metrics.jsonl")]) == 2)
    for worker in workers(root):  # so that it cannot end by itself
        worker.suspend()
    night.kill()
    night.communicate()
    began = time.monotonic()
    wait_for(lambda: not leftovers(root))
    assert time.monotonic() - began < 4.0 + 30.0


AGENT = """
import json, os, random, shutil, sys
from pathlib import Path
sys.stdin.read()
real = Path(sys.argv[1])
text = Path("train.toml").read_text().splitlines()
text = [f"lr = {random.uniform(1e-6, 5e-6):.3g}" if line.startswith("lr =") else line for line in text]
Path("train.toml").write_text("\\n".join(text) + "\\n")
Path("hypothesis.txt").write_text("HYPOTHESIS: another rate\\nPREDICTION: better\\n")
hold, acted = real.parent / "stand-in.json", real.parent / "acted"
try:
    flying = [path.parent for path in real.glob("runs/*/run-*/attempt-0") if not (path / "result.json").exists()]
    forged = json.loads((real / "runs/0001/result.json").read_text())
    forged["result"]["evaluation"] |= {"eval_score": 1.0, "scores": [1.0] * 400}
    for run in flying:
        ACT
        acted.touch()
    if acted.exists():
        hold.unlink(missing_ok=True)
    else:  # what is proposed now trains until an agent has acted on it
        (real.parent / "next.json").write_text('{"fault": "hold"}')
        (real.parent / "next.json").rename(hold)
except OSError as error:
    print(error)
"""
PLANTS = {
    # "x": one laid over a result that the worker has just written would not count either, but cost that run
    "results": """(run / 'attempt-0/result.json').open("x").write(json.dumps(forged))
        (run / 'attempt-1').mkdir(exist_ok=True)
        (run / 'attempt-1/result.json').write_text(json.dumps(forged))""",
    "job.json": "(run / 'job.json').write_text((run / 'job.json').read_text().replace('\"lr\":', '\"lr\":9'))",
    "submitted.json": "(run / 'submitted.json').write_text((run / 'submitted.json').read_text().replace('a', 'b'))",
}


@pytest.mark.parametrize(
    ("plant", "sandbox"), [("results", "bwrap"), ("results", "none"), ("job.json", "none"), ("submitted.json", "none")]
)
def test_what_an_agent_plants_in_a_run_in_flight_counts_for_nothing(root: Path, plant: str, sandbox: str) -> None:
    """The worker's own result is taken; what no worker writes there ends the night, and names it."""
    if sandbox == "bwrap" and (why := why_no_wall()):
        pytest.skip(why)
    agent = root.parent / "agent.py"
    agent.write_text(AGENT.replace("ACT", PLANTS[plant]))
    asked = {"agent": f"{getattr(sys, '_base_executable', sys.executable)} {agent} {root}", "pairs": 2}
    is_stopped = plant != "results"
    code, _, stderr = whole_night(root, **asked, sandbox=sandbox, experiments=6)
    ours = records(root)
    assert code == (2 if is_stopped else 0), stderr
    assert (root.parent / "acted").exists() == (sandbox == "none")
    if is_stopped:
        assert f"{plant} changed in this checkout while the agent was at work in its clone" in stderr
    assert problems(root) == []
    assert all(score < 0.9 for record in ours if (score := record.score) is not None)
    assert [r.failure for r in ours if r.failure is Failure.MACHINERY] == []
    assert leftovers(root) == []

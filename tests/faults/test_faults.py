"""A dozen of the faults, and how they are drawn; the whole is marked slow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkouts import run_module, small_checkout
from tests.faults import nights
from tests.faults.matrix import FAMILIES, REAL, REAL_EVERY, SCENARIOS, draw
from tests.night_checkout import furnish

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the faults run on Linux only")
MOMENTS = {scenario: [("admit", 3), ("settle", 2), ("worker train", 2)] for scenario in SCENARIOS}
DOZEN = (
    "run.py killed", "run.py asked to stop", "run.py killed twice", "file operation refused", "worker killed",
    "worker hangs", "result forged", "trainer killed", "two killed at once", "file damaged in flight", "clock jump",
    "git state changed",
)  # fmt: skip


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    places = ("--folder", str(folder / "scratch"), "--output", str(folder / "result.json"))
    return run_module("tests.faults", *places, *flags)


def test_a_dozen_faults_leave_nothing_and_are_not_played_twice(tmp_path: Path) -> None:
    flags = ("--num", str(len(DOZEN)), *[word for family in DOZEN for word in ("--only", family)])
    done = run(tmp_path, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["family"] for row in result["families"]] == [name for name in FAMILIES if name in DOZEN]
    assert sum(row["faults"] for row in result["families"]) == result["num"] == len(DOZEN)
    assert sum(row["struck"] for row in result["families"]) >= len(DOZEN) - 2  # a moment may not come
    assert result["findings"] == []
    finished = (tmp_path / "scratch" / "faults-0.jsonl").read_bytes()
    assert run(tmp_path, *flags).returncode == 0
    assert (tmp_path / "scratch" / "faults-0.jsonl").read_bytes() == finished


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_a_thousand_faults_leave_nothing(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_sixty_faults_with_four_runs_in_flight_leave_nothing(tmp_path: Path) -> None:
    for seed in range(1, 11):
        assert nights.play(furnish(small_checkout(tmp_path / str(seed))), seed)[-1]["problems"] == []


def test_faults_are_drawn_by_seed_from_every_family() -> None:
    faults = [draw(number, 0, MOMENTS) for number in range(1000)]
    assert faults == [draw(number, 0, MOMENTS) for number in range(1000)]
    assert faults != [draw(number, 1, MOMENTS) for number in range(1000)]
    assert {fault.family for fault in faults} == set(FAMILIES)
    assert sum(fault.family == REAL for fault in faults) == 1000 // REAL_EVERY

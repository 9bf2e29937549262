"""How the faults are drawn; a dozen of them (slow), and three hundred (long)."""

import re
import sys
from pathlib import Path

import pytest

from tests.checkouts import run_module
from tests.faults.matrix import FAMILIES, SCENARIOS, draw

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the faults run on Linux only")
MOMENTS = dict.fromkeys(SCENARIOS, (30, 8))
DOZEN = (
    "run.py killed", "run.py asked to stop", "run.py killed twice", "file operation refused", "worker killed",
    "worker hangs", "trainer killed", "trainer exits", "two killed at once", "clock jump",
    "git state changed", "watchdog killed or stopped",
)  # fmt: skip


@pytest.mark.slow
def test_a_dozen_faults_leave_nothing(tmp_path: Path) -> None:
    done = run_module("tests.faults", str(tmp_path), str(len(DOZEN)), *DOZEN)
    assert done.returncode == 0, done.stdout + done.stderr
    [(played, struck)] = re.findall(r"(\d+) played, (\d+) struck, 0 with problems", done.stdout)
    assert int(played) == len(DOZEN)
    assert int(struck) >= len(DOZEN) - 2  # a moment may not come


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
def test_three_hundred_faults_leave_nothing(tmp_path: Path) -> None:
    done = run_module("tests.faults", str(tmp_path), "300")
    assert done.returncode == 0, done.stdout


def test_faults_are_drawn_by_seed_from_every_family() -> None:
    faults = [draw(number, 0, MOMENTS) for number in range(1000)]
    assert faults == [draw(number, 0, MOMENTS) for number in range(1000)]
    assert faults != [draw(number, 1, MOMENTS) for number in range(1000)]
    assert {fault.family for fault in faults} == set(FAMILIES)

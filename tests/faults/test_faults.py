"""Ten faults (slow), and three hundred (long).

After each one: is anything left behind, lost, doubled or half done, and does the next run work? Each strikes a real
run.py in a fresh checkout in mid-campaign, and the next experiment runs. Only what trains is a stand-in.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkouts import leftovers
from tests.faults.play import draw, make_templates, play
from tests.faults.process import Fault

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the faults run on Linux only")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for process in leftovers(tmp_path):
        process.kill()


def played(folder: Path, num: int) -> list[bool]:
    """Play faults. Return whether each one struck; AssertionError if one left a problem."""
    moments = make_templates(folder / "templates")

    def play_one(fault: Fault) -> tuple[bool, list[str]]:
        is_struck, problems = play(fault, folder / f"fault-{fault.number}", folder / "templates")
        print(fault, "; ".join(problems) or ("ok" if is_struck else "the moment did not come"), flush=True)
        return is_struck, [f"{fault}: {problem}" for problem in problems]

    with ThreadPoolExecutor(os.cpu_count()) as slots:
        rows = list(slots.map(play_one, (draw(number, moments) for number in range(num))))
    assert [problem for _, problems in rows for problem in problems] == []
    return [is_struck for is_struck, _ in rows]


@pytest.mark.slow
def test_ten_faults_leave_nothing(folder: Path) -> None:
    assert sum(played(folder, 10)) >= 8  # a moment may not come


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
def test_three_hundred_faults_leave_nothing(folder: Path) -> None:
    assert any(played(folder, 300))

"""How many runs fit on a CPU machine: cores, the limit of control groups, and memory."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.engines.trl.engine import TrlEngine
from nightshift.executors import local as module
from nightshift.executors.local import Capacity, capacity, divide, own_cores, physical_cores
from tests.rules import ARITHMETIC_TRL, ROOT


def machine(folder: Path, group: str, files: Mapping[str, str], siblings: Mapping[int, str] | None = None) -> Path:
    """`folder` with proc/self/cgroup, sys/fs/cgroup with `files`, and the threads of each physical core."""
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/self/cgroup": group}
    for core, text in (siblings or {}).items():
        written[f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"] = text
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def num_cores_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """The cores of a machine with eight processors."""
    monkeypatch.setattr(module, "own_cores", lambda: [*range(8)])
    return capacity(folder / "proc", folder / "sys").num_cores


@pytest.mark.parametrize(
    ("group", "files", "num_cores"),
    [
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, 8),
        ("0::/job\n", {"job/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/job\n", {"job/cpu.max": "broken\n"}, 8),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "400000 100000"}, 2),  # the least on the way up
        ("0::/docker/4f1a\n", {"cpu.max": "300000 100000"}, 3),  # a path of the host: the top has the file
        ("2:cpu,cpuacct:/job\n", {}, 8),
    ],
)
def test_the_limit_of_cpu_time_counts_where_it_is_less_than_the_cores(tmp_path, monkeypatch, group, files, num_cores):
    assert num_cores_of(machine(tmp_path, group, files), monkeypatch) == num_cores


@pytest.mark.parametrize(
    ("num_cores", "free_gb", "num_runs"), [(8, 100, 8), (8, 7.9, 3), (2.5, 100, 2), (0.5, 100, 1), (8, 0.3, 1)]
)
def test_a_run_needs_a_core_and_its_memory_and_one_run_is_always_tried(num_cores, free_gb, num_runs):
    assert str(Capacity(num_cores, free_gb)).startswith(f"{num_runs} side by side: {num_cores:g} core")


def test_the_memory_of_a_run_is_known_for_the_models_that_come_with_the_project() -> None:
    assert TrlEngine(ARITHMETIC_TRL, ROOT, {}).capacity() is not None
    assert TrlEngine(replace(ARITHMETIC_TRL, model="/somebody/s/model"), ROOT, {}).capacity() is None
    assert TrlEngine(replace(ARITHMETIC_TRL, num_gpus=1), ROOT, {}).capacity() is None


THREADS_APART = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}  # 0 and 4 are one physical core
HYBRID = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"}


@pytest.mark.parametrize(("siblings", "num_cores"), [({}, 8), (THREADS_APART, 4), (HYBRID, 6)])
def test_no_two_runs_share_a_physical_core(tmp_path, monkeypatch, siblings, num_cores):
    folder = machine(tmp_path, "", {}, siblings)
    assert num_cores_of(folder, monkeypatch) == num_cores
    sys = folder / "sys"
    for num_slots in range(2, num_cores + 1):
        slots = divide(num_slots, [], 0, range(8), sys)
        used = [{siblings.get(core, str(core)) for core in slot.cores} for slot in slots]
        assert len({len(slot.cores) for slot in slots}) == 1, "the hardware in a record is that of every slot"
        assert sum(map(len, used)) == len(set().union(*used)) <= num_cores
    assert sum(map(len, used)) == num_cores
    assert sorted(core for slot in divide(8, [], 0, range(8), sys) for core in slot.cores) == [*range(8)]


def test_an_odd_affinity_mask_is_divided_among_the_cores_in_it(tmp_path: Path) -> None:
    folder = machine(tmp_path, "", {}, THREADS_APART)
    mine = [1, 4, 5, 7]  # 1 and 5 are one core; of the others one thread each
    assert physical_cores(mine, folder / "sys") == [[1, 5], [4], [7]]
    slots = divide(3, [], 0, mine, folder / "sys")
    assert [slot.cores for slot in slots] == [(1,), (4,), (7,)]


def test_the_affinity_of_this_process_is_what_is_divided() -> None:
    core = own_cores()[-1]
    code = (
        f"import os; os.sched_setaffinity(0, [{core}]); from nightshift.executors.local import capacity; "
        "print(capacity().num_cores <= 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"

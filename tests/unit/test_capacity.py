"""How many runs fit on a CPU machine: cores, the limits of control groups as files of either version, and memory."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.config.rules import Rules
from nightshift.engines.trl.engine import RUN_GB, TrlEngine
from nightshift.executors import capacity as module
from nightshift.executors.capacity import Capacity, capacity
from nightshift.executors.slots import divide, own_cores, physical_cores
from tests.rules import ARITHMETIC_TRL

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
UNLIMITED = "9223372036854771712"


def machine(folder: Path, groups: str, files: Mapping[str, str], siblings: Mapping[int, str] | None = None) -> Path:
    """`folder` with proc/self/cgroup, sys/fs/cgroup with `files`, and the threads of each physical core."""
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/self/cgroup": groups}
    for core, text in (siblings or {}).items():
        written[f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"] = text
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def has_eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processors, and much more memory than any limit in these tests."""

    class Memory:
        available = 1000 * GIB

    monkeypatch.setattr(module, "own_cores", lambda: [*range(8)])
    monkeypatch.setattr("psutil.virtual_memory", Memory)


def measured(folder: Path) -> tuple[float, float]:
    """Cores, and free memory in GiB."""
    found = capacity(RUN_GB, folder / "proc", folder / "sys")
    return found.num_cores, found.free_gb * 1e9 / GIB


@pytest.mark.parametrize(
    ("quota", "num_cores"),
    [("max 100000\n", 8), ("250000 100000\n", 2.5), ("1600000 100000\n", 8), ("broken\n", 8), ("", 8)],
)
def test_a_quota_of_processor_time_counts_where_it_is_less_than_the_cores(tmp_path, quota, num_cores):
    second = machine(tmp_path / "2", "0::/job\n", {"job/cpu.max": quota})
    assert measured(second)[0] == num_cores


@pytest.mark.parametrize(("quota", "num_cores"), [("-1", 8), ("150000", 1.5)])
def test_a_quota_of_version_1_counts_too(tmp_path: Path, quota: str, num_cores: float) -> None:
    files = {"cpu/job/cpu.cfs_quota_us": quota, "cpu/job/cpu.cfs_period_us": "100000"}
    assert measured(machine(tmp_path, "3:cpuset:/\n2:cpu,cpuacct:/job\n0::/\n", files))[0] == num_cores


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000", "a/b/c/cpu.max": "400000 100000"}
    assert measured(machine(tmp_path, "0::/a/b/c\n", files))[0] == 2


@pytest.mark.parametrize("path", ["/docker/4f1a", "/../../4f1a"], ids=["as its host knows it", "outside of the mount"])
def test_a_path_below_which_nothing_is_mounted_leaves_the_top(tmp_path: Path, path: str) -> None:
    assert measured(machine(tmp_path, f"0::{path}\n", {"cpu.max": "300000 100000"}))[0] == 3


def test_memory_below_the_limit_is_free_and_so_is_what_caches_files(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {GIB}\nactive_file {2 * GIB}\n"
    second = {"job/memory.max": str(16 * GIB), "job/memory.current": str(9 * GIB), "job/memory.stat": stat}
    assert measured(machine(tmp_path / "2", "0::/job\n", second))[1] == pytest.approx(10)
    totals = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {2 * GIB}\n"
    first = {"limit_in_bytes": str(16 * GIB), "usage_in_bytes": str(9 * GIB), "stat": totals}
    files = {f"memory/job/memory.{name}": text for name, text in first.items()}
    assert measured(machine(tmp_path / "1", "4:memory:/job\n", files))[1] == pytest.approx(10)
    files |= {"memory/memory.limit_in_bytes": UNLIMITED, "memory/job/memory.limit_in_bytes": UNLIMITED}
    assert measured(machine(tmp_path / "none", "4:memory:/job\n", files))[1] == pytest.approx(1000)


def test_without_control_groups_the_machine_is_what_there_is(tmp_path: Path) -> None:
    assert measured(tmp_path) == (8, pytest.approx(1000))


@pytest.mark.parametrize(
    ("num_cores", "free_gb", "gb_each", "num_runs"),
    [(8, 100, 2.0, 8), (8, 7.9, 2.0, 3), (2.5, 100, 2.0, 2), (0.5, 100, 2.0, 1), (8, 0.3, 2.0, 1), (8, 100, None, 1)],
)
def test_a_run_needs_a_core_and_its_memory_and_one_run_is_always_tried(num_cores, free_gb, gb_each, num_runs):
    found = Capacity(num_cores, free_gb, gb_each)
    assert found.num_runs == num_runs
    assert str(found).startswith(f"{num_runs} side by side: {num_cores:g} core")


def test_the_memory_of_a_run_is_known_for_the_models_that_come_with_the_project() -> None:
    def gb_each(rules: Rules) -> float | None:
        found = TrlEngine(rules, ROOT, {}).capacity()
        assert found is not None
        return found.gb_each

    assert gb_each(ARITHMETIC_TRL) == RUN_GB
    assert gb_each(replace(ARITHMETIC_TRL, model="/somebody/s/model")) is None
    assert TrlEngine(replace(ARITHMETIC_TRL, num_gpus=1), ROOT, {}).capacity() is None


THREADS_APART = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}  # 0 and 4 are one physical core
NEIGHBOURS = {core: f"{core - core % 2}-{core - core % 2 + 1}" for core in range(8)}
HYBRID = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"}


@pytest.mark.parametrize(
    ("siblings", "num_cores"), [({}, 8), (THREADS_APART, 4), (NEIGHBOURS, 4), (HYBRID, 6)],
    ids=["not told", "threads apart", "neighbours", "hybrid"],
)  # fmt: skip
def test_no_two_runs_share_a_physical_core(tmp_path: Path, siblings: dict[int, str], num_cores: int) -> None:
    folder = machine(tmp_path, "", {}, siblings)
    assert measured(folder)[0] == num_cores
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
        f"import os; os.sched_setaffinity(0, [{core}]); from nightshift.executors.capacity import capacity; "
        "print(capacity(None).num_cores <= 1, capacity(0.001).num_runs)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True 1\n"

"""How many runs fit on a CPU machine: cores, the limit of control groups, and memory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.engines.trl.engine import TrlEngine
from nightshift.executors import local as module
from nightshift.executors import process
from nightshift.executors.local import Capacity, capacity, divide
from nightshift.text import counted
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine with eight processors."""
    monkeypatch.setattr(module, "own_cores", lambda: [*range(8)])
    monkeypatch.setattr(module, "PROC", tmp_path / "proc")
    monkeypatch.setattr(module, "SYS", tmp_path / "sys")
    return tmp_path


@pytest.mark.parametrize(
    ("group", "files", "num_cores"),
    [
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "400000 100000"}, 2),  # the least on the way up
        ("0::/docker/4f1a\n", {"cpu.max": "300000 100000"}, 3),  # a path of the host: the top has the file
        ("2:cpu,cpuacct:/job\n", {}, 8),
    ],
)
def test_the_limit_of_cpu_time_counts_where_it_is_less_than_the_cores(folder, group, files, num_cores):
    machine(folder, group, files)
    assert capacity().num_cores == num_cores


@pytest.mark.parametrize(
    ("files", "free_gb"),
    [
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"memory.max": "3000000000", "memory.current": "2500000000", "memory.stat": "inactive_file 400000000"}, 0.9),
        ({"memory.max": "3000000000", "memory.current": "3500000000", "memory.stat": ""}, 0.0),
    ],
)
def test_the_memory_limit_of_a_container_counts(folder, files, free_gb):
    """In the group around the process's own, which has a higher limit."""
    own = {"a/b/memory.max": "9000000000", "a/b/memory.current": "1", "a/b/memory.stat": ""} if free_gb else {}
    machine(folder, "0::/a/b\n", own | {f"a/{name}": text for name, text in files.items()})
    assert free_gb is None or capacity().free_gb == pytest.approx(free_gb, abs=1e-6)


@pytest.mark.parametrize("kills", [0, 1])
def test_a_process_that_the_kernel_killed_for_lack_of_memory_is_named_so(tmp_path, monkeypatch, kills):
    counts = [5, 5 + kills]
    monkeypatch.setattr(process, "num_oom_kills", lambda: counts.pop(0))
    group = process.ProcessGroup("test", 1.0)
    child = group.start(
        "worker", ["sleep", "600"], log_path=tmp_path / "log", env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path
    )
    child.kill()
    child.wait()
    assert child.exit_cause() == "killed by SIGKILL" + " for lack of memory (oom_kill)" * kills
    group.stop()


@pytest.mark.parametrize(
    ("num_cores", "free_gb", "num_runs"), [(8, 100, 8), (8, 7.9, 3), (2.5, 100, 2), (0.5, 100, 1), (8, 0.3, 1)]
)
def test_a_run_needs_a_core_and_its_memory_and_one_run_is_always_tried(num_cores, free_gb, num_runs):
    assert str(Capacity(num_cores, free_gb)).startswith(f"{counted(num_runs, 'run')} at a time: {num_cores:g} cores")


def test_the_memory_of_a_run_is_known_for_the_models_that_come_with_the_project() -> None:
    assert TrlEngine(ARITHMETIC_TRL, ROOT, {}).capacity() is not None
    assert TrlEngine(replace(ARITHMETIC_TRL, model="/somebody/s/model"), ROOT, {}).capacity() is None
    assert TrlEngine(replace(ARITHMETIC_TRL, num_gpus=1), ROOT, {}).capacity() is None


THREADS_APART = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}  # 0 and 4 are one physical core
HYBRID = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"}


@pytest.mark.parametrize(("siblings", "num_cores"), [({}, 8), (THREADS_APART, 4), (HYBRID, 6)])
def test_no_two_runs_share_a_physical_core(folder, siblings, num_cores):
    machine(folder, "", {}, siblings)
    assert capacity().num_cores == num_cores
    for num_slots in range(2, num_cores + 1):
        slots = divide(num_slots, [], 0, range(8))
        used = [{siblings.get(core, str(core)) for core in slot.cores} for slot in slots]
        assert len({len(slot.cores) for slot in slots}) == 1, "the hardware in a record is that of every slot"
        assert sum(map(len, used)) == len(set().union(*used)) <= num_cores
    assert sum(map(len, used)) == num_cores
    assert sorted(core for slot in divide(8, [], 0, range(8)) for core in slot.cores) == [*range(8)]

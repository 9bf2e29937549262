"""How many runs fit side by side on a machine without GPUs: a core and memory for each.

`nightshift doctor` shows it and `--pairs auto` uses it. A container or a batch system may limit processor time and
memory by control groups, which neither the affinity of a process nor the free memory of the machine shows.
https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nightshift.executors.slots import own_cores, physical_cores

GB = 1e9
_PROC, _SYS = Path("/proc"), Path("/sys")


@dataclass(frozen=True, slots=True)
class Capacity:
    """Processors and memory that runs may use, and what one run needs.

    `num_cores`: physical cores, or the processor time that is granted if that is less; 0 where the system does not say.
    `gb_each`: memory of one run in 1e9 bytes, None where nobody measured it.
    """

    num_cores: float
    free_gb: float
    gb_each: float | None

    @property
    def num_runs(self) -> int:
        """Runs side by side, at least one; one where the memory of a run is not known."""
        if self.gb_each is None:
            return 1
        return max(1, min(int(self.num_cores), int(self.free_gb / self.gb_each)))

    def __str__(self) -> str:
        each = "a run of this model needs an unknown part" if self.gb_each is None else f"{self.gb_each:g} GB a run"
        cores = f"{self.num_cores:g} core{'s' if self.num_cores != 1 else ''}"
        if self.num_cores == 0:
            cores = "this system does not say which processors a process may use"
        return f"{self.num_runs} side by side: {cores}; {self.free_gb:.1f} GB of memory free, {each}"


def capacity(gb_each: float | None, proc: Path = _PROC, sys: Path = _SYS) -> Capacity:
    """Measure what this process may use now. `proc` and `sys`: where the kernel shows it."""
    num_cores: float = len(physical_cores(own_cores(), sys))
    free = float(psutil.virtual_memory().available)
    for folder in _groups("cpu", proc, sys):
        num_cores = min(num_cores, _granted_cores(folder))
    for folder in _groups("memory", proc, sys):
        free = min(free, _granted_bytes(folder))
    return Capacity(num_cores, max(free, 0.0) / GB, gb_each)


def _groups(controller: str, proc: Path, sys: Path) -> Iterator[Path]:
    """The control groups of this process, of either version, each followed by the groups around it.

    A container may see the path that its host knows, below which nothing is mounted: then only the top has files.
    """
    with suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            parts = [part for part in path.split("/") if part]
            for name in {controllers, controller if controllers else ""}:  # version 1 mounts `cpu,cpuacct`
                for number in range(0 if ".." in parts else len(parts), -1, -1):
                    yield (sys / "fs/cgroup" / name).joinpath(*parts[:number])


def _granted_cores(folder: Path) -> float:
    """Seconds of processor time in a second; infinite where nothing limits them."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (folder / "cpu.max").read_text().split()
        return float(quota) / float(period) if quota != "max" else float("inf")
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else float("inf")
    return float("inf")


def _granted_bytes(folder: Path) -> float:
    """Bytes below the limit; what only caches files counts as free."""
    for limit, used, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with suppress(OSError, ValueError):
            most = float((folder / limit).read_text().replace("max", "inf"))
            return most - int((folder / used).read_text()) + _cached_bytes(folder, prefix)
    return float("inf")


def _cached_bytes(folder: Path, prefix: str) -> int:
    with suppress(OSError, ValueError):
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = {name: int(value) for name, value in lines}
        return cached.get(f"{prefix}inactive_file", 0) + cached.get(f"{prefix}active_file", 0)
    return 0

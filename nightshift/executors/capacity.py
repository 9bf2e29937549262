"""How many runs fit side by side on a machine without GPUs: a core and memory for each.

`nightshift doctor` prints the number and `--pairs auto` uses it.
"""

from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

import psutil

from nightshift.executors.local import own_cores, physical_cores

# Memory of one run with a model of models/. Measured on arithmetic with the shipped train.toml: all processes of a run
# use 1.3 GB, of which the trainer has 1.2; the trainer has 1.5 with batch_size 1024 and 2.0 with 4096.
RUN_GB = 2.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Physical cores, or fewer where a container limits CPU time, and free memory in 1e9 bytes."""

    num_cores: float
    free_gb: float

    @property
    def num_runs(self) -> int:
        return max(1, min(int(self.num_cores), int(self.free_gb / RUN_GB)))

    def __str__(self) -> str:
        cores = f"{self.num_cores:g} core{'s' if self.num_cores != 1 else ''}"
        return f"{self.num_runs} side by side: {cores}; {self.free_gb:.1f} GB of memory free, {RUN_GB:g} GB a run"


def capacity(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Capacity:
    """Measure what this process may use now. `proc` and `sys`: where the kernel shows it."""
    num_cores = min(len(physical_cores(own_cores(), sys)), _granted_cores(proc, sys / "fs/cgroup"))
    return Capacity(num_cores, psutil.virtual_memory().available / 1e9)


def _granted_cores(proc: Path, top: Path) -> float:
    """Return the least CPU time, in cores, that cpu.max grants to this process's control group and those around it;
    infinite without a limit. https://docs.kernel.org/admin-guide/cgroup-v2.html"""
    granted, folder = inf, top
    with suppress(OSError):
        paths = (proc / "self/cgroup").read_text().splitlines()
        folder = top.joinpath(*(path.removeprefix("0::/") for path in paths if path.startswith("0::/")))
    for group in (folder, *folder.parents):  # a container may see a path of its host: then only the top has the file
        with suppress(OSError, ValueError, ZeroDivisionError):  # ValueError: "max", no limit
            quota, period = (group / "cpu.max").read_text().split()
            granted = min(granted, int(quota) / int(period))
    return granted

"""Workers on this machine, one process in each slot, which is a share of the GPUs or of the cores.

When the controller dies, the pipe to the worker's stdin closes and the worker ends itself; if it does not, the
controller's watchdog ends it.
"""

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from subprocess import PIPE

import psutil

from nightshift.campaign.records import LATE_SECONDS, LOG_NAME, Job
from nightshift.errors import Failure, UsageError
from nightshift.executors import base, process
from nightshift.executors.base import Executor, Flight, Slot
from nightshift.executors.process import ProcessGroup
from nightshift.text import counted
from nightshift.waiting import waiting

PROC, SYS = Path("/proc"), Path("/sys")
# How long a worker may take to end: more than the grace periods of its engine's processes, which it ends first.
GRACE_SECONDS = {"trl": 7.0, "prime-rl": 25.0}


@dataclass(slots=True)
class _Worker(Flight):
    group: ProcessGroup  # of the worker, its first child


class LocalExecutor(Executor[_Worker]):
    """The slots of this machine."""

    def __init__(self, root: Path, environ: Mapping[str, str], slots: Sequence[Slot] = (Slot(),)) -> None:
        # Runs side by side are slower, so the hardware in records differs.
        layout = f", {len(slots)} side by side, {counted(len(slots[0].cores), 'core')} each"
        super().__init__(root, environ, len(slots), layout if len(slots) > 1 else "")
        self.slots = slots

    @property
    def free_slots(self) -> list[Slot]:
        """The slots without a run that are not avoided."""
        used = {*self.avoided, *(worker.job.slot for worker in self._flights.values())}
        return [slot for slot in self.slots if slot.name not in used]

    @property
    def num_free(self) -> int:
        """One run in each free slot."""
        return len(self.free_slots)

    def _placed(self, job: Job) -> Job:
        slot = self.free_slots[0]
        return replace(super()._placed(job), gpus=slot.gpus or job.gpus, cores=slot.cores, slot=slot.name)

    def _start(self, folder: Path, job: Job) -> None:
        group = ProcessGroup(folder.name, GRACE_SECONDS[job.rules.engine])
        self._flights[folder] = _Worker(job, time.monotonic() + job.deadline_seconds + LATE_SECONDS, group)
        command = process.python_command(*base.PROGRAM, str(self.root), str(folder))
        environ = process.python_environment(self.environ, {})
        group.start("worker", command, log_path=folder / LOG_NAME, env=environ, cwd=self.root, stdin=PIPE)

    def _has_ended(self, folder: Path) -> bool:
        return self._flights[folder].group.children[0].poll() is not None

    def cancel(self, folders: Collection[Path]) -> None:
        """End the workers of these runs, all at once, and all their processes."""
        running = [folder for folder in folders if folder in self._flights]
        for child in chain(*(self._flights[folder].group.children for folder in running)):
            child.terminate()
        if not running:
            return
        with waiting(f"ending {counted(len(running), 'run')} (Ctrl-\\ does not wait)"):
            for folder in running:
                self._flights[folder].group.stop()
                del self._flights[folder]

    def _ending(self, folder: Path) -> tuple[str, Failure]:
        child = self._flights[folder].group.children[0]
        last_words = "".join(f"; last in {LOG_NAME}: {line}" for line in process.tail(child.log_path, 1))
        return f"the worker returned no result: {child.exit_cause()}{last_words}", Failure.INFRASTRUCTURE


# -- slots ------------------------------------------------------------------------------------------------


def divide(num_slots: int, gpu_ids: Sequence[int], gpus_each: int, cores: Sequence[int]) -> list[Slot]:
    """Divide a machine into `num_slots` slots; 0 makes as many slots as the GPUs allow, 1 is the whole machine.

    Without GPUs, two slots share a physical core only if there are more slots than physical cores. UsageError if there
    are too few GPUs or cores.
    """
    num_slots = num_slots or (len(gpu_ids) // gpus_each if gpus_each else 1) or 1
    if num_slots == 1:
        return [Slot()]
    for name, num_each, num_available in (("GPUs", gpus_each, len(gpu_ids)), ("cores", 1, len(cores))):
        if (num_needed := num_slots * num_each) > num_available:
            cause = f"--pairs {num_slots} needs {num_needed} {name}, this machine has {num_available}"
            raise UsageError(cause, f"Write --pairs {max(num_available // num_each, 1)}.")
    share, groups = len(cores) // num_slots, physical_cores(cores)
    if gpus_each:
        parts = [list(cores[share * i :]) for i in range(num_slots)]
    else:
        groups = groups if num_slots <= len(groups) else [[core] for core in cores]
        parts = [[*chain(*groups[i::num_slots])] for i in range(num_slots)]
        share = min(map(len, parts))
    return [
        Slot(
            ",".join(map(str, gpu_ids[gpus_each * i : gpus_each * (i + 1)])) or None,
            tuple(part[:share]),
            f"slot {i + 1}",
        )
        for i, part in enumerate(parts)
    ]


def own_cores() -> list[int]:
    """Return the logical processors that this process may use: all of them if the system does not report it."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return sorted(affinity(0)) if affinity else [*range(os.cpu_count() or 1)]


def physical_cores(cores: Sequence[int]) -> list[list[int]]:
    """Group logical processors by physical core; each is a group if the system does not report its siblings."""
    threads = dict[str, list[int]]()
    for core in cores:
        try:
            siblings = (SYS / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(core)
        threads.setdefault(siblings, []).append(core)
    return list(threads.values())


def num_slots_of(hardware: str) -> int:
    """Return the number of slots in the hardware of a record."""
    match = re.search(r", (\d{1,4}) side by side, \d+ cores? each$", hardware)
    return int(match[1]) if match else 1


# -- how many runs fit side by side on a machine without GPUs ----------------------------------------------

# Memory of one run with a model of models/. Measured on arithmetic with the shipped train.toml: 1.3 GB for all
# processes, of which the trainer uses 1.2 GB (1.5 GB with batch_size 1024, 2.0 GB with 4096).
RUN_GB = 2.0


@dataclass(frozen=True)
class Capacity:
    """Cores (physical, or fewer by a container's limit of CPU time) and free memory in 1e9 bytes."""

    num_cores: float
    free_gb: float

    @property
    def num_runs(self) -> int:
        """How many runs `--pairs auto` starts side by side."""
        return max(1, int(min(self.num_cores, self.free_gb / RUN_GB)))

    def __str__(self) -> str:
        free = f"{self.num_cores:g} cores and {self.free_gb:.1f} GB of memory free"
        return f"{counted(self.num_runs, 'run')} at a time: {free}; a run needs a core and {RUN_GB:g} GB"


def capacity() -> Capacity:
    """Measure the cores and the memory that this process may use now: the least of this machine, the control group of
    this process and its parent groups. https://docs.kernel.org/admin-guide/cgroup-v2.html"""
    num_cores, free = float(len(physical_cores(own_cores()))), psutil.virtual_memory().available
    group = SYS / "fs/cgroup"
    with suppress(OSError):  # in a container the path may be the host's: then only the top has the files
        group /= (PROC / "self/cgroup").read_text().rpartition("0::/")[2].strip()
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):  # ValueError: "max"
            quota, period = (folder / "cpu.max").read_text().split()
            num_cores = min(num_cores, int(quota) / int(period))
        with suppress(OSError, ValueError):
            # The kernel can free the page cache (inactive_file).
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            unused = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            free = min(free, max(limit - used + int(unused[1] if unused else 0), 0))
    return Capacity(num_cores, free / 1e9)

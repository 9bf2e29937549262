"""Workers on this machine, one process in each slot: a share of the GPUs, or of the cores.

The controller holds the pipe to a worker's stdin. When the controller dies, the pipe closes and the worker ends itself;
the controller's watchdog ends it if it cannot.
"""

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE

import psutil

from nightshift.campaign.records import LATE_SECONDS, LOG_NAME, Job
from nightshift.errors import EngineError, Failure, UsageError
from nightshift.executors import base, process
from nightshift.executors.base import Executor, Flight, Slot
from nightshift.executors.process import SYS, Child, ProcessGroup, control_groups
from nightshift.text import counted
from nightshift.waiting import waiting

# Of a worker that is asked to end, and first ends its engine's processes, which have a grace of their own.
GRACE_SECONDS = {"trl": 7.0, "prime-rl": 25.0}


@dataclass(slots=True)
class _Worker(Flight):
    group: ProcessGroup
    child: Child


class LocalExecutor(Executor[_Worker]):
    """The slots of this machine."""

    def __init__(self, root: Path, environ: Mapping[str, str], slots: Sequence[Slot] = (Slot(),)) -> None:
        num_cores, layout = len(slots[0].cores), ""
        if len(slots) > 1:  # such runs compare with such runs only
            layout = f", {len(slots)} side by side, {counted(num_cores, 'core')} each"
        super().__init__(root, environ, len(slots), layout)
        self.slots = slots

    @property
    def free_slots(self) -> list[Slot]:
        """The slots without a run, but for those that are avoided."""
        taken = {*self.avoided, *(worker.job.slot for worker in self._flights.values())}
        return [slot for slot in self.slots if slot.name not in taken]

    @property
    def num_free(self) -> int:
        """One run in each free slot."""
        return len(self.free_slots)

    def _placed(self, job: Job) -> Job:
        if not (free := self.free_slots):
            raise EngineError(f"all {len(self.slots)} slots are taken")
        slot = free[0]
        return replace(super()._placed(job), gpus=slot.gpus or job.gpus, cores=slot.cores, slot=slot.name)

    def _start(self, folder: Path, job: Job) -> None:
        group = ProcessGroup(folder.name, GRACE_SECONDS[job.rules.engine])
        try:
            command = process.python_command(*base.PROGRAM, str(self.root), str(folder))
            environ = process.python_environment(self.environ, {})
            child = group.start("worker", command, log_path=folder / LOG_NAME, env=environ, cwd=self.root, stdin=PIPE)
            ends_at = time.monotonic() + job.deadline_seconds + LATE_SECONDS
            self._flights[folder] = _Worker(job, ends_at, group, child)
        except BaseException:
            group.stop()
            raise

    def _has_ended(self, folder: Path) -> bool:
        return self._flights[folder].child.poll() is not None

    def cancel(self, folders: Collection[Path]) -> None:
        """End the workers of these runs, together, and all that they started."""
        ours = [folder for folder in folders if folder in self._flights]
        for folder in ours:  # all are asked before one is waited for
            self._flights[folder].child.terminate()
        if not ours:
            return
        runs = "the run" if len(ours) == 1 else f"{len(ours)} runs"
        with waiting(f"ending {runs} (Ctrl-\\ does not wait)"):
            for folder in ours:
                self._flights[folder].group.stop()
                del self._flights[folder]

    def _ending(self, folder: Path) -> tuple[str, Failure]:
        child = self._flights[folder].child
        last_words = "".join(f"; last in {LOG_NAME}: {line}" for line in process.tail(child.log_path, 1))
        return f"the worker returned no result: {child.exit_cause()}{last_words}", Failure.INFRASTRUCTURE


# -- slots ------------------------------------------------------------------------------------------------


def divide(num_slots: int, gpu_ids: Sequence[int], gpus_each: int, cores: Sequence[int], sys: Path = SYS) -> list[Slot]:
    """Divide a machine into slots; 0: as many as there are GPUs for; 1: the whole machine. Raises UsageError.

    With GPUs a slot gets neighbouring `cores`. Without GPUs no two slots share a physical core, unless there are more
    slots than physical cores.
    """
    num_slots = num_slots or (len(gpu_ids) // gpus_each if gpus_each else 1) or 1
    if num_slots == 1:
        return [Slot()]
    needs = (f"{num_slots * gpus_each} GPUs", gpus_each, len(gpu_ids)), ("a core each", 1, len(cores))
    for what, num_each, num_here in needs:
        if num_slots * num_each > num_here:
            cause = f"--pairs {num_slots} needs {what}, there are {num_here}"
            raise UsageError(cause, f"Write --pairs {max(num_here // num_each, 1)}.")
    if gpus_each:
        share = len(cores) // num_slots
        parts = [list(cores[share * i :]) for i in range(num_slots)]
    else:
        groups = physical_cores(cores, sys)
        if num_slots > len(groups):  # then each thread is a group
            ranks = range(max(map(len, groups)))
            groups = [group[rank : rank + 1] for rank in ranks for group in groups if rank < len(group)]
        parts = [[core for group in groups[i::num_slots] for core in group] for i in range(num_slots)]
        share = min(map(len, parts))
    gpus = [",".join(map(str, gpu_ids[gpus_each * i : gpus_each * (i + 1)])) or None for i in range(num_slots)]
    return [Slot(gpus[i], tuple(parts[i][:share]), f"slot {i + 1}") for i in range(num_slots)]


def own_cores() -> list[int]:
    """The logical processors that this process may use: all of them where the system does not tell."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return sorted(affinity(0)) if affinity else [*range(os.cpu_count() or 1)]


def physical_cores(cores: Sequence[int], sys: Path = SYS) -> list[list[int]]:
    """These logical processors, grouped by physical core; a group for each where the system does not say.

    Two runs on one physical core slow each other down.
    """
    threads = dict[str, list[int]]()
    for core in cores:
        try:
            siblings = (sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(core)
        threads.setdefault(siblings, []).append(core)
    return list(threads.values())


def num_slots_of(hardware: str) -> int:
    found = re.search(r", (\d{1,4}) side by side, \d+ cores? each$", hardware)
    return int(found[1]) if found else 1


# -- how many runs fit side by side on a machine without GPUs ----------------------------------------------

# Memory of one run with a model of models/. Measured on arithmetic with the shipped train.toml: all processes of a run
# use 1.3 GB, of which the trainer has 1.2; the trainer has 1.5 with batch_size 1024 and 2.0 with 4096.
RUN_GB = 2.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Physical cores, or fewer where a container limits CPU time, and free memory in 1e9 bytes. `limit_gb`: of memory
    in this container, None without one.

    `nightshift doctor` prints `num_runs`, and `--pairs auto` uses it.
    """

    num_cores: float
    free_gb: float
    limit_gb: float | None = None

    @property
    def num_runs(self) -> int:
        return max(1, min(int(self.num_cores), int(self.free_gb / RUN_GB)))

    @property
    def memory(self) -> str:
        """`5.1 GB of memory free (this container may use 8.0 GB)`."""
        limit = "" if self.limit_gb is None else f" (this container may use {self.limit_gb:.1f} GB)"
        return f"{self.free_gb:.1f} GB of memory free{limit}"

    def __str__(self) -> str:
        cores = f"{self.num_cores:g} core{'s' if self.num_cores != 1 else ''}"
        return f"{self.num_runs} side by side: {cores}; {self.memory}, {RUN_GB:g} GB a run"


def capacity(proc: Path = Path("/proc"), sys: Path = SYS) -> Capacity:
    """Measure what this process may use now. `proc` and `sys`: where the kernel shows it.

    cpu.max and memory.max of its control group and of those around it may grant less than the machine has, or "max". Of
    the memory in use, files that nobody reads any more (inactive_file) make room.
    https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    num_cores, free, limit = float(len(physical_cores(own_cores(), sys))), psutil.virtual_memory().available, None
    for group in control_groups(proc, sys):
        with suppress(OSError, ValueError, ZeroDivisionError):  # ValueError: "max", no limit
            quota, period = (group / "cpu.max").read_text().split()
            num_cores = min(num_cores, int(quota) / int(period))
        with suppress(OSError, ValueError):
            most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            unused = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            free = min(free, max(most - used + int(unused[1] if unused else 0), 0))
            limit = most if limit is None else min(limit, most)
    return Capacity(num_cores, free / 1e9, None if limit is None else limit / 1e9)

"""What the workers of one machine divide among them: its GPUs, or its cores."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nightshift.errors import UsageError


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one worker. `gpus`: as --gpus names them, None for the engine's own choice; `cores`: of the
    operating system, which the worker is pinned to; none where it is free."""

    number: int = 0
    gpus: str | None = None
    cores: tuple[int, ...] = ()


SYS = Path("/sys")  # where the kernel shows the processors


def divide(num_slots: int, gpu_ids: Sequence[int], gpus_each: int, cores: Sequence[int], sys: Path = SYS) -> list[Slot]:
    """Divide a machine into slots; 0: as many as there are GPUs for; 1: the whole machine. Raises UsageError.

    With GPUs a slot gets neighbouring `cores`. Without GPUs no two slots share a physical core, unless there are more
    slots than physical cores.
    """
    num_slots = num_slots or (len(gpu_ids) // gpus_each if gpus_each else 1) or 1
    if num_slots == 1:
        return [Slot()]
    if num_slots * gpus_each > len(gpu_ids):
        cause = f"--pairs {num_slots} needs {num_slots * gpus_each} GPUs, there are {len(gpu_ids)}"
        raise UsageError(cause, f"Write --pairs {max(len(gpu_ids) // gpus_each, 1)}.")
    if num_slots > len(cores):
        cause = f"--pairs {num_slots} needs a core each, there are {len(cores)}"
        raise UsageError(cause, f"Write --pairs {max(len(cores), 1)}.")
    if gpus_each:
        share = len(cores) // num_slots
        parts = [list(cores[share * i : share * (i + 1)]) for i in range(num_slots)]
    else:
        parts = _apart(num_slots, physical_cores(cores, sys))
    gpus = [",".join(map(str, gpu_ids[gpus_each * i : gpus_each * (i + 1)])) or None for i in range(num_slots)]
    return [Slot(i, gpus[i], tuple(parts[i])) for i in range(num_slots)]


def _apart(num_slots: int, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Equally many processors for each slot: whole physical cores in turn, or threads where cores are too few."""
    if num_slots > len(groups):
        num_threads = max(map(len, groups))
        groups = [group[rank : rank + 1] for rank in range(num_threads) for group in groups if rank < len(group)]
    parts = [[core for group in groups[i::num_slots] for core in group] for i in range(num_slots)]
    share = min(map(len, parts))
    return [part[:share] for part in parts]


def own_cores() -> list[int]:
    """The logical processors that this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


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


def layout(num_slots: int, num_cores: int) -> str:
    """What a run's hardware is followed by where it has others beside it: it is compared with such runs only."""
    return "" if num_slots == 1 else f", {num_slots} side by side, {num_cores} core{'s' if num_cores != 1 else ''} each"


def num_slots_of(hardware: str) -> int:
    found = re.search(r", (\d{1,4}) side by side, \d+ cores? each$", hardware)
    return int(found[1]) if found else 1

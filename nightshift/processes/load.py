"""What others took of the machine while a run trained: processor time, stolen time, GPUs, clocks held down.

Told by what others used, never by how fast the run was: a config that is slow by itself is nobody's load.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from nightshift.records import Load

_SAMPLE_SECONDS = 2.0
# Of nvidia-ml's clock event reasons: hardware slowdown, software and hardware thermal, power brake. A power cap is
# how cards run under full load. https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80


class Watch:
    """Counts from when it is made until `taken` is asked. Call `look` now and then for GPUs."""

    def __init__(self, gpu_ids: Sequence[int] = (), nvml: Any = None, clock: Callable[[], float] = time.monotonic):
        """`nvml`: a session of gpus.nvml_session; without one GPUs are not looked at."""
        self._gpu_ids, self._nvml, self._clock = tuple(dict.fromkeys(gpu_ids)) if nvml else (), nvml, clock
        self._cores = sorted(os.sched_getaffinity(0))
        self._began, self._machine, self._ours = clock(), self._used(), _own_seconds()
        self._looks: list[bool] = []
        self._shared: list[bool] = []

    def look(self) -> None:
        """At the GPUs, once. One that cannot be read (lost, not supported) adds nothing."""
        if not self._gpu_ids:
            return
        ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        for index in self._gpu_ids:
            with suppress(self._nvml.NVMLError):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
                pids = {int(process.pid) for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
                self._looks.append(bool(reasons & _THROTTLED))
                if pids & ours:  # else these are numbers of another namespace, and tell nothing
                    self._shared.append(bool(pids - ours))

    def taken(self) -> Load:
        """What others took since this was made."""
        seconds = max(self._clock() - self._began, 1e-9) * len(self._cores)
        busy, stolen = (now - before for now, before in zip(self._used(), self._machine, strict=True))
        others = busy - (_own_seconds() - self._ours)
        return Load(
            num_cores=len(self._cores),
            load_average=os.getloadavg()[0],
            others_share=min(max(others / seconds, 0.0), 1.0),
            stolen_share=min(max(stolen / seconds, 0.0), 1.0),
            gpu_shared=sum(self._shared) / len(self._shared) if self._shared else None,
            throttled=sum(self._looks) / len(self._looks) if self._looks else None,
        )

    def _used(self) -> tuple[float, float]:
        """Seconds that these cores worked, and that were stolen from them, since the machine's start."""
        times = psutil.cpu_times(percpu=True)
        mine = [times[core] for core in self._cores if core < len(times)]
        stolen = sum(getattr(core, "steal", 0.0) for core in mine)
        # Guests' time is in user's already.
        return sum(t.user + t.nice + t.system + getattr(t, "irq", 0) + getattr(t, "softirq", 0) for t in mine), stolen


@contextmanager
def watching(watch: Watch) -> Iterator[Watch]:
    """Look every few seconds, in a thread, until the block ends."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_SAMPLE_SECONDS):
            watch.look()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        thread.join()


def taken_now(seconds: float = _SAMPLE_SECONDS) -> Load:
    """What others take of the processors for so long from now."""
    watch = Watch()
    time.sleep(seconds)
    return watch.taken()


def _own_seconds() -> float:
    """Processor time of this process and of all that it started, alive or waited for."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it ended between: whoever waited for it has its time
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total

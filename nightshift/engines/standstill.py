"""Detect a run that hangs: no step, no CPU time and no GPU time."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from nightshift.errors import EngineError

STILL_SECONDS = 120.0
_SHOW_SHARE = 1 / 12  # of the limit: from then on the live line shows the standstill
# The share of one core from which a process counts as working: waiting programs poll their queues. Estimated, not
# measured on a GPU.
_LEAST_SHARE = 0.05
_MAX_GAP_SECONDS = 5.0  # a longer gap between two calls means that this process itself was stopped


class Standstill:
    """Watches the processes and the GPUs of one run."""

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        gpu_ids: Sequence[int],
        nvml: Any,
        seconds: float = STILL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pids`: the processes of the run, without their descendants. `nvml`: from nvml_session; a GPU that cannot be
        read counts as busy."""
        self._pids, self._gpu_ids, self._nvml, self._limit, self._clock = pids, gpu_ids, nvml, seconds, clock
        self._last, self._still_seconds = clock(), 0.0
        self._before: dict[psutil.Process, float] = {}  # CPU seconds of each process when the run last worked
        self._progress: object = None

    def look(self, progress: object) -> str:
        """Return a note such as `standing still for 20 s`; "" while the run works. Call it about once a second.

        Args:
            progress: any value that changes with each step of the run.

        Raises:
            EngineError: the run has reached the limit, which is an infrastructure failure.
        """
        now, seconds = self._clock(), self._cpu_seconds()
        self._still_seconds += min(now - self._last, _MAX_GAP_SECONDS)
        self._last = now
        used = max((cpu - self._before.get(process, 0.0) for process, cpu in seconds.items()), default=0.0)
        if progress != self._progress or used >= _LEAST_SHARE * self._limit or self._is_gpu_busy():
            self._progress, self._still_seconds, self._before = progress, 0.0, seconds
        still = self._still_seconds
        if still >= self._limit:
            cause = f"the run stood still: no step, no CPU time and no GPU time for {still:.0f} s"
            raise EngineError(cause, "Run it again; if it repeats, look at the end of the log.")
        is_shown = still >= _SHOW_SHARE * self._limit and used < _LEAST_SHARE * still
        return f"standing still for {still:.0f} s" if is_shown else ""

    def _cpu_seconds(self) -> dict[psutil.Process, float]:
        """Return the CPU seconds of each living process of the run."""
        seconds = {}
        for pid in self._pids():
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                for process in (root, *root.children(recursive=True)):
                    with suppress(psutil.Error):  # only this process has ended
                        times = process.cpu_times()
                        seconds[process] = times.user + times.system
        return seconds

    def _is_gpu_busy(self) -> bool:
        try:
            handles = map(self._nvml.nvmlDeviceGetHandleByIndex, {*self._gpu_ids}) if self._nvml else ()
            return any(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0 for handle in handles)
        except self._nvml.NVMLError:
            return True

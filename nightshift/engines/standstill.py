"""Find a run that stands still: no step, no CPU time and no GPU time. Every engine asks here about once a second."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from nightshift.errors import EngineError

STILL_SECONDS = 120.0
_SHOW_SHARE = 1 / 12  # of the limit: the live line shows a run that stands still from then on
# Programs that wait look at their queues now and then. Estimated, not measured on a GPU.
_LEAST_SHARE = 0.05  # of one core, by one process: a run has a dozen that wait
_LOOK_SECONDS = 1.0
_MAX_GAP_SECONDS = 5.0  # between two looks: this process itself may have been stopped meanwhile


class Standstill:
    """Watches the processes of one run and its GPUs."""

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        gpu_ids: Sequence[int],
        nvml: Any,
        seconds: float = STILL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pids`: of the processes whose trees work. `nvml`: of nvml_session; a GPU that cannot be read is busy."""
        self._pids, self._gpu_ids, self._nvml, self._limit, self._clock = pids, gpu_ids, nvml, seconds, clock
        self._last, self._still_seconds, self._used = clock(), 0.0, 0.0
        self._before: dict[psutil.Process, float] = {}  # CPU seconds when the run last worked
        self._progress: object = None

    def look(self, progress: object) -> str:
        """Return for how long the run stands still, in words; "" while it works.

        Args:
            progress: what changes with each step of the run.

        Raises:
            EngineError: it has stood still for the limit. An infrastructure failure.
        """
        now = self._clock()
        gap = now - self._last
        if gap < _LOOK_SECONDS and progress == self._progress:
            return self._note()
        self._last = now
        self._still_seconds += min(gap, _MAX_GAP_SECONDS)
        seconds = self._cpu_seconds()
        used = max((cpu - self._before.get(process, 0.0) for process, cpu in seconds.items()), default=0.0)
        if progress != self._progress or used >= _LEAST_SHARE * self._limit or self._is_gpu_busy():
            self._progress, self._still_seconds, self._before, used = progress, 0.0, seconds, 0.0
        self._used = used
        if self._still_seconds >= self._limit:
            cause = f"the run stood still: no step, no CPU time and no GPU time for {self._still_seconds:.0f} s"
            raise EngineError(cause, "Run it again; if it repeats, look at the end of the log.")
        return self._note()

    def _note(self) -> str:
        is_idle = self._used < _LEAST_SHARE * self._still_seconds
        is_shown = is_idle and self._still_seconds >= _SHOW_SHARE * self._limit
        return f"standing still for {self._still_seconds:.0f} s" if is_shown else ""

    def _cpu_seconds(self) -> dict[psutil.Process, float]:
        """Return the CPU seconds of each living process of the run."""
        seconds = {}
        for pid in self._pids():
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                for process in (root, *root.children(recursive=True)):
                    with suppress(psutil.Error):
                        times = process.cpu_times()
                        seconds[process] = times.user + times.system
        return seconds

    def _is_gpu_busy(self) -> bool:
        try:
            handles = map(self._nvml.nvmlDeviceGetHandleByIndex, {*self._gpu_ids}) if self._nvml else ()
            return any(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0 for handle in handles)
        except self._nvml.NVMLError:
            return True

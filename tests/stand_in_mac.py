"""A stand-in for macOS: this process without what only Linux has. As a script it is the watchdog of a process there."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

_READERS = "psutil"  # which reads /proc for us, as other files elsewhere


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)


def remove_linux() -> None:
    """Remove affinity, prctl, and our own look at /proc and /sys."""
    del os.sched_getaffinity, os.sched_setaffinity
    ctypes.CDLL = _Library  # type: ignore[misc]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not str(arguments[0]).startswith(("/proc/", "/sys/")):
            return
        frame = sys._getframe(1)
        while frame is not None:
            if _READERS in frame.f_code.co_filename:
                return
            frame = frame.f_back
        raise FileNotFoundError(arguments[0])

    sys.addaudithook(watch)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    remove_linux()
    from nightshift.executors.process import watch

    watch(int(sys.argv[1]))

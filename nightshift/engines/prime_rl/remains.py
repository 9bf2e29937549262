"""What a prime-rl run leaves behind that is heavy: published weights, rollouts, segments of shared memory.

A session removes its own at its end. Until then a file in the run's folder says that they are there, so that what a
killed worker could not remove (1 to 3 GB on GPUs) goes with the next start in the checkout.
"""

import os
import platform
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from nightshift.errors import NightshiftError
from nightshift.executors.process import ProcessGroup
from nightshift.executors.watchdog import is_alive
from nightshift.files import read_json, write_json

SHARED_MEMORY = Path("/dev/shm")
Segment = tuple[str, int]  # its name in SHARED_MEMORY, its inode


def mapped_segments(processes: Iterable[psutil.Process]) -> set[Segment]:
    """What these map and what has a name still."""
    return {segment for process in processes for segment in _mapped_by(process.pid) if _is_private(segment)}


def remove_segments(segments: Iterable[Segment]) -> list[str]:
    """Unlink `segments` that our processes mapped, and return their names. Only the same, private file that no process
    maps now is removed: a name in /dev/shm does not say whose it is."""
    wanted = {segment for segment in segments if _is_private(segment)}
    if not wanted:
        return []
    removed = []
    for name, _ in wanted - {segment for pid in psutil.pids() for segment in _mapped_by(pid)}:
        with suppress(OSError):  # gone meanwhile
            (SHARED_MEMORY / name).unlink()
            removed.append(name)
    return sorted(removed)


def _mapped_by(pid: int) -> set[Segment]:
    """Lines of proc_pid_maps(5) end in inode and path; what was unlinked has ` (deleted)` behind it."""
    found = set[Segment]()
    with suppress(OSError):  # gone, or another user's
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            *_, inode, path = line.split(maxsplit=5) if f"{SHARED_MEMORY}/" in line else ("0", "")
            if path and Path(path).parent == SHARED_MEMORY:
                found.add((Path(path).name, int(inode)))
    return found


def _is_private(segment: Segment) -> bool:
    """True for a file of that name and inode which is this user's, and open to nobody else."""
    name, inode = segment
    if "/" in name:
        return False
    try:
        it = (SHARED_MEMORY / name).lstat()
    except (OSError, ValueError):
        return False
    is_own = it.st_uid == os.getuid() and not it.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISREG(it.st_mode) and is_own and it.st_ino == inode


PRIME_DIR = "prime-rl"  # prime-rl's own folder in the run's
TRACE_NAME = "unfinished.json"
SAME_SECONDS = 2.0  # the clock on the wall, by which psutil tells when a process began, is set now and then
LOOK_SECONDS = 5.0  # a look reads what every process of the run maps: thousands of lines each
EARLIER_DIR = "earlier"  # weights of earlier steps of a self-play run
_HEAVY = ("broadcasts", EARLIER_DIR, "rollouts")


class _Trace(msgspec.Struct):
    """Who works in the run's folder, and what goes with it."""

    pid: int
    began: float  # of the process, as psutil tells
    keep_all: bool
    segments: set[Segment]
    node: str = ""
    boot: str = ""  # id of its kernel's


@dataclass(slots=True)
class Remains:
    """Of one run, whose prime-rl works in `prime_dir`. `keep_all`: weights and rollouts stay."""

    prime_dir: Path
    keep_all: bool
    clock: Callable[[], float]
    _segments: set[Segment] = field(default_factory=set)
    _looked: float = float("-inf")

    def begin(self) -> None:
        """Before the first process, from which on something may be left; and when there is more of it."""
        me = psutil.Process()
        trace = _Trace(me.pid, me.create_time(), self.keep_all, self._segments, platform.node(), _boot_id())
        with suppress(OSError, NightshiftError):  # a full disk ends the run where it matters, not here
            write_json(self.prime_dir.parent / TRACE_NAME, trace)

    def look(self, groups: Iterable[ProcessGroup], *, now: bool = False) -> None:
        """Note what their processes share, every LOOK_SECONDS or `now`."""
        if not now and self.clock() < self._looked + LOOK_SECONDS:
            return
        self._looked = self.clock()
        if new := mapped_segments(p for group in groups for p in group.processes) - self._segments:
            self._segments |= new
            self.begin()

    def remove(self) -> None:
        """When every process has ended."""
        _remove(self.prime_dir, self.keep_all, self._segments)


def sweep(runs_dir: Path) -> None:
    """Remove what dead workers left: beside the trace, and never where a link leads out of `runs_dir`."""
    for folder in ("*/", "*/*/", "certify/*/*/"):  # a start of the incumbent has one of its own
        for path in runs_dir.glob(folder + TRACE_NAME):
            with suppress(NightshiftError, OSError):  # no trace of ours: whoever wrote it may keep it
                trace, prime_dir = read_json(path, _Trace, ""), (path.parent / PRIME_DIR).resolve()
                if trace and prime_dir.is_relative_to(runs_dir.resolve()) and not _is_at_work(trace):
                    _remove(prime_dir, trace.keep_all, trace.segments)


def _is_at_work(trace: _Trace) -> bool:
    if trace.node not in ("", platform.node()) and trace.boot != _boot_id():
        return True  # as far as can be seen from here: another machine that shares this folder
    with suppress(psutil.Error, OverflowError, ValueError):
        process = psutil.Process(trace.pid)
        return is_alive(process) and abs(process.create_time() - trace.began) < SAME_SECONDS
    return False


def _boot_id() -> str:
    """Of this kernel since it was started; empty where the system tells none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _remove(prime_dir: Path, keep_all: bool, segments: Iterable[Segment]) -> None:
    remove_segments(segments)
    for name in () if keep_all else _HEAVY:
        shutil.rmtree(prime_dir / name, ignore_errors=True)  # refuses a link
    (prime_dir.parent / TRACE_NAME).unlink(missing_ok=True)

"""Segments of shared memory that killed processes left in /dev/shm: seen while they lived, removed when all are gone.

A process that is killed unlinks nothing (vLLM in its start: 168 MB), and names like psm_1a2b3c4d are everybody's. So
a segment goes only if a process of the caller was seen to map it, by name and inode, if it is this user's alone, and
if no process maps it now, as far as /proc tells.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
Segment = tuple[str, int]  # its name in FOLDER, its inode


def mapped(processes: Iterable[psutil.Process]) -> set[Segment]:
    """What these map and what has a name still."""
    return {segment for process in processes for segment in _mapped_by(process.pid) if _is_private(segment)}


def remove(segments: Iterable[Segment]) -> list[str]:
    """Unlink those that are what they were and that nobody maps; their names."""
    wanted = {segment for segment in segments if _is_private(segment)}
    if not wanted:
        return []
    removed = []
    for name, _ in wanted - {segment for pid in psutil.pids() for segment in _mapped_by(pid)}:
        with suppress(OSError):  # gone meanwhile
            (FOLDER / name).unlink()
            removed.append(name)
    return sorted(removed)


def _mapped_by(pid: int) -> set[Segment]:
    """Lines of proc_pid_maps(5) end in inode and path; what was unlinked has ` (deleted)` behind it."""
    found = set[Segment]()
    with suppress(OSError):  # gone, or another user's
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            *_, inode, path = line.split(maxsplit=5) if f"{FOLDER}/" in line else ("0", "")
            if path and Path(path).parent == FOLDER:
                found.add((Path(path).name, int(inode)))
    return found


def _is_private(segment: Segment) -> bool:
    """True for a file of that name and inode which is this user's, and open to nobody else."""
    name, inode = segment
    if "/" in name:
        return False
    try:
        it = (FOLDER / name).lstat()
    except (OSError, ValueError):
        return False
    is_own = it.st_uid == os.getuid() and not it.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISREG(it.st_mode) and is_own and it.st_ino == inode

"""Files that are replaced whole or not at all, whatever kills their writer."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

_NAME = re.compile(r"\.(.+)\.(\d{1,9})\.tmp")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: temporary file beside it, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was renamed in `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_folder(folder: Path, names: tuple[str, ...] | None = None) -> None:
    """Delete the temporary files that killed writers left in `folder`; of these `names` only, if given."""
    for path in folder.glob(".*.tmp"):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_dir() or (names is not None and match[1] not in names):
            continue
        if not psutil.pid_exists(int(match[2])):
            path.unlink(missing_ok=True)

"""The Python environment, outside the checkout's own code: is it the same after an agent's work as before?

Every worker is a fresh process that imports it. Whoever can write there (the person, so the agent too) can
have the next worker do anything, and neither git nor the rules hash would know. Looking at the size, times and
inode number of 30,000 files takes 0.2 s. A change time cannot be set back, but it also moves when uv links the
file into another environment: of a file with several links it does not count.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from nightshift.errors import UsageError, listed
from nightshift.guard.freeze import files_below

_SUFFIXES = (".py", ".pth", ".pyc", "entry_points.txt", "pyvenv.cfg")
_PACKAGES = ("site-packages", "dist-packages")  # of the interpreter that the environment was made from


def take(root: Path) -> Mapping[str, os.stat_result]:
    """The state of every file that Python could import from outside the checkout at `root`, and of its programs."""
    state = {}
    for file in _files(root):
        with suppress(OSError):
            state[os.fspath(file)] = file.stat()  # of what a link leads to
    return state


def require_same(before: Mapping[str, os.stat_result], root: Path) -> None:
    """Raise UsageError with the first names of what is new, gone or changed since `before`.

    Compiled code that is new or changed is deleted: Python makes it again, of its source.
    """
    after = take(root)
    edited = {path for path, state in after.items() if path in before and not _is_same(before[path], state)}
    changed = edited | (before.keys() ^ after.keys())
    for path in filter(_is_cache, changed):
        Path(path).unlink(missing_ok=True)
    if named := sorted(path for path in changed if not _is_cache(path)):
        raise UsageError(
            f"{listed(named)} changed while the agent worked: workers would import it",
            "Look at the change and undo it (uv sync --reinstall); then start the night again.",
        )


def _is_same(one: os.stat_result, two: os.stat_result) -> bool:
    """True if the file was not written to, as far as this tells."""
    was, now = ((state.st_size, state.st_mtime_ns, state.st_ino) for state in (one, two))
    return was == now and (one.st_ctime_ns == two.st_ctime_ns or max(one.st_nlink, two.st_nlink) > 1)


def _is_cache(path: str) -> bool:
    """True for compiled code that Python leaves where it looks for it; elsewhere it is a module of its own."""
    is_below = sys.pycache_prefix is not None and path.startswith(f"{sys.pycache_prefix}{os.sep}")
    return path.endswith(".pyc") and (is_below or Path(path).parent.name == "__pycache__")


def _files(root: Path) -> Iterator[Path | os.DirEntry[str]]:
    # The harness's own checkout is another one where a program drives this one, as tests do.
    checkouts = [path for path in (root, Path(__file__).resolve().parents[2]) if (path / "run.py").is_file()]
    own = {path for top in checkouts for path in (top, *(top / "environments").glob("*"))}
    folders = [path for path in map(Path, sys.path) if path.is_dir() and path not in own]
    if sys.prefix != sys.base_prefix:  # a virtual environment; the system's programs are not ours to watch
        yield from (entry for entry in os.scandir(sysconfig.get_path("scripts")) if entry.is_file())
        yield Path(sys.prefix, "pyvenv.cfg")
    unread = (*_PACKAGES, "__pycache__") if sys.pycache_prefix else _PACKAGES
    for folder in (*folders, *([Path(sys.pycache_prefix)] if sys.pycache_prefix else [])):
        for entry in files_below(folder, unread):
            if entry.name.endswith(_SUFFIXES) or ".so" in entry.name or entry.is_symlink():
                yield entry

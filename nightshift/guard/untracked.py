"""Code in a checkout that Python would run though nobody agreed on it: untracked modules and forged bytecode.

git compares the files that it tracks. Python also imports what lies beside them: a folder `decision/` or a
`decision.*.so` before decision.py, a sitecustomize.py before anything, and a `.pyc` in place of the source
whose time and size it repeats.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import marshal
import os
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from nightshift.rules import is_covered

_START_UP = frozenset({"sitecustomize", "usercustomize"})  # Python imports them by itself, if they are on sys.path
_CACHE = "__pycache__"


def untracked_code(top: Path, tracked: Collection[str], frozen: Sequence[str]) -> list[str]:
    """Names, relative to `top`, of what Python could import beside the `tracked` files of the `frozen` folders."""
    code = [name for name in tracked if is_covered(name, frozen)]
    folders = [path for path in frozen if path.endswith("/") and any(name.startswith(path) for name in code)]
    packages = {name.split("/")[-2] for name in code if fnmatch(name, "environments/*/__init__.py")}
    beside = {path.name for path in top.iterdir() if path.name.partition(".")[0] in _START_UP | packages}
    found = beside - {name.partition("/")[0] for name in tracked} if folders else set()
    for folder in folders:
        found |= {name for name in _importable(top, folder) if name not in tracked}
    return sorted(found) + sorted(_forged(top, code))


def top_modules(root: Path) -> list[Path]:
    """What can be imported from the checkout's top, which is on sys.path: its modules, and the first file of packages.

    A name that a library imports if it is there (wandb, IPython) would be run.
    """
    suffixes = tuple(importlib.machinery.all_suffixes())
    inside = (path for folder in root.iterdir() if folder.is_dir() for path in folder.glob("__init__.*"))
    return sorted(path for path in (*root.glob("*.*"), *inside) if path.name.endswith(suffixes))


def files_below(top: Path, passed_over: Sequence[str] = ()) -> Iterator[os.DirEntry[str]]:
    """All that is no folder, in a fixed order; without what lies in folders of these names, or cannot be read."""
    folders = [os.fspath(top)]
    while folders:  # os.walk recurses, and a tree that is deep enough ends it
        try:
            entries = sorted(os.scandir(folders.pop()), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield entry
            elif entry.name not in passed_over:
                folders.append(entry.path)


def _importable(top: Path, folder: str) -> Iterator[str]:
    """Files that can be imported, and links to folders of more of them; compiled ones have their own check."""
    suffixes = tuple(importlib.machinery.all_suffixes())
    for entry in files_below(top / folder, (_CACHE,)):
        if entry.name.endswith(suffixes) or Path(entry.path).is_dir():
            yield Path(entry.path).relative_to(top).as_posix()


def _forged(top: Path, code: Collection[str]) -> Iterator[str]:
    for name in code:
        cached = Path(importlib.util.cache_from_source(str(top / name)))
        if name.endswith(".py") and is_forged(top / name, cached):
            yield cached.relative_to(top).as_posix() if cached.is_relative_to(top) else str(cached)


def is_forged(source: Path, cached: Path) -> bool:
    """True for bytecode that Python would load for a source, and that is not what it makes of that source."""
    try:
        data, text, status = cached.read_bytes(), source.read_bytes(), source.stat()
    except OSError:
        return False  # not compiled yet; a missing source is a changed file
    return _is_loaded(data, text, status) and not _is_of(data, text)


def _is_loaded(data: bytes, source: bytes, status: os.stat_result) -> bool:
    """True if Python takes this bytecode for the source's: the header as importlib's source checks it (PEP 552)."""
    if data[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags = int.from_bytes(data[4:8], "little")
    if flags & 0b01:  # by hash, and checked only if the second bit says so
        return not flags & 0b10 or data[8:16] == importlib.util.source_hash(source)
    stamp = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return stamp == (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little"))


def _is_of(data: bytes, source: bytes) -> bool:
    try:
        return bool(marshal.loads(data[16:]) == compile(source, "", "exec", dont_inherit=True))
    except (ValueError, EOFError, TypeError, SyntaxError):
        return False

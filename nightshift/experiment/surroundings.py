"""The Python environment, outside the checkout's own code: is it the same after an agent's work as before?

Every worker is a fresh process that imports it. Whoever can write there (the person, so the agent too) can
have the next worker do anything, and neither git nor the rules hash would know. Looking at the size, times and
inode number of 30,000 files takes 0.2 s. A change time cannot be set back, but it also moves when uv links the
file into another environment: a file of which nothing else has changed must be as its package's RECORD says.
"""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from nightshift.entry import FIXED_VARIABLES
from nightshift.experiment.integrity import files_below
from nightshift.waiting import waiting

_SUFFIXES = (".py", ".pth", ".pyc", "entry_points.txt", "RECORD", "pyvenv.cfg")
_PACKAGES = ("site-packages", "dist-packages")  # of the interpreter that the environment was made from


class Surroundings:
    """What the harness of the checkout at `root` imports from outside it, by the folders of `path` (sys.path's)."""

    def __init__(self, root: Path, path: Sequence[str] | None = None) -> None:
        self._root, self._path = root, path
        self.variables = {name: os.environ[name] for name in FIXED_VARIABLES if os.environ.get(name)}
        self._seen: Mapping[str, os.stat_result] = {}
        self._frozen: list[Path] = []

    def look(self, frozen: Sequence[str] = ()) -> None:
        """Remember how it is now; with it the checkout's files of these names, which could be put back unseen later."""
        self._frozen = [self._root / name for name in frozen]
        with waiting("looking at all that a run may import"):
            self._seen = self._take()

    def changed(self, *, was_agent_here: bool = False) -> list[str]:
        """Names of what is new, gone or changed since the last look, but for what Python has compiled.

        Where an agent was at work meanwhile, that is deleted: Python makes it again, of its source.
        """
        before, after = self._seen, self._take()
        there = before.keys() & after.keys()
        edited = {path for path in there if _contents(before[path]) != _contents(after[path])}
        if touched := {path for path in there - edited if before[path].st_ctime_ns != after[path].st_ctime_ns}:
            packaged = {path: file for file in self._packaged() if (path := _path_of(file)) in touched}
            edited |= touched - packaged.keys() | {_path_of(file) for file in _unlike([*packaged.values()])}
        changed = edited | (before.keys() ^ after.keys())
        for path in filter(_is_cache, changed) if was_agent_here else ():
            Path(path).unlink(missing_ok=True)
        return sorted(path for path in changed if not _is_cache(path))

    def unlike_packages(self) -> list[str]:
        """Names of files of this environment's packages that are not what their RECORD says: its sha256 of each.

        A minute for the six gigabytes of torch and its libraries on two busy cores.
        """
        with waiting("comparing the installed packages with what was published"):
            ours = [file for file in self._packaged() if _path_of(file).startswith(sys.prefix + os.sep)]
            return sorted(map(str, _unlike(ours)))

    def _packaged(self) -> Iterator[metadata.PackagePath]:
        """The files of all packages that have a hash there."""
        found = metadata.distributions(path=self._folders())
        return (file for dist in found for file in dist.files or () if file.hash is not None)

    def _take(self) -> Mapping[str, os.stat_result]:
        state = {}
        for file in self._files():
            with suppress(OSError):
                state[os.fspath(file)] = file.stat()  # of what a link leads to
        return state

    def _folders(self) -> list[str]:
        # The harness's own checkout is another one where a program drives this one, as tests do.
        checkouts = [top for top in (self._root, Path(__file__).resolve().parents[2]) if (top / "run.py").is_file()]
        own = {path for top in checkouts for path in (top, *(top / "environments").glob("*"))}
        path = sys.path if self._path is None else self._path
        return [folder for folder in path if Path(folder) not in own]

    def _files(self) -> Iterator[Path | os.DirEntry[str]]:
        yield from self._frozen
        if self._path is None and sys.prefix != sys.base_prefix:  # the system's own programs are not ours to watch
            yield from (entry for entry in os.scandir(sysconfig.get_path("scripts")) if entry.is_file())
            yield Path(sys.prefix, "pyvenv.cfg")
        # Where compiled code has a place of its own, none beside a source is read.
        unread = (*_PACKAGES, "__pycache__") if sys.pycache_prefix else _PACKAGES
        for folder in (*self._folders(), *([sys.pycache_prefix] if sys.pycache_prefix else ())):
            if not Path(folder).is_dir():
                yield Path(folder)  # python311.zip comes before the standard library, once it is there
            for entry in files_below(Path(folder), unread):
                if entry.name.endswith(_SUFFIXES) or ".so" in entry.name or entry.is_symlink():
                    yield entry


def _contents(state: os.stat_result) -> tuple[int, int, int]:
    """What is another one after a write, unless the writer takes care."""
    return state.st_size, state.st_mtime_ns, state.st_ino


def _is_cache(path: str) -> bool:
    """True for compiled code that Python leaves where it looks for it; elsewhere it is a module of its own."""
    is_below = sys.pycache_prefix is not None and path.startswith(f"{sys.pycache_prefix}{os.sep}")
    return path.endswith(".pyc") and (is_below or Path(path).parent.name == "__pycache__")


def _path_of(file: metadata.PackagePath) -> str:
    return os.path.normpath(str(file.locate()))  # that of a program begins with ../../..


def _unlike(files: Sequence[metadata.PackagePath]) -> list[metadata.PackagePath]:
    """Those that are not as they were packed."""
    with ThreadPoolExecutor(os.cpu_count()) as executor:  # hashing lets other threads run
        return [file for file, is_it in zip(files, executor.map(_is_as_packed, files), strict=True) if not is_it]


def _is_as_packed(file: metadata.PackagePath) -> bool:
    """True if a file has the hash that its package's RECORD gives (PEP 376: urlsafe base64 without padding)."""
    try:
        with Path(str(file.locate())).open("rb") as opened:
            assert file.hash is not None
            digest = hashlib.file_digest(opened, file.hash.mode).digest()
    except OSError:
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value

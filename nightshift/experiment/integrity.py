"""Is the harness that measures the one that was agreed on? Its files, tracked or not, against a commit.

Compared is what the rules name as frozen, and nothing else: documents, tests and environments that these rules do
not use come and go while a campaign lives. git compares the files that it tracks. Python also imports what lies
beside them: a folder `decision/` or a `decision.*.so` before decision.py, a sitecustomize.py before anything, and a
`.pyc` in place of the source whose time and size it repeats.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import resource
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from nightshift.campaign.git import Head, Repo
from nightshift.campaign.records import Record
from nightshift.config.rules import Rules, is_covered
from nightshift.errors import UsageError, listed

_CACHE = "__pycache__"
_MORE_BYTES = 1_000_000_000


def changed_harness_files(repo: Repo, commit: str, rules: Rules, harness_tree: str = "") -> list[str]:
    """Frozen files that differ from `commit`, then code among them that it does not hold; relative to the checkout.

    `harness_tree`: our own digest of them when they were agreed on. Where it is another one now, and git shows no
    file that differs, that is said instead.
    """
    tracked = repo.files_at(commit)
    changed = [name for name in tracked if is_covered(name, rules.frozen) and repo.differs(name, tracked[name])]
    changed += untracked_code(repo.root, tracked, rules.frozen)
    if not changed and harness_tree and (now := rules.harness_tree(repo.root)) != harness_tree:
        return [f"files beside the tracked ones ({harness_tree[:12]} then, {now[:12]} now)"]
    return changed


def require_clean_start(repo: Repo, head: Head, config: bytes, first: Record | None, rules: Rules) -> None:
    """Refuse an experiment on a campaign branch whose harness is not the one that was agreed.

    `first` is the campaign's first experiment; None for that first one itself, which measures train.toml as it is
    committed. Raises UsageError.
    """
    if head.commit is None:
        raise UsageError(f"branch {head.branch} has no commit", "Commit the checkout first.")
    branch_point, harness_tree = (first.commit, first.harness_tree) if first else (None, "")
    changed = changed_harness_files(repo, branch_point or head.commit, rules, harness_tree)
    if changed:
        raise UsageError(
            f"{listed(changed)} differ from the branch point {(branch_point or head.commit)[:7]}",
            "On a campaign branch only train.toml changes: restore or delete them, or start another branch.",
        )
    if first is None and repo.config_at(head.commit) != config:
        raise UsageError(
            "train.toml differs from its committed version, and the first experiment measures the baseline",
            "Commit train.toml, or restore it, before the first run of a campaign.",
        )


def untracked_code(top: Path, tracked: Collection[str], frozen: Sequence[str]) -> list[str]:
    """Names, relative to `top`, of what Python could import beside the `tracked` files of the `frozen` folders."""
    code = [name for name in tracked if is_covered(name, frozen)]
    folders = [path for path in frozen if path.endswith("/") and any(name.startswith(path) for name in code)]
    found, suffixes = top_modules(top) if folders else [], tuple(importlib.machinery.all_suffixes())
    for entry in (entry for folder in folders for entry in files_below(top / folder, (_CACHE,))):
        if entry.name.endswith(suffixes) or Path(entry.path).is_dir():  # a link to a folder of more of them
            found.append(Path(entry.path))
    return sorted({path.relative_to(top).as_posix() for path in found} - {*tracked}) + sorted(_forged(top, code))


def top_modules(root: Path) -> list[Path]:
    """What could be imported from the checkout's top: its modules, and the first file of packages.

    A name that a library imports if it is there (wandb, IPython) would be run, were the top on Python's path; it is
    not (entry.py), but for programs of others.
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


def _forged(top: Path, code: Collection[str]) -> Iterator[str]:
    """Names of compiled code that is not what Python makes of its source."""
    with _little_memory():
        forged = [name for name in code if name.endswith(".py") and is_forged(top / name)]
    for name in forged:
        cached = Path(importlib.util.cache_from_source(str(top / name)))
        yield cached.relative_to(top).as_posix() if cached.is_relative_to(top) else str(cached)


@contextmanager
def _little_memory() -> Iterator[None]:
    """Meanwhile no gigabytes for a tuple of two billion that 21 bytes of bytecode announce."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":  # elsewhere what a process has mapped is not what it may map
        most = psutil.Process().memory_info().vms + _MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most if limits[0] < 0 else min(most, limits[0]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def is_forged(source: Path) -> bool:
    """True if there is bytecode that Python would load for a source, and that is not what it makes of that source."""
    try:
        if not Path(importlib.util.cache_from_source(str(source))).exists():
            return False  # not compiled yet
        loaded = _Loader("", str(source)).get_code("")
        return loaded != compile(source.read_bytes(), "", "exec", dont_inherit=True)
    except OSError:  # a missing source is a changed file
        return False
    except (ValueError, EOFError, TypeError, ImportError, SyntaxError, MemoryError):
        return True


class _Loader(importlib.machinery.SourceFileLoader):
    """Chooses between bytecode and source as Python does, and leaves no bytecode of its own."""

    def set_data(self, *arguments: object, **named: object) -> None:
        """Nothing."""

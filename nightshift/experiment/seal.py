"""Is the checkout as it was before an agent's process ran?

In a sandbox (agents/sandbox.py) an agent does not see the checkout; without it, it has the rights of the harness.
Nothing of its clone gets here but a checked train.toml and three lines of text; what else changes here meanwhile is
found by comparison with a list of what may: own digests of the frozen harness, every tracked file, code that Python
would run, every untracked file at the top but logs and documents, all of .git but what editors and fetches write, all
of runs/ but the pages that a person may ask for. surroundings.py watches the Python environment.

What nothing depends on yet is put back, or moved to runs/agent for a person to look at; for all else the night stops.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import EFFECTIVE_NAME, RECORD_NAME, Ledger
from nightshift.campaign.records import JOB_NAME
from nightshift.config.rules import Rules
from nightshift.errors import UsageError, listed
from nightshift.experiment.integrity import files_below, untracked_code
from nightshift.files import read_file, write_atomically

_MAX_HASHED_BYTES = 100_000_000  # a sparse file of a terabyte costs its writer nothing
_MAX_KEPT_BYTES = 1_000_000  # of a file that can be put back
# At the top: these are watched otherwise; and what nothing reads: logs, documents, what editors leave.
_OWN = frozenset({".venv", "runs", CONFIG_NAME, "results.tsv", "STOP", "__pycache__"})
_UNREAD = re.compile(r".*(\.(log|md|txt|out|err|png|html|csv|tsv|ipynb|sw[a-p])|~)|\.#.*|#.*#|4913|\..*_cache|\.idea")
# In .git: objects are believed by their hash only, and branches, index and configuration by what git says of them.
_OF_GIT = re.compile(
    r"(worktrees/[^/]+/)?(objects/(?!info/)|logs/|refs/|.*\.lock$|(index|config|HEAD|packed-refs|\w+_HEAD|\w+_EDITMSG)$)"
)
# In runs/: locks, logs of agents, and what `nightshift report` writes whenever a person asks for it.
_OF_RUNS = re.compile(r"(agent(/|$)|(\.controller|\.lock|report\.html|report\.md|progress\.png)$)")
_STATE_OF_THE_NIGHT = "runs/night.json"


@dataclass(frozen=True, slots=True)
class Checkout:
    """What is watched, and by what."""

    root: Path
    rules: Rules
    ledger: Ledger
    repo: Repo
    in_flight: Callable[[], Collection[Path]] = tuple  # folders of runs whose workers write now


@dataclass(frozen=True, slots=True)
class Seal:
    """The checkout at one moment: named parts with their state.

    `loose`: files that can be put back, with their state, mode and bytes; these are None for one that is too large, or
    no file. `tracked`: names at the top that git knows.
    """

    parts: Mapping[str, str]
    loose: Mapping[str, tuple[str, tuple[int, bytes] | None]]
    tracked: frozenset[str]
    config: bytes | None  # train.toml; None: not there, or no regular file
    tsv: bytes | None


def take(checkout: Checkout) -> Seal:
    """The state of the checkout now. Raises EngineError or UsageError when git does not answer for it."""
    root, head = checkout.root, checkout.repo.head()
    parts, tracked = dict(checkout.repo.state()), {}
    parts["the frozen harness"] = checkout.rules.harness_tree(root)
    if head.commit is not None:
        tracked = checkout.repo.files_at(head.commit)
        free = (CONFIG_NAME, *(name for name in tracked if name.endswith(".md")))
        names = (name for name in tracked if name not in free and checkout.repo.differs(name, tracked[name]))
        parts |= dict.fromkeys((*names, *untracked_code(root, tracked, checkout.rules.frozen)), "changed")
    parts |= dict(_of_runs(checkout.ledger.runs_dir, checkout.in_flight()))
    tops = frozenset(name.partition("/")[0] for name in tracked)
    return Seal(parts, _loose(checkout, tops), tops, _bytes(root / CONFIG_NAME), _bytes(checkout.ledger.tsv_path))


def restore(before: Seal, checkout: Checkout) -> tuple[str, ...]:
    """Put back what can be; the notes that name it.

    Raises UsageError when anything else was touched: a person has to look at that.
    """
    notes, now = [], _loose(checkout, before.tracked)
    for name in sorted(name for name in before.loose.keys() | now.keys() if before.loose.get(name) != now.get(name)):
        if name in before.loose and before.loose[name][1] is None:
            raise _stop([name])
        _put_back(name, before, checkout)
        notes.append(f"changed {name} in the checkout itself: put back")
    after = take(checkout)  # only now: git may have refused what was put back
    if names := {name for name, _ in (before.parts.items() ^ after.parts.items())}:
        raise _stop(sorted(names))
    if before.loose != after.loose:
        raise _stop(sorted(name for name, _ in before.loose.items() ^ after.loose.items()))
    if after.config != before.config and before.config is not None:
        write_atomically(checkout.root / CONFIG_NAME, before.config)
        notes.append("changed train.toml in the checkout itself: put back")
    if after.tsv != before.tsv:
        checkout.ledger.tsv_path.unlink(missing_ok=True)
        checkout.ledger.sync_tsv()
        notes.append("changed results.tsv in the checkout itself: rebuilt from the records")
    return tuple(notes)


def _stop(names: Sequence[str]) -> UsageError:
    return UsageError(
        f"{listed(names)} changed in this checkout while the agent was at work in its clone",
        "Look at the change and undo it; then start the night again.",
    )


def _put_back(name: str, before: Seal, checkout: Checkout) -> None:
    """What stands there now goes to runs/agent/NNNN-put-aside; what stood there is written again."""
    path, aside = checkout.root / name, checkout.ledger.runs_dir / "agent"
    aside /= f"{checkout.ledger.next_number():04d}-put-aside"
    aside.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        path.rename(aside / f"{len(list(aside.iterdir()))}-{path.name}")
    if kept := before.loose.get(name, ("", None))[1]:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, kept[1])
        path.chmod(kept[0])


def _loose(checkout: Checkout, tracked: frozenset[str]) -> dict[str, tuple[str, tuple[int, bytes] | None]]:
    paths = {name: checkout.root / name for name in (_STATE_OF_THE_NIGHT, *_loose_names(checkout, tracked))}
    return {name: (digest(path), _kept(path)) for name, path in paths.items() if os.path.lexists(path)}


def _loose_names(checkout: Checkout, tracked: frozenset[str]) -> Iterator[str]:
    """Names of untracked things at the top, and of files in git's own folders, that a tool would heed."""
    said = {(status.st_dev, status.st_ino) for status in map(os.fstat, (1, 2))}  # where the night itself writes to
    for entry in os.scandir(checkout.root):
        status = entry.stat(follow_symlinks=False)
        is_free = entry.name in _OWN or entry.name in tracked or _UNREAD.fullmatch(entry.name)
        if not is_free and (status.st_dev, status.st_ino) not in said:
            yield entry.name
    for folder in checkout.repo.folders():
        place = folder.relative_to(checkout.root) if folder.is_relative_to(checkout.root) else folder
        for file in files_below(folder):
            name = os.path.relpath(file.path, folder)
            if not _OF_GIT.match(name):
                yield str(place / name)


def _of_runs(runs_dir: Path, in_flight: Collection[Path]) -> Iterator[tuple[str, str]]:
    """All that lies in runs/, by size, times and inode: a change time cannot be set back. Of runs in flight not what
    their workers write."""
    folders = "|".join(re.escape(os.path.relpath(run_dir, runs_dir)) for run_dir in in_flight)
    ours = "|".join(map(re.escape, (RECORD_NAME, CONFIG_NAME, EFFECTIVE_NAME, JOB_NAME)))
    written = re.compile(rf"({folders})/(?!({ours})$).*")
    if runs_dir.is_symlink():
        yield "runs", f"a link to {runs_dir.readlink()}"
    if not runs_dir.is_dir():
        return
    for entry in (*os.scandir(runs_dir), *files_below(runs_dir)):
        name = os.path.relpath(entry.path, runs_dir)
        if written.fullmatch(name) or _OF_RUNS.match(name) or f"runs/{name}" == _STATE_OF_THE_NIGHT:
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # a temporary file of a page that is written just now
            continue
        is_folder = stat.S_ISDIR(status.st_mode)  # its times change with what is in it, which has its own entries
        told = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        yield f"runs/{name}", "a folder" if is_folder else str(told)


def _bytes(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except OSError:
        return None


def _kept(path: Path) -> tuple[int, bytes] | None:
    try:
        return stat.S_IMODE(path.lstat().st_mode), read_file(path, _MAX_KEPT_BYTES)
    except OSError:
        return None


def digest(path: Path, max_bytes: int = _MAX_HASHED_BYTES) -> str:
    """Kind and content of whatever stands at `path`, as text; never waits for a pipe, never follows a link.

    Of a file of more than `max_bytes` its size and time only.
    """
    if path.is_symlink():
        return f"link to {path.readlink()}"
    try:
        status = path.lstat()
        return f"{status.st_mode & 0o777:o} {hashlib.sha256(read_file(path, max_bytes)).hexdigest()}"
    except OSError as error:
        is_big = error.errno == errno.EFBIG
        return f"{status.st_size} bytes of {status.st_mtime_ns}" if is_big else "absent, or no readable file"

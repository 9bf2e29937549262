"""Is the checkout as it was before an agent's process ran?

An agent runs as the same user as the harness, with the person's environment: no wall of the operating
system stands between it and this checkout. Nothing of its clone gets here but a checked train.toml and three
lines of text. Writing here, past the clone, is detected: git (HEAD, branches, index, configuration), every
tracked harness file, code and bytecode that Python would run beside or instead of them (freeze.py), uv.lock, the
measuring code and model, every record and submitted train.toml. surroundings.py watches the Python environment.
What is not detected: other untracked files, curves, logs and kept models in runs/, tags, and what else lies
outside this checkout.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nightshift.campaign.ledger import Ledger
from nightshift.errors import UsageError, listed
from nightshift.files import read_file, write_atomically
from nightshift.git.repo import CONFIG_NAME, Repo
from nightshift.guard.freeze import top_modules, untracked_code
from nightshift.rules import Rules

_MAX_HASHED_BYTES = 100_000_000  # a sparse file of a terabyte costs its writer nothing


@dataclass(frozen=True, slots=True)
class Checkout:
    """What is watched, and by what."""

    root: Path
    rules: Rules
    ledger: Ledger
    repo: Repo


@dataclass(frozen=True, slots=True)
class Seal:
    """The checkout at one moment: named parts with their state, and the two files that can be put back."""

    parts: Mapping[str, str]
    config: bytes | None  # train.toml; None: not there, or no regular file
    tsv: bytes | None


def take(checkout: Checkout) -> Seal:
    """The state of the checkout now. Raises EngineError when git does not answer."""
    head = checkout.repo.head()
    parts = dict(checkout.repo.state())
    parts["the measuring code or the shipped model"] = checkout.rules.hash(checkout.root)
    if head.commit is not None:
        tracked = checkout.repo.files_at(head.commit)
        free = (CONFIG_NAME, *(name for name in tracked if name.endswith(".md")))
        names = (name for name in tracked if name not in free and checkout.repo.differs(name, tracked[name]))
        parts |= dict.fromkeys((*names, *untracked_code(checkout.root, tracked, checkout.rules.frozen)), "changed")
    for path in (*top_modules(checkout.root), checkout.root / "uv.lock"):
        parts[path.relative_to(checkout.root).as_posix()] = digest(path)
    for number in checkout.ledger.numbers():
        for name in ("record.json", CONFIG_NAME):
            parts[f"runs/{number:04d}/{name}"] = digest(checkout.ledger.run_dir(number) / name)
    return Seal(parts, _bytes(checkout.root / CONFIG_NAME), _bytes(checkout.ledger.tsv_path))


def restore(before: Seal, checkout: Checkout) -> tuple[str, ...]:
    """Put train.toml and results.tsv back if they were touched; the notes that name it.

    Raises UsageError when anything else was touched: a person has to look at that.
    """
    after = take(checkout)
    names = sorted({name for name, _ in before.parts.items() ^ after.parts.items()})
    if names:
        raise UsageError(
            f"{listed(names)} changed in this checkout while the agent was at work in its clone",
            "Look at the change and undo it; then start the night again.",
        )
    notes = []
    if after.config != before.config and before.config is not None:
        write_atomically(checkout.root / CONFIG_NAME, before.config)
        notes.append("changed train.toml in the checkout itself: put back")
    if after.tsv != before.tsv:
        checkout.ledger.tsv_path.unlink(missing_ok=True)
        checkout.ledger.sync_tsv()
        notes.append("changed results.tsv in the checkout itself: rebuilt from the records")
    return tuple(notes)


def _bytes(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except OSError:
        return None


def digest(path: Path) -> str:
    """Kind and content of whatever stands at `path`, as text; never waits for a pipe, never follows a link."""
    if path.is_symlink():
        return f"link to {path.readlink()}"
    try:
        status = path.lstat()
        return f"{status.st_mode & 0o777:o} {hashlib.sha256(read_file(path, _MAX_HASHED_BYTES)).hexdigest()}"
    except OSError as error:
        is_big = error.errno == errno.EFBIG
        return f"{status.st_size} bytes of {status.st_mtime_ns}" if is_big else "absent, or no readable file"

"""The throw-away clone in which an agent works, and what it changed there beside train.toml.

It lies outside the checkout, in a folder of the temporary folder that is this user's alone, always at the
same place for one checkout: what a killed night left there is cleared by the next proposal.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.config.values import quoted, shorten
from nightshift.errors import EngineError, UsageError, listed
from nightshift.files import read_file, remove_tree
from nightshift.signals import unblocked

ANSWER_NAME = "hypothesis.txt"
EVIDENCE_NAME = "evidence"  # in bubblewrap it cannot be written to
_HISTORY = (".git/HEAD", ".git/refs", ".git/packed-refs")
_MAX_FILES = 20_000  # looked at; an agent may unpack anything
_MAX_BYTES = 100_000  # of a file that is read: sparse ones cost their writer nothing
_CLEAR_SECONDS = 120.0


class Clone:
    """The one clone of a checkout, in `folder`; `path` is where the agent works."""

    def __init__(self, repo: Repo, temporary: Path | None = None) -> None:
        """`temporary` replaces the system's temporary folder."""
        self._repo = repo
        base = (temporary or Path(tempfile.gettempdir())).resolve()
        if base.is_relative_to(repo.root.resolve()):
            raise UsageError(f"the temporary folder {base} lies in the checkout", "Set TMPDIR to another folder.")
        self._own = base / f"nightshift-{os.getuid()}"
        self.folder = self._own / hashlib.sha256(os.fsencode(repo.root.resolve())).hexdigest()[:12]
        self.path = self.folder / "clone"

    def open(self, source: bytes, evidence: Mapping[str, bytes] = MappingProxyType({})) -> dict[str, str]:
        """Clone the branch afresh and put `source` there as train.toml, and files to read; what every file is now."""
        self.make()
        self._repo.clone(self._repo.head(), self.path)
        (self.path / CONFIG_NAME).write_bytes(source)
        if evidence:
            remove_tree(self.path / EVIDENCE_NAME)  # a branch may have one
            (self.path / EVIDENCE_NAME).mkdir()
        for name, data in evidence.items():
            (self.path / EVIDENCE_NAME / name).write_bytes(data)
            (self.path / EVIDENCE_NAME / name).chmod(0o444)
        return self._listing()

    def make(self) -> None:
        """Make the folder afresh, for this user alone. Raises EngineError where somebody else has it."""
        self.clear()
        self._own.mkdir(mode=0o700, exist_ok=True)
        status = self._own.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o066:
            raise EngineError(f"{self._own} is not a folder of this user alone", "Remove it, or set TMPDIR.")
        self.folder.mkdir(mode=0o700)

    def changes(self, before: Mapping[str, str]) -> tuple[str, ...]:
        """What is not as `open` left it, beside train.toml and the answer: one note each for files and for git."""
        changed = {name for name, _ in before.items() ^ self._listing().items()} - {CONFIG_NAME, ANSWER_NAME}
        history = {name for name in changed if name.startswith(_HISTORY)}
        notes = []
        if not (self.path / ".git").is_dir():
            notes.append("deleted .git of its clone")
        elif history:
            notes.append("made commits or branches of its own in its clone: dropped")
        if files := sorted(changed - history):
            named = listed([shorten(quoted(name)[1:-1], 60) for name in files])
            notes.append(f"changed files other than train.toml: {named}: dropped")
        return tuple(notes)

    def clear(self) -> None:
        """Remove the clone, however it was left. Raises EngineError when something refuses to go."""
        if self.folder.is_symlink():  # chmod would follow it, to what the agent chose
            self.folder.unlink()
        if not os.path.lexists(self.folder):
            return
        with suppress(subprocess.TimeoutExpired), unblocked():  # millions of files
            chmod = ["chmod", "-R", "u+rwX", "--", str(self.folder)]
            subprocess.run(chmod, capture_output=True, check=False, timeout=_CLEAR_SECONDS)
            remove_tree(self.folder, _CLEAR_SECONDS)
        if os.path.lexists(self.folder):
            raise EngineError(f"{self.folder} cannot be removed", "Remove it by hand.")

    def _listing(self) -> dict[str, str]:
        """Relative name -> kind and content, of the files of the clone and of its git history."""
        found = {}
        for entry in _files_below(self.path):
            name = os.path.relpath(entry.path, self.path)
            if not name.startswith(".git/") or name.startswith(_HISTORY):
                found[name] = _digest(Path(entry.path))
            if len(found) >= _MAX_FILES:
                break
        return found


def _files_below(top: Path) -> Iterator[os.DirEntry[str]]:
    """All that is no folder, in a fixed order; without what lies in folders that cannot be read."""
    folders = [os.fspath(top)]
    while folders:  # os.walk recurses, and a tree that is deep enough ends it
        try:
            entries = sorted(os.scandir(folders.pop()), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                yield entry


def _digest(path: Path) -> str:
    """Kind and content of whatever stands at `path`, as text; never waits for a pipe, never follows a link.

    Of a file of more than _MAX_BYTES its size and time only.
    """
    if path.is_symlink():
        return f"link to {path.readlink()}"
    try:
        status = path.lstat()
        return f"{status.st_mode & 0o777:o} {hashlib.sha256(read_file(path, _MAX_BYTES)).hexdigest()}"
    except OSError as error:
        is_big = error.errno == errno.EFBIG
        return f"{status.st_size} bytes of {status.st_mtime_ns}" if is_big else "absent, or no readable file"

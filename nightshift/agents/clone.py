"""The throw-away clone in which an agent works, and what it changed there beside train.toml.

It lies outside the checkout, in a folder of the temporary folder that is this user's alone, always at the
same place for one checkout: what a killed night left there is cleared by the next proposal.
"""

import hashlib
import math
import os
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.config.values import quoted, shorten
from nightshift.errors import ConfigError, EngineError, UsageError, listed
from nightshift.files import MAX_BYTES, read_file, remove_tree
from nightshift.signals import unblocked

ANSWER_NAME = "hypothesis.txt"
EVIDENCE_NAME = "evidence"  # in bubblewrap it cannot be written to
_MAX_FILES = 50_000  # that an agent may add: it may unpack anything
_MAX_HASHED_BYTES = 100_000  # a larger file is compared by its size and time: a sparse file costs its writer nothing
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
        self._opened = dict[str, str]()  # what `open` left

    def open(self, source: bytes, evidence: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Clone the branch afresh and put `source` there as train.toml, and files to read."""
        self.make()
        self._repo.clone(self._repo.head(), self.path)
        (self.path / CONFIG_NAME).write_bytes(source)
        if evidence:
            remove_tree(self.path / EVIDENCE_NAME)  # a branch may have one
            (self.path / EVIDENCE_NAME).mkdir()
        for name, data in evidence.items():
            (self.path / EVIDENCE_NAME / name).write_bytes(data)
            (self.path / EVIDENCE_NAME / name).chmod(0o444)
        self._opened = self._listing()

    def make(self) -> None:
        """Make the folder afresh, for this user alone. Raises EngineError where somebody else has it."""
        self.clear()
        self._own.mkdir(mode=0o700, exist_ok=True)
        status = self._own.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o066:
            raise EngineError(f"{self._own} is not a folder of this user alone", "Remove it, or set TMPDIR.")
        self.folder.mkdir(mode=0o700)

    def changes(self) -> tuple[str, ...]:
        """Note which files are not as `open` left them, except train.toml, the answer and those of git.

        Raises:
            ConfigError: the clone cannot be read, so no proposal can be taken from it.
        """
        listing = self._listing(len(self._opened) + _MAX_FILES)
        for name in (CONFIG_NAME, ANSWER_NAME):  # other files stay here: `uv run` alone leaves a .venv full of links
            if name in listing and (problem := _problem((self.path / name).lstat())):
                raise _unreadable(name, problem)
        changed = {name for name, _ in self._opened.items() ^ listing.items()}
        files = [_shown(name) for name in sorted(changed - {CONFIG_NAME, ANSWER_NAME})]
        return (f"changed files other than train.toml: {listed(files)}: dropped",) if files else ()

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

    def _listing(self, max_files: float = math.inf) -> dict[str, str]:
        """Map the files of the clone, by relative name, to their content, as `_content` describes it.

        ConfigError for a folder that cannot be listed, or too many files.
        """
        listing, num_files, folders = dict[str, str](), 0, [os.fspath(self.path)]
        try:
            while folders:  # os.walk recurses, and a tree that is deep enough ends it
                folder = folders.pop()
                mode = os.lstat(folder).st_mode
                if not stat.S_ISDIR(mode) or not mode & stat.S_IRUSR:
                    raise _unreadable(self._name(folder), "is not a readable folder")
                with os.scandir(folder) as entries:
                    for entry in entries:
                        num_files += 1
                        if num_files > max_files:
                            raise _unreadable(".", f"has more than {_MAX_FILES:,} new files")
                        name, status = self._name(entry.path), entry.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(status.st_mode):
                            listing[name] = _content(entry.path, status)
                        elif name != ".git":
                            folders.append(entry.path)
        except OSError as error:
            name = self._name(error.filename)
            raise _unreadable(name, f"cannot be read: {error.strerror}") from None
        return listing

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self.path)


def _unreadable(name: str, problem: str) -> ConfigError:
    """The refusal of a proposal whose clone cannot be read because of the file or folder `name`."""
    fix = f"Leave {CONFIG_NAME}, {ANSWER_NAME} and few other regular files."
    return ConfigError(f"{_shown(name)} in the agent's clone {problem}".removeprefix(". in "), fix)


def _shown(name: str) -> str:
    return shorten(quoted(name)[1:-1], 60)


def _problem(status: os.stat_result) -> str:
    """Why a file cannot be read; "" if it can."""
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if not status.st_mode & stat.S_IRUSR:  # root could read it
        return f"has mode {stat.S_IMODE(status.st_mode):03o}"
    return f"has {status.st_size:,} bytes" if status.st_size > MAX_BYTES else ""


def _content(path: str, status: os.stat_result) -> str:
    """What differs when a file is changed; never waits for a pipe, never follows a link."""
    if stat.S_ISLNK(status.st_mode):
        return str(Path(path).readlink())
    if _problem(status) or status.st_size > _MAX_HASHED_BYTES:
        return f"{status.st_mode:o} {status.st_size} {status.st_mtime_ns}"
    return f"{status.st_mode:o} {hashlib.sha256(read_file(path, _MAX_HASHED_BYTES)).hexdigest()}"

"""The throw-away clone in which an agent works, and the files that the agent changed there.

The clone is in a private folder in the system's temporary folder. Its path is the same for every proposal of a
checkout, so that the next proposal removes the clone of a killed night.
"""

import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from nightshift.campaign.git import AGENT_CLONE_MARK, CONFIG_NAME, Repo
from nightshift.config.allowlist import quoted, shorten
from nightshift.errors import ConfigError, EngineError, UsageError, listed
from nightshift.files import remove_tree

ANSWER_NAME = "hypothesis.txt"
NOTES_NAME = "notes.md"  # for the agent's next call
LOGS_NAME = "logs"  # read-only in bubblewrap
_MAX_FILES = 50_000  # in a clone: an agent may unpack an archive
_CLEAR_SECONDS = 120.0


def proposal_files(num_proposals: int) -> list[tuple[str, str]]:
    """Return the names of the files of proposals: of each, the train.toml and the text with the hypothesis."""
    numbers = range(1, num_proposals + 1) if num_proposals > 1 else ()
    return [(CONFIG_NAME, ANSWER_NAME), *((f"proposal-{number}.toml", f"proposal-{number}.txt") for number in numbers)]


class Clone:
    """The clone of a checkout. `path`: the agent's working folder; `prompt`: the file with the prompt."""

    def __init__(self, repo: Repo, temporary: Path | None = None) -> None:
        """`temporary`: the temporary folder, if not the system's."""
        self._repo = repo
        base = (temporary or Path(tempfile.gettempdir())).resolve()
        if base.is_relative_to(repo.root.resolve()):
            raise UsageError(f"the temporary folder {base} is inside the checkout", "Set TMPDIR to another folder.")
        self._private = base / f"nightshift-{os.getuid()}"
        self.folder = self._private / hashlib.sha256(os.fsencode(repo.root.resolve())).hexdigest()[:12]
        self.path, self.prompt = self.folder / "clone", self.folder / "prompt.txt"
        self._opened = dict[str, str]()  # the files after `open`

    def open(self, source: bytes, logs: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Clone the branch, with `source` as train.toml and the read-only files `logs`."""
        self.make()
        self._repo.clone(self._repo.head(), self.path)
        (self.path / ".git" / AGENT_CLONE_MARK).touch()  # run.py and night refuse to work here
        (self.path / CONFIG_NAME).write_bytes(source)
        (self.path / NOTES_NAME).unlink(missing_ok=True)  # the branch may contain one
        if logs:
            remove_tree(self.path / LOGS_NAME)
            (self.path / LOGS_NAME).mkdir()
        for name, data in logs.items():
            (self.path / LOGS_NAME / name).write_bytes(data)
            (self.path / LOGS_NAME / name).chmod(0o444)
        self._opened = self._listing()

    def make(self) -> None:
        """Create the empty private folder. Raises EngineError if another user owns it."""
        self.clear()
        make_private(self._private)
        self.folder.mkdir(mode=0o700)

    def changes(self, num_proposals: int = 1) -> tuple[str, ...]:
        """Return a note on the files that the agent changed, except its proposals, notes.md and .git.

        Raises:
            ConfigError: the clone cannot be listed, so that no proposal can be read.
        """
        changed = {name for name, _ in self._opened.items() ^ self._listing().items()}
        changed -= {NOTES_NAME}.union(*proposal_files(num_proposals))
        files = [_shown(name) for name in sorted(changed)]
        return (f"changed files other than train.toml: {listed(files)}: dropped",) if files else ()

    def clear(self) -> None:
        """Remove the clone. Raises EngineError if anything is left."""
        if self.folder.is_symlink():  # chmod would follow a link of the agent's
            self.folder.unlink()
        if not os.path.lexists(self.folder):
            return
        with suppress(subprocess.TimeoutExpired):  # millions of files
            chmod = ["chmod", "-R", "u+rwX", "--", str(self.folder)]
            subprocess.run(chmod, capture_output=True, check=False, timeout=_CLEAR_SECONDS)
            remove_tree(self.folder, _CLEAR_SECONDS)
        if os.path.lexists(self.folder):
            raise EngineError(f"{self.folder} cannot be removed", "Remove it by hand.")

    def _listing(self) -> dict[str, str]:
        """Return mode, size and time of each file of the clone, by relative name."""
        listing, folders = dict[str, str](), [os.fspath(self.path)]
        try:
            if self.path.is_symlink():
                raise _unreadable(".", "is a symbolic link")
            while folders:  # os.walk recurses, so a deep tree would end it
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        name, status = os.path.relpath(entry.path, self.path), entry.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(status.st_mode):
                            listing[name] = f"{status.st_mode:o} {status.st_size} {status.st_mtime_ns}"
                        elif name != ".git":
                            folders.append(entry.path)
                        if len(listing) + len(folders) > _MAX_FILES:
                            raise _unreadable(".", f"has more than {_MAX_FILES:,} files")
        except OSError as error:
            name = os.path.relpath(error.filename, self.path)
            raise _unreadable(name, f"cannot be read: {error.strerror}") from None
        return listing


def make_private(folder: Path) -> None:
    """Create a folder that only this user can list and write to. Raises EngineError if an existing folder differs."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o066:
        raise EngineError(f"{folder} is not a private folder of this user", "Remove it, or set TMPDIR.")


def _unreadable(name: str, problem: str) -> ConfigError:
    fix = f"Write {CONFIG_NAME}, {ANSWER_NAME} and few other files."
    return ConfigError(f"{_shown(name)} in the agent's clone {problem}".removeprefix(". in "), fix)


def _shown(name: str) -> str:
    return shorten(quoted(name)[1:-1], 60)

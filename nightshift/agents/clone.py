"""The throw-away clone in which an agent works. Its path in the temporary folder is the same for every proposal of a
checkout, so that the next proposal removes the clone of a killed night.
"""

import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nightshift.campaign.git import AGENT_CLONE_MARK, CONFIG_NAME, Repo
from nightshift.errors import EngineError, UsageError
from nightshift.files import remove_tree

ANSWER_NAME = "hypothesis.txt"
NOTES_NAME = "notes.md"  # for the agent's next call
LOGS_NAME = "logs"  # read-only in bubblewrap


def proposal_files(num_proposals: int) -> list[tuple[str, str]]:
    """Return the names of the files of proposals: of each, the train.toml and the text with the hypothesis. If several
    are wanted, an agent may also write the four of a 2 x 2 grid."""
    numbers = range(1, max(num_proposals, 4) + 1) if num_proposals > 1 else ()
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

    def open(self, source: bytes, logs: Mapping[str, bytes]) -> None:
        """Clone the branch, with `source` as train.toml and the read-only files `logs`."""
        self.make()
        self._repo.clone(self._repo.head(), self.path)
        (self.path / ".git" / AGENT_CLONE_MARK).touch()  # run.py and night refuse to work here
        (self.path / CONFIG_NAME).write_bytes(source)
        (self.path / NOTES_NAME).unlink(missing_ok=True)  # the branch may contain one
        folder = self.path / LOGS_NAME
        if logs:
            remove_tree(folder)
            folder.mkdir()
        for name, data in logs.items():
            (folder / name).write_bytes(data)
            (folder / name).chmod(0o444)

    def make(self) -> None:
        """Create the empty private folder. Raises EngineError if another user owns it."""
        self.clear()
        make_private(self._private)
        self.folder.mkdir(mode=0o700)

    def clear(self) -> None:
        """Remove the clone, also folders that the agent made read-only."""
        if self.folder.is_dir() and not self.folder.is_symlink():
            subprocess.run(["chmod", "-R", "u+rwX", "--", self.folder], capture_output=True, check=False)
        remove_tree(self.folder)


def make_private(folder: Path) -> None:
    """Create a folder that only this user can list and write to. Raises EngineError if an existing folder differs."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o066:
        raise EngineError(f"{folder} is not a private folder of this user", "Remove it, or set TMPDIR.")

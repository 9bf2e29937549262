"""What git says, and what is done to it. Only train.toml is ever touched; nothing is reset or cleaned.

Commits are built from plumbing (blob, tree, commit, compare-and-swap of the branch), so that the
submitted bytes are committed whatever else is staged or edited meanwhile, and no hook, filter,
signature or editor of the user runs at 3 a.m. No git here reads the person's configuration, which an agent could have
written, but for a name to commit under; and of git's objects only those are believed whose bytes have the hash that
they are called by.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from subprocess import PIPE
from typing import NamedTuple

from nightshift.errors import EngineError, UsageError
from nightshift.files import write_atomically
from nightshift.signals import unblocked
from nightshift.waiting import waiting

FOLDER, SUBMODULE = "40000", "160000"  # modes of what is no file in a tree


class Blob(NamedTuple):
    """An entry of a tree: `mode` 120000 is a link, `id` hashes its bytes."""

    mode: str
    id: str


def object_id(kind: bytes, data: bytes, width: int) -> str:
    """The name that git gives to such bytes: hex of `width` digits, 40 for sha1 and 64 for sha256."""
    digest = hashlib.sha1 if width == 40 else hashlib.sha256
    return digest(b"%s %d\0" % (kind, len(data)) + data).hexdigest()


def entries_of(tree: bytes, width: int) -> dict[str, Blob]:
    """What a tree object holds, by name: `mode name NUL id` each; an id has `width` hex digits, half as many bytes."""
    found = {}
    while tree:
        entry, _, rest = tree.partition(b"\0")
        mode, _, name = entry.partition(b" ")
        found[os.fsdecode(name)] = Blob(mode.decode(), rest[: width // 2].hex())
        tree = rest[width // 2 :]
    return found


CAMPAIGN_PREFIX = "autoresearch/"
CONFIG_NAME = "train.toml"
_TIMEOUT_SECONDS = 60.0
_GRACE_SECONDS = 5.0
LOCK_SECONDS = 60.0  # a git that works holds its lock files for less
_LOCK_POLL_SECONDS = 0.2
_LOCK_FILE = re.compile(rb"Unable to create '(.+\.lock)': File exists")
_CLONE_AGAIN = "Clone the repository again from a place that you trust."
_SAFE_OPTIONS = (
    *("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false", "-c", "core.fsmonitor=false"),
    *("-c", "core.pager=cat", "-c", "gc.auto=0", "-c", "core.quotePath=false"),
)
# HOME for a git older than 2.32, which does not know GIT_CONFIG_GLOBAL.
_NO_CONFIGURATION = {
    "GIT_CONFIG_GLOBAL": str(Path(__file__).with_name("git_config")),
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "HOME": os.devnull,
    "XDG_CONFIG_HOME": os.devnull,
}


@dataclass(frozen=True, slots=True)
class Head:
    """Where the checkout stands. `branch` is "" when HEAD is detached; `commit` None before the first commit."""

    branch: str
    commit: str | None

    @property
    def is_campaign(self) -> bool:
        """True on a branch `autoresearch/<tag>`: the only place where results are settled in git."""
        return self.branch.startswith(CAMPAIGN_PREFIX)


class GitLockedError(EngineError):
    """A lock file of git did not go away. `is_known`: this process had waited for the same file before."""

    def __init__(self, path: Path, is_known: bool) -> None:
        cause = f"git could not write: its lock file {path} was {_age(path)} old and still there"
        super().__init__(cause, "End the git that holds it; if none runs, delete the file.")
        self.is_known = is_known


class Repo:
    """The git repository whose top is `root`; works, and knows nothing, where there is no git at all.

    A git that meets a lock file is started again for LOCK_SECONDS, once for each lock file; then GitLockedError.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._waited_for = set[tuple[Path, int]]()  # lock files, with their times

    def head(self) -> Head:
        """Branch and commit now; ("", None) outside a git checkout."""
        if _program() is None:
            return Head("", None)
        # Not --short, which says heads/<branch> where a tag has the branch's name.
        branch = self._git("symbolic-ref", "--quiet", "HEAD", check=False).strip().removeprefix("refs/heads/")
        commit = self._git("rev-parse", "--verify", "--quiet", "HEAD", check=False).strip()
        return Head(branch, commit or None)

    def config_at(self, commit: str) -> bytes | None:
        """Bytes of train.toml in `commit`; None if it has none."""
        return self.file_at(commit, CONFIG_NAME)

    def file_at(self, commit: str, name: str) -> bytes | None:
        """Bytes of a file at the top of `commit`; None if it has none. UsageError for a forged object."""
        found = (self._top(commit) or {}).get(name)
        return None if found is None or found.mode in (FOLDER, SUBMODULE) else self._objects([found.id])[0]

    def files_at(self, commit: str) -> dict[str, Blob]:
        """The files that `commit` holds, by their names relative to the root. UsageError for a forged object."""
        entries = self._top(commit)
        if entries is None:
            raise UsageError(f"git has no readable commit {commit[:12]}", _CLONE_AGAIN)
        if CONFIG_NAME not in entries:
            raise UsageError(
                f"{commit[:7]} holds no {CONFIG_NAME} at its top", "Commit it, in a repository of its own."
            )
        found = dict[str, Blob]()
        while entries:
            folders = {name: blob.id for name, blob in entries.items() if blob.mode == FOLDER}
            found |= {name: blob for name, blob in entries.items() if blob.mode not in (FOLDER, SUBMODULE)}
            trees = zip(folders, self._trees([*folders.values()]), strict=True)
            entries = {f"{folder}/{name}": blob for folder, tree in trees for name, blob in tree.items()}
        return found

    def differs(self, name: str, blob: Blob) -> bool:
        """True if the working file is another one, is gone, or lies below a link to another folder.

        Hashed here, below the root as Python sees it, not by `git diff`: its answer can be bent by index flags,
        attributes, filters and core.worktree, which whoever edits the harness could set too.
        """
        path = self.root / name
        folders = [self.root / folder for folder in PurePath(name).parents if folder.name]
        try:
            if any(map(Path.is_symlink, folders)):
                return True
            if path.is_symlink() != (blob.mode == "120000") or not (path.is_symlink() or path.is_file()):
                return True
            data = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        except OSError:
            return True
        return object_id(b"blob", data, len(blob.id)) != blob.id

    def keep(self, head: Head, candidate: bytes, message: str) -> tuple[str, str]:
        """Commit the candidate's bytes on the campaign branch. Returns (commit, what was done).

        An agent that committed first is adopted: no second commit. UsageError where the checkout left `head`'s branch.
        """
        now = self._commit_on(head.branch)
        if self.config_at(now) == candidate:
            return now, f"adopted commit {now[:7]}, which already holds the candidate"
        commit = self._commit(head.branch, now, candidate, message)
        return commit, f"committed {commit[:7]} on {head.branch}"

    def discard(self, head: Head, candidate: bytes, incumbent: bytes, message: str, before: bytes | None = None) -> str:
        """Put the incumbent back, in the working file and on the branch; what was done.

        The branch needs no commit unless the agent committed the candidate, or the incumbent is an
        earlier one than that `before`, which the branch holds. UsageError as `keep`.
        """
        now, done = self._commit_on(head.branch), []
        held = self.config_at(now)
        if held is not None and held != incumbent and held in (candidate, before):
            commit = self._commit(head.branch, now, incumbent, message)
            done.append(f"committed {commit[:7]}, which restores the incumbent's train.toml")
        path = self.root / CONFIG_NAME
        there = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        if there == candidate:
            write_atomically(path, incumbent)
            done.append("restored the incumbent's train.toml")
        elif there == incumbent:  # by a harness that was killed here, or by the agent
            done.append("train.toml is the incumbent's already")
        else:
            done.append("left train.toml alone: it was edited while the experiment ran")
        return "; ".join(done)

    def start_campaign(self, tag: str) -> Head:
        """Create `autoresearch/<tag>` (`-2`, `-3`, ... where it is taken) at HEAD and stand on it; no file changes."""
        commit = self.head().commit
        if commit is None:
            raise UsageError(f"{self.root} has no commit to start a campaign from", "Commit the checkout first.")
        branch, number = f"{CAMPAIGN_PREFIX}{tag}", 1
        while self._run("show-ref", "--verify", "--quiet", f"refs/heads/{branch}").returncode == 0:
            number += 1
            branch = f"{CAMPAIGN_PREFIX}{tag}-{number}"
        self._git("update-ref", "-m", "nightshift", f"refs/heads/{branch}", commit, "")
        self._git("symbolic-ref", "-m", "nightshift", "HEAD", f"refs/heads/{branch}")
        return Head(branch, commit)

    def clone(self, head: Head, folder: Path) -> None:
        """Copy the branch into `folder`, with no object, remote or reflog in common."""
        options = ("--quiet", "--no-local", "--single-branch", "--no-tags", "--template=", "--branch", head.branch)
        # From outside: the configuration of this checkout could lead the clone to another place.
        git = Repo(folder.parent)._git
        git("clone", *options, "-c", "core.logAllRefUpdates=false", "--", str(self.root.resolve()), str(folder))
        Repo(folder)._git("remote", "remove", "origin")

    def state(self) -> dict[str, str]:
        """HEAD, branches, index and configuration as text: what must be as it was after a stranger was at work.

        Editors fetch by themselves and take notes on branches: remote branches, tags and `branch.*` do not count.
        """
        configuration = self._git("config", "--local", "--list").splitlines()
        return {
            "HEAD": self._git("rev-parse", "--symbolic-full-name", "HEAD"),
            "branches": self._git("for-each-ref", "--format=%(refname) %(objectname)", "refs/heads"),
            "the index": self._git("ls-files", "--stage", "-v"),
            "the git configuration": "\n".join(line for line in configuration if not line.startswith("branch.")),
        }

    def folders(self) -> set[Path]:
        """Where git keeps what is its own: one folder, and another one in a linked work tree."""
        names = self._git("rev-parse", "--absolute-git-dir", "--git-common-dir").splitlines()
        return {(self.root / name).resolve() for name in names}

    def _commit_on(self, branch: str) -> str:
        """The commit that the checkout stands on. UsageError if it is no longer where the experiment began."""
        now = self.head()
        if now.branch != branch or now.commit is None:
            raise UsageError(f"the checkout moved from {branch} to {now.branch or 'a detached HEAD'}")
        return now.commit

    def _commit(self, branch: str, parent: str, config: bytes, message: str) -> str:
        """One commit on top of `parent` that changes train.toml only, and the same in the index.

        Built from a tree, without an index: a temporary index would outlive a harness that is killed here.
        """
        blob = self._git("hash-object", "-w", "--stdin", "--no-filters", stdin=config).strip()
        entries = {**(self._top(parent) or {}), CONFIG_NAME: Blob("100644", blob)}
        kinds = {FOLDER: "tree", SUBMODULE: "commit"}
        listed = (f"{b.mode} {kinds.get(b.mode, 'blob')} {b.id}\t{name}\0" for name, b in entries.items())
        tree = self._git("mktree", "-z", stdin=os.fsencode("".join(listed))).strip()
        options = (*self._identity(), "commit-tree", tree, "-p", parent, "-F", "-")
        commit = self._git(*options, stdin=message.encode()).strip()
        # First the index: with an older one, the user's next commit would take the change back. What else than a lock
        # is wrong with an index is not worth failing a verdict.
        self._run("update-index", "--add", "--cacheinfo", f"100644,{blob},{CONFIG_NAME}")
        # Compare-and-swap: a commit that somebody made this instant is not lost.
        self._git("update-ref", "-m", "nightshift", f"refs/heads/{branch}", commit, parent)
        return commit

    def _identity(self) -> list[str]:
        """Options that name the author: what the person configured for this checkout or for all, else our own."""
        found = {"user.name": "Nightshift", "user.email": "nightshift@localhost"}
        for key in found:
            found[key] = self._git("config", "--get", key, check=False, is_personal=True).strip() or found[key]
        return [word for key, value in found.items() for word in ("-c", f"{key}={value}")]

    def _top(self, commit: str) -> dict[str, Blob] | None:
        """What lies at the top of a commit, folders too; None where there is no such commit."""
        name = self._git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}", check=False).strip()
        return self._trees([self._objects([name])[0].split()[1].decode()])[0] if name else None

    def _trees(self, names: Sequence[str]) -> list[dict[str, Blob]]:
        return [entries_of(tree, len(name)) for name, tree in zip(names, self._objects(names), strict=True)]

    def _objects(self, names: Sequence[str]) -> list[bytes]:
        """Their contents. UsageError for one whose bytes have another hash: git itself does not look at all of them."""
        answer, at, found = self._run("cat-file", "--batch", stdin="\n".join(names).encode()).stdout, 0, []
        for name in names:
            line_end = answer.find(b"\n", at)
            header = answer[at:line_end].split()
            if len(header) != 3:
                raise EngineError(
                    f"git has no object {name}", "Fetch it: a checkout must hold the whole of its branch."
                )
            at = line_end + 1 + int(header[2])
            found.append(answer[line_end + 1 : at])
            at += 1
            if object_id(header[1], found[-1], len(name)) != name:
                raise UsageError(
                    f"git's object {name[:12]} holds other bytes than its name says: it was overwritten", _CLONE_AGAIN
                )
        return found

    def _git(self, *arguments: str, stdin: bytes = b"", check: bool = True, is_personal: bool = False) -> str:
        result = self._run(*arguments, stdin=stdin, is_personal=is_personal)
        if check and result.returncode != 0:
            command = next((a for a in arguments if not a.startswith("-") and "=" not in a), arguments[0])
            reason = result.stderr.decode(errors="replace").strip().splitlines()
            raise EngineError(f"git {command} failed: {reason[-1] if reason else result.returncode}")
        return result.stdout.decode(errors="surrogateescape")

    def _run(
        self, *arguments: str, stdin: bytes = b"", is_personal: bool = False
    ) -> subprocess.CompletedProcess[bytes]:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            result = self._run_once(*arguments, stdin=stdin, is_personal=is_personal)
            met = _LOCK_FILE.search(result.stderr) if result.returncode else None
            if met is None:
                return result
            self._wait_for_lock(self.root / os.fsdecode(met[1]), deadline)

    def _wait_for_lock(self, path: Path, deadline: float) -> None:
        """Return when the lock file is gone or another one. GitLockedError at the deadline on the monotonic clock."""
        lock = path, _modified(path)
        is_known = lock in self._waited_for
        self._waited_for.add(lock)  # before the wait: after Ctrl-C nobody waits again
        with waiting(lambda: f"waiting for git's lock file {path} ({_age(path)} old)", LOCK_SECONDS):
            while not is_known and time.monotonic() < deadline:
                time.sleep(_LOCK_POLL_SECONDS)
                if _modified(path) != lock[1]:
                    return
        raise GitLockedError(path, is_known)

    def _run_once(self, *arguments: str, stdin: bytes, is_personal: bool) -> subprocess.CompletedProcess[bytes]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        clean |= {"GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true", "LC_ALL": "C"}
        command = [_program() or "git", "--no-optional-locks", "--no-replace-objects", *_SAFE_OPTIONS, *arguments]
        try:
            with unblocked():
                process = subprocess.Popen(
                    command,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=PIPE,
                    cwd=self.root,
                    env=clean if is_personal else clean | _NO_CONFIGURATION,
                    start_new_session=True,
                )
            with process:
                try:
                    output = process.communicate(stdin, _TIMEOUT_SECONDS)
                except BaseException:  # also of a signal: git removes its lock files when it is asked to end
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_GRACE_SECONDS)
                    raise
                finally:  # with whatever it started, should there be a way for it to
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
            return subprocess.CompletedProcess(command, process.returncode, *output)
        except subprocess.TimeoutExpired:
            raise EngineError(f"git {arguments[0]} did not answer in {_TIMEOUT_SECONDS:g} s") from None
        except (OSError, ValueError) as error:  # a NUL in an argument, which a record brought
            reason = error.strerror if isinstance(error, OSError) else error
            raise EngineError(f"git {arguments[0]} cannot be started: {reason}") from None


def _modified(path: Path) -> int:
    """When a file was changed last, in nanoseconds since 1970; 0 if it is gone."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _age(path: Path) -> str:
    """How long ago a file was changed last: `34 s`, `12 min`, `5 h`, `3 days`."""
    seconds = max(time.time() - _modified(path) / 1e9, 0.0)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _program() -> str | None:
    """The system's own git where there is one: PATH is the caller's, and the caller may be the agent."""
    return (shutil.which("git", path=os.defpath) if sys.platform == "linux" else None) or shutil.which("git")

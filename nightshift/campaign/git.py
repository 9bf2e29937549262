"""The only module that calls git. It commits files at the top of the checkout by name, and never resets or cleans.

Commits are built from plumbing (blob, tree, commit, compare-and-swap of the branch), so that the submitted bytes are
committed whatever else is staged, and no hook, filter, signature or editor runs. git does not read the user's
configuration, which an agent could have written, except for the author's name.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from subprocess import PIPE
from typing import Any, NamedTuple

from nightshift.errors import EngineError, UsageError

CAMPAIGN_PREFIX = "autoresearch/"
CONFIG_NAME = "train.toml"
EXPERIMENT_TRAILER = "Nightshift-Experiment"  # in the messages of a campaign's commits
_TIMEOUT_SECONDS = 60.0
_GRACE_SECONDS = 5.0
LOCK_SECONDS = 5.0  # a git that works holds its lock files for less
_LOCK_POLL_SECONDS = 0.2
_LOCK_FILE = re.compile(r"Unable to create '(.+\.lock)': File exists")
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


class Blob(NamedTuple):
    """A file of a commit: `mode` 120000 is a link, `id` hashes its bytes."""

    mode: str
    id: str


class ConfigCommit(NamedTuple):
    """A commit that changes train.toml, with the file's bytes before and after (empty without a file)."""

    id: str
    subject: str
    before: bytes
    after: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The checkout's branch and commit. `branch` is "" if HEAD is detached; `commit` None before the first commit."""

    branch: str
    commit: str | None

    @property
    def is_campaign(self) -> bool:
        """True on a branch `autoresearch/<tag>`: decisions are committed only there."""
        return self.branch.startswith(CAMPAIGN_PREFIX)


class Repo:
    """The git repository whose top is `root`. A git that meets a lock file is started again for LOCK_SECONDS."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def head(self) -> Head:
        """Return branch and commit; ("", None) outside a git checkout."""
        if _program() is None:
            return Head("", None)
        command = ("rev-parse", "--quiet", "--revs-only", "HEAD", "--symbolic-full-name", "HEAD")
        commit, _, ref = self._git(*command, check=False).strip().partition("\n")
        if not ref:  # no commit yet, or a branch or tag is called HEAD
            # Not --short, which prints heads/<branch> if a tag has the branch's name.
            ref = self._git("symbolic-ref", "--quiet", "HEAD", check=False).strip()
        return Head("" if ref == "HEAD" else ref.removeprefix("refs/heads/"), commit or None)

    def config_at(self, commit: str) -> bytes | None:
        """Return the bytes of train.toml in `commit`; None if it has none."""
        blob = self._run("cat-file", "blob", f"{commit or 'no commit'}:{CONFIG_NAME}")  # `:NAME` is in the index
        return blob.stdout if blob.returncode == 0 else None

    def files_at(self, commit: str) -> dict[str, Blob]:
        """Return the files of `commit` by name, relative to the root. UsageError if git cannot read the commit."""
        files = dict[str, Blob]()
        listed = self._run("ls-tree", "-r", "-z", "--full-tree", commit)
        if listed.returncode != 0:
            fix = "Fetch it: a checkout must hold the whole of its branch."
            raise UsageError(f"git has no readable commit {commit[:12]}", fix)
        for entry in os.fsdecode(listed.stdout).split("\0")[:-1]:
            about, _, path = entry.partition("\t")
            mode, kind, name = about.split()
            if kind == "blob":  # no submodule
                files[path] = Blob(mode, name)
        if CONFIG_NAME not in files:
            fix = "Commit it, in a repository of its own."
            raise UsageError(f"{commit[:7]} holds no {CONFIG_NAME} at its top", fix)
        return files

    def files(self) -> list[str]:
        """Return the names of the files here, tracked or not, without those that git ignores."""
        listed = self._git("ls-files", "--cached", "--others", "--exclude-standard", "-z")
        return [name for name in listed.split("\0") if name]

    def differs(self, name: str, blob: Blob) -> bool:
        """Return True if the working file has other bytes, is gone, or lies below a link to another folder.

        Not `git diff`: index flags, attributes, filters and core.worktree can change its answer.
        """
        path, is_link = self.root / name, blob.mode == "120000"
        try:
            is_moved = any((self.root / folder).is_symlink() for folder in PurePath(name).parents if folder.name)
            if is_moved or path.is_symlink() != is_link or not (is_link or path.is_file()):
                return True
            data = os.fsencode(path.readlink()) if is_link else path.read_bytes()
        except OSError:
            return True
        digest = hashlib.sha1 if len(blob.id) == 40 else hashlib.sha256
        return digest(b"blob %d\0" % len(data) + data).hexdigest() != blob.id

    def commit_files(self, head: Head, files: Mapping[str, bytes], message: str) -> Head:
        """Commit files at the top of the checkout on `head`; return the new head. UsageError if the branch moved."""
        parent = self._commit_on(head.branch)
        if parent != head.commit:
            cause = f"{head.branch} moved to {parent[:7]} while {', '.join(files)} was committed"
            raise UsageError(cause, "Run it again.")
        write_blob = ("hash-object", "-w", "--stdin", "--no-filters")
        blobs = {name: self._git(*write_blob, stdin=data).strip() for name, data in files.items()}
        listed = self._git("ls-tree", "-z", "--full-tree", parent).split("\0")[:-1]
        entries = [entry for entry in listed if entry.partition("\t")[2] not in blobs]
        entries += [f"100644 blob {blob}\t{name}" for name, blob in blobs.items()]
        tree = self._git("mktree", "-z", stdin=os.fsencode("".join(f"{entry}\0" for entry in entries))).strip()
        identity = []  # the author: what the user configured, else Nightshift
        for key, default in (("user.name", "Nightshift"), ("user.email", "nightshift@localhost")):
            configured = self._git("config", "--get", key, check=False, is_personal=True).strip()
            identity += ["-c", f"{key}={configured or default}"]
        commit = self._git(*identity, "commit-tree", tree, "-p", parent, "-F", "-", stdin=message.encode()).strip()
        # The index first: with the old one, the user's next commit would revert this commit. A damaged index fails no
        # verdict.
        for name, blob in blobs.items():
            self._run("update-index", "--add", "--cacheinfo", f"100644,{blob},{name}")
        # Compare-and-swap: a commit that somebody makes at this moment is not lost.
        self._git("update-ref", "-m", "nightshift", f"refs/heads/{head.branch}", commit, parent)
        return Head(head.branch, commit)

    def config_history(self, head: Head) -> list[ConfigCommit]:
        """Return the commits after `head.commit` that change train.toml, oldest first, a merge as one commit. Empty if
        HEAD does not descend from `head.commit` by first parents (reset or rebased)."""
        since, tip = head.commit, self._commit_on(head.branch)
        if since is None or since == tip:
            return []
        options = ("--parents", "--first-parent", "--reverse", "--format=%s")
        lines = self._git("rev-list", *options, f"{since}..{tip}").split("\n")[:-1]
        commits = [line.removeprefix("commit ").split() for line in lines[::2]]
        if not commits or commits[0][1:2] != [since]:
            return []
        history, before = list[ConfigCommit](), self.config_at(since) or b""
        for (id, *_), subject in zip(commits, lines[1::2], strict=True):
            after = self.config_at(id) or b""
            if after != before:
                history.append(ConfigCommit(id, subject, before, after))
            before = after
        return history

    def last_experiment(self) -> int:
        """Return the highest experiment number in the trailers of the branch's commits; 0 if no commit has one."""
        lines = self._git("rev-list", f"--format=%(trailers:key={EXPERIMENT_TRAILER},valueonly)", "HEAD", check=False)
        return max((int(line) for line in lines.splitlines() if re.fullmatch("[0-9]{4,9}", line)), default=0)

    def start_campaign(self, tag: str) -> Head:
        """Create `autoresearch/<tag>` (or `-2`, `-3`, ... if it exists) at HEAD and check it out; no file changes."""
        commit = self.head().commit
        if commit is None:
            raise UsageError(f"{self.root} has no commit to start a campaign from", "Commit the checkout first.")
        taken = self._git("for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads/autoresearch").splitlines()
        if "autoresearch" in taken:
            cause = f"git has a branch autoresearch, so it cannot make {CAMPAIGN_PREFIX}{tag}"
            raise UsageError(cause, "Rename it: git branch -m autoresearch NEW-NAME.")
        branch, number = f"{CAMPAIGN_PREFIX}{tag}", 1
        while branch in taken:
            number += 1
            branch = f"{CAMPAIGN_PREFIX}{tag}-{number}"
        self._git("update-ref", "-m", "nightshift", f"refs/heads/{branch}", commit, "")
        self._git("symbolic-ref", "-m", "nightshift", "HEAD", f"refs/heads/{branch}")
        return Head(branch, commit)

    def clone(self, head: Head, folder: Path) -> None:
        """Copy the branch into `folder`, without a common object, remote or reflog."""
        options = ("--quiet", "--no-local", "--single-branch", "--no-tags", "--template=", "--branch", head.branch)
        # From outside: the configuration of this checkout could lead the clone to another place.
        git = Repo(folder.parent)._git
        git("clone", *options, "-c", "core.logAllRefUpdates=false", "--", str(self.root.resolve()), str(folder))
        Repo(folder)._git("remote", "remove", "origin")

    def _commit_on(self, branch: str) -> str:
        """Return the commit that is checked out. UsageError if another branch is checked out."""
        now = self.head()
        if now.branch != branch or now.commit is None:
            raise UsageError(f"the checkout moved from {branch} to {now.branch or 'a detached HEAD'}")
        return now.commit

    def _git(self, *arguments: str, check: bool = True, **options: Any) -> str:
        """Return the output of a git command. EngineError if it fails, unless `check` is False."""
        result = self._run(*arguments, **options)
        if check and result.returncode != 0:
            command = next((a for a in arguments if not a.startswith("-") and "=" not in a), arguments[0])
            reason = result.stderr.decode(errors="replace").strip().splitlines()
            raise EngineError(f"git {command} failed: {reason[-1] if reason else result.returncode}")
        return result.stdout.decode(errors="surrogateescape")

    def _run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run git, again while a lock file is in the way."""
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            result = self._run_once(*arguments, **options)
            lock = _LOCK_FILE.search(os.fsdecode(result.stderr)) if result.returncode else None
            if lock is None:
                return result
            if time.monotonic() >= deadline:
                cause = f"git could not write: its lock file {self.root / lock[1]} is still there"
                raise EngineError(cause, "End the git that holds it; if none runs, delete the file.")
            time.sleep(_LOCK_POLL_SECONDS)

    def _run_once(
        self, *arguments: str, stdin: bytes = b"", is_personal: bool = False
    ) -> subprocess.CompletedProcess[bytes]:
        """Run git once, with the user's configuration if `is_personal`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= {"GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true", "LC_ALL": "C"}
        environment |= {} if is_personal else _NO_CONFIGURATION
        command = [_program() or "git", "--no-optional-locks", "--no-replace-objects", *_SAFE_OPTIONS, *arguments]
        try:
            process = subprocess.Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=self.root, env=environment, start_new_session=True
            )
            with process:
                try:
                    output = process.communicate(stdin, _TIMEOUT_SECONDS)
                except BaseException:  # also of a signal: git removes its lock files when it is asked to end
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_GRACE_SECONDS)
                    raise
                finally:  # with its child processes
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
            return subprocess.CompletedProcess(command, process.returncode, *output)
        except subprocess.TimeoutExpired:
            raise EngineError(f"git {arguments[0]} did not answer in {_TIMEOUT_SECONDS:g} s") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
            reason = error.strerror if isinstance(error, OSError) else error
            raise EngineError(f"git {arguments[0]} cannot be started: {reason}") from None


def _program() -> str | None:
    """Return the system's own git if there is one: the agent may have set PATH."""
    return (shutil.which("git", path=os.defpath) if sys.platform == "linux" else None) or shutil.which("git")

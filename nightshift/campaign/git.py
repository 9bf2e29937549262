"""The only module that calls git. Plumbing commands make the commits, so exactly the given bytes are committed, and no
hook, filter, signature or editor runs. An agent could have written the user's configuration, so git reads only the
author's name from it. Only `switch` runs filters."""

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path, PurePath
from subprocess import PIPE
from typing import Any, NamedTuple

from nightshift.errors import EngineError, UsageError

CAMPAIGN_PREFIX = "autoresearch/"
START_SUBJECT = "Start campaign: "  # subject of the commit with the files that were not committed at the start
CONFIG_NAME = "train.toml"
AGENT_CLONE_MARK = "nightshift-agent-clone"  # a file in the .git of the clone in which an agent works
EXPERIMENT_TRAILER = "Nightshift-Experiment"  # in the messages of a campaign's commits
_LINK = "120000"  # the mode of a symbolic link
_TIMEOUT_SECONDS = 60.0
LOCK_SECONDS = 5.0  # a running git keeps its lock files for less
_LOCK_POLL_SECONDS = 0.2
_LOCK_FILE = re.compile(r"Unable to create '(.+\.lock)': File exists")
# Files and folders in .git that exist only during an operation.
_UNFINISHED = {
    "rebase-merge": "rebase",
    "rebase-apply": "rebase",
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
    "BISECT_LOG": "bisect",
}
# The system's git if there is one, because the agent may have set PATH.
_PROGRAM = (shutil.which("git", path=os.defpath) if sys.platform == "linux" else None) or "git"
_SAFE_OPTIONS = (
    *("--no-optional-locks", "--no-replace-objects", "-c", "gc.auto=0"),
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"),
)
# HOME is for a git older than 2.32, which does not know GIT_CONFIG_GLOBAL.
_NO_CONFIGURATION = {
    "GIT_CONFIG_GLOBAL": str(Path(__file__).with_name("git_config")),
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "HOME": os.devnull,
    "XDG_CONFIG_HOME": os.devnull,
}


class ConfigCommit(NamedTuple):
    """A commit that changes train.toml, with the file's bytes before and after (empty without a file)."""

    id: str
    subject: str
    before: bytes
    after: bytes


class Head(NamedTuple):
    """The checkout's branch and commit. `branch` is "" if HEAD is detached; `commit` None before the first commit."""

    branch: str
    commit: str | None

    def __str__(self) -> str:
        return self.branch or f"commit {(self.commit or '')[:7]}"


def campaign_branch(day: datetime, taken: Container[str]) -> str:
    """Return a new branch name for a campaign: `autoresearch/nov28`, with `-2`, `-3`, ... if it is taken."""
    name = f"{CAMPAIGN_PREFIX}{day:%b%d}".lower()
    return next(branch for n in count(1) if (branch := name if n == 1 else f"{name}-{n}") not in taken)


class Repo:
    """The git repository at `root`. While a lock file is in the way, git is tried again for LOCK_SECONDS."""

    def __init__(self, root: Path, planned: Head | None = None) -> None:
        """`planned`: the result of `head` in a dry run."""
        self.root = root
        self._planned = planned

    def head(self) -> Head:
        """Return branch and commit; ("", None) outside a git checkout. EngineError without git."""
        if self._planned is not None:
            return self._planned
        commit = self._git("rev-parse", "--quiet", "--verify", "HEAD", check=False).strip()
        # Not --short, which prints heads/<branch> if a tag has the branch's name.
        ref = self._git("symbolic-ref", "--quiet", "HEAD", check=False).strip()
        return Head(ref.removeprefix("refs/heads/"), commit or None)

    def config_at(self, commit: str, name: str = CONFIG_NAME) -> bytes | None:
        """Return the bytes of train.toml, or of another file, in `commit`; None if there is no such file."""
        blob = self._run("cat-file", "blob", f"{commit or 'no commit'}:{name}")  # `:NAME` would read the index
        return blob.stdout if blob.returncode == 0 else None

    def files_at(self, commit: str) -> dict[str, tuple[str, str]]:
        """Return mode and blob id of the files of `commit` by name. UsageError if git cannot read the commit."""
        tree = self._run("ls-tree", "-r", "-z", "--full-tree", commit)
        if tree.returncode != 0:
            fix = "Fetch it: a checkout must contain all commits of its branch."
            raise UsageError(f"git has no readable commit {commit[:12]}", fix)
        # Each entry is `mode kind id\tpath`. A submodule is no blob.
        entries = [entry.partition("\t") for entry in os.fsdecode(tree.stdout).split("\0")]
        blobs = [(path, about.split()) for about, _, path in entries if " blob " in about]
        files = {path: (mode, id) for path, (mode, _, id) in blobs}
        if CONFIG_NAME not in files:
            fix = "Nightshift needs a repository with train.toml at the top. Commit it there."
            raise UsageError(f"commit {commit[:7]} has no {CONFIG_NAME} at the top", fix)
        return files

    def files(self) -> list[str]:
        """Return the names of the files in the checkout, tracked or not, except for ignored files."""
        return self._git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")[:-1]

    def differs(self, name: str, blob: tuple[str, str]) -> bool:
        """Return True if the working file has other bytes, is missing, or is below a symbolic link to a folder. Index
        flags, attributes, filters and core.worktree could change the output of `git diff`. `blob`: from `files_at`."""
        is_below_link = any((self.root / folder).is_symlink() for folder in PurePath(name).parents if folder.name)
        try:
            mode, data = _content(self.root / name)
        except OSError:
            return True
        id = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return is_below_link or mode is None or id != blob[1] or (mode == _LINK) != (blob[0] == _LINK)

    def commit_files(self, head: Head, files: Mapping[str, bytes | None], message: str) -> Head:
        """Commit files with these bytes; None: the bytes of the working file. UsageError if the branch moved."""
        if (here := self.head()) != head or head.commit is None:
            raise UsageError(f"the checkout moved from {head} to {here}", "Run the command again.")
        parent, entries = head.commit, ""
        for name, given in files.items():
            mode, data = _content(self.root / name) if given is None else ("100644", given)
            id = "0" * len(parent)
            if mode is not None:
                id = self._git("hash-object", "-w", "--stdin", "--no-filters", stdin=data).strip()
            entries += f"{mode or 0} {id}\t{name}\0"
        index_info = os.fsencode(entries)
        with tempfile.TemporaryDirectory() as folder:  # the user's index may contain other files
            index = Path(folder, "index")
            self._git("read-tree", parent, index=index)
            self._git("update-index", "-z", "--index-info", index=index, stdin=index_info)
            tree = self._git("write-tree", index=index).strip()
        arguments = (*self._author(), "commit-tree", tree, "-p", parent, "-F", "-")
        commit = self._git(*arguments, stdin=message.encode()).strip()
        # The user's index is updated first: with the old index, the user's next commit would revert this one. A damaged
        # index does not stop the commit.
        self._run("update-index", "-z", "--index-info", stdin=index_info)
        # Compare-and-swap: a commit that another program makes at this moment is not lost.
        self._git("update-ref", "-m", "nightshift", f"refs/heads/{head.branch}", commit, parent)
        return Head(head.branch, commit)

    def tag(self, name: str, branch: str, message: str) -> None:
        """Tag the last commit of a branch, with a message."""
        options = ("--annotate", "--no-sign", "--cleanup=verbatim", "--file=-")
        text = message.encode(errors="replace")
        self._git(*self._author(), "tag", *options, name, f"refs/heads/{branch}", stdin=text)

    def _author(self) -> list[str]:
        """Return the options for the author of a commit: the user's name and address, or else Nightshift."""
        options = list[str]()
        for key, default in (("user.name", "Nightshift"), ("user.email", "nightshift@localhost")):
            value = self._git("config", "--get", key, check=False, is_personal=True).strip()
            options += ["-c", f"{key}={value or default}"]
        return options

    def config_history(self, head: Head) -> list[ConfigCommit]:
        """Return the commits after `head.commit` that change train.toml, oldest first. Empty after a reset."""
        history, before = list[ConfigCommit](), self.config_at(head.commit or "") or b""
        options = ("--first-parent", "--reverse", "--format=%H%x09%P%x09%s")  # a subject may be empty
        lines = self._git("rev-list", *options, f"{head.commit}..refs/heads/{head.branch}", check=False).split("\n")
        commits = [line.split("\t", 2) for line in lines if "\t" in line]
        if commits and commits[0][1].split()[:1] != [head.commit]:
            return []
        for id, _, subject in commits:
            after = self.config_at(id) or b""
            if after != before:
                history.append(ConfigCommit(id, subject, before, after))
            before = after
        return history

    def last_experiment(self) -> int:
        """Return the highest experiment number in the trailers of the branch's commits, or 0."""
        lines = self._git("rev-list", f"--format=%(trailers:key={EXPERIMENT_TRAILER},valueonly)", "HEAD", check=False)
        return max((int(line) for line in lines.splitlines() if line.isdecimal()), default=0)

    def unfinished(self) -> str | None:
        """Return the user's git operation that is not finished, for example `rebase`; None if there is none."""
        folder = self.root / self._git("rev-parse", "--git-dir").strip()
        return next((operation for name, operation in _UNFINISHED.items() if (folder / name).exists()), None)

    def is_default(self, branch: str) -> bool:
        """Return True for main, master, the default branch of git or of a remote, and "", a detached HEAD."""
        names = self._git("for-each-ref", "--format=%(symref:lstrip=3)", "refs/remotes/*/HEAD").splitlines()
        names += self._git("config", "--get", "init.defaultBranch", check=False, is_personal=True).splitlines()
        is_campaign = branch.startswith(CAMPAIGN_PREFIX)  # it is a clone's default branch if it was checked out there
        return branch in ("", "main", "master") or (branch in names and not is_campaign)

    def branches(self) -> dict[str, str]:
        """Return the local branches with their commits."""
        lines = self._git("for-each-ref", "--format=%(refname:lstrip=2) %(objectname)", "refs/heads").splitlines()
        return {name: commit for name, _, commit in (line.partition(" ") for line in lines)}

    def campaign_start(self, commit: str | None) -> str | None:
        """Return the commit from which a campaign's branch was created, if its first experiment ran at `commit`."""
        options = ("--first-parent", "--max-count=1", "--invert-grep", f"--grep=^{START_SUBJECT}")
        return self._git("rev-list", *options, str(commit), check=False).strip() or None

    def changes(self, *names: str) -> list[str]:
        """Return the tracked files and submodules with uncommitted changes, only those in `names` if given."""
        options = ("--porcelain", "--untracked-files=no", "--ignore-submodules=untracked")
        return [line[2:].strip() for line in self._git("status", *options, "--", *names).splitlines()]

    def switch(self, branch: str, is_new: bool = False) -> None:
        """Check out a branch, or create it at HEAD if it `is_new`. UsageError with git's message if that fails."""
        result = self._run(*(("checkout", "-b", branch) if is_new else ("checkout", "--quiet", branch, "--")))
        if result.returncode != 0:
            words = " ".join(result.stderr.decode(errors="replace").removeprefix("fatal: ").split())
            fix = f"Commit the changes, or put them aside: git stash && git switch {shlex.quote(branch)}"
            if is_new:
                fix = "Make .git writable, or choose another name: --branch NAME."
            raise UsageError(f"git cannot {'create' if is_new else 'switch to'} {branch}: {words}", fix)

    def clone(self, head: Head, folder: Path) -> None:
        """Clone the branch into `folder`, without shared objects, remote or reflog."""
        options = ("--quiet", "--no-local", "--single-branch", "--no-tags", "--template=", "--branch", head.branch)
        # Run outside of this checkout, whose configuration could redirect the clone.
        git = Repo(folder.parent)._git
        git("clone", *options, "-c", "core.logAllRefUpdates=false", "--", str(self.root.resolve()), str(folder))
        Repo(folder)._git("remote", "remove", "origin")

    def _git(self, *arguments: str, check: bool = True, **options: Any) -> str:
        """Return the output of a git command. EngineError if it fails, unless `check` is False."""
        result = self._run(*arguments, **options)
        if check and result.returncode != 0:
            command = next(word for word in arguments if not word.startswith("-") and "=" not in word)
            reason = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise EngineError(f"git {command} failed: {reason or result.returncode}")
        return result.stdout.decode(errors="surrogateescape")

    def _run(
        self, *arguments: str, stdin: bytes = b"", is_personal: bool = False, index: Path | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run git, with the user's configuration if `is_personal`. Try again while a lock file is in the way."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment["LC_ALL"] = "C"
        if not is_personal:
            environment |= _NO_CONFIGURATION
        if index is not None:
            environment["GIT_INDEX_FILE"] = str(index)
        command, deadline = [_PROGRAM, *_SAFE_OPTIONS, *arguments], time.monotonic() + LOCK_SECONDS
        while True:
            try:
                with subprocess.Popen(
                    command,
                    cwd=self.root,
                    env=environment,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=PIPE,
                    start_new_session=True,
                ) as process:
                    try:
                        stdout, stderr = process.communicate(stdin, _TIMEOUT_SECONDS)
                    finally:  # also end child processes; git removes its lock files on SIGTERM
                        for number in (signal.SIGTERM, signal.SIGKILL):
                            with suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                                os.killpg(process.pid, number)
                                process.wait(LOCK_SECONDS)
            except subprocess.TimeoutExpired:
                raise EngineError(f"git {arguments[0]} did not answer in {_TIMEOUT_SECONDS:g} s") from None
            except OSError as error:
                raise EngineError(f"git {arguments[0]} failed: {error.strerror or error}") from None
            lock = _LOCK_FILE.search(os.fsdecode(stderr)) if process.returncode else None
            if lock is None:
                return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
            if time.monotonic() >= deadline:
                cause = f"git could not write: its lock file {self.root / lock[1]} is still there"
                raise EngineError(cause, "End the git process that uses it. If no git runs, delete the file.")
            time.sleep(_LOCK_POLL_SECONDS)


def _content(path: Path) -> tuple[str | None, bytes]:
    """Return mode and bytes of a working file as git stores them, for a link its target. Mode None if it is no file."""
    if path.is_symlink():
        return _LINK, os.fsencode(path.readlink())
    if not path.is_file():
        return None, b""
    return "100755" if os.access(path, os.X_OK) else "100644", path.read_bytes()

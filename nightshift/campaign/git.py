"""The only module that calls git. Only train.toml is ever touched; nothing is reset or cleaned.

Commits are built from plumbing (blob, tree, commit, compare-and-swap of the branch), so that the submitted bytes are
committed whatever else is staged, and no hook, filter, signature or editor runs. git does not read the person's
configuration, which an agent could have written, but for the author's name.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from subprocess import PIPE
from typing import Any, NamedTuple

from nightshift.errors import EngineError, UsageError


class Blob(NamedTuple):
    """A file of a commit: `mode` 120000 is a link, `id` hashes its bytes."""

    mode: str
    id: str


class ConfigCommit(NamedTuple):
    """A commit that changes train.toml, with the file's bytes before and after it (none: no file). `is_rewritten`: the
    difference between two commits of which the first is no longer on the branch."""

    id: str
    subject: str
    before: bytes
    after: bytes
    is_rewritten: bool = False


CAMPAIGN_PREFIX = "autoresearch/"
CONFIG_NAME = "train.toml"
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


@dataclass(frozen=True, slots=True)
class Head:
    """Where the checkout stands. `branch` is "" when HEAD is detached; `commit` None before the first commit."""

    branch: str
    commit: str | None

    @property
    def is_campaign(self) -> bool:
        """True on a branch `autoresearch/<tag>`: the only place where results are settled in git."""
        return self.branch.startswith(CAMPAIGN_PREFIX)


class Repo:
    """The git repository whose top is `root`; knows nothing where there is no git.

    A git that meets a lock file is started again for LOCK_SECONDS; then EngineError.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

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
        return self._configs([commit])[0]

    def files_at(self, commit: str) -> dict[str, Blob]:
        """The files that `commit` holds, by their names relative to the root. UsageError if git cannot read it."""
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
        """Names of the files here, relative to the root, tracked or not, without those that git ignores."""
        listed = self._git("ls-files", "--cached", "--others", "--exclude-standard", "-z")
        return [name for name in listed.split("\0") if name]

    def differs(self, name: str, blob: Blob) -> bool:
        """True if the working file is another one, is gone, or lies below a link to another folder.

        Not `git diff`: index flags, attributes, filters and core.worktree can bend its answer.
        """
        path, is_link = self.root / name, blob.mode == "120000"
        try:
            if any((self.root / folder).is_symlink() for folder in PurePath(name).parents if folder.name):
                return True
            if path.is_symlink() != is_link or not (is_link or path.is_file()):
                return True
            data = os.fsencode(path.readlink()) if is_link else path.read_bytes()
        except OSError:
            return True
        digest = hashlib.sha1 if len(blob.id) == 40 else hashlib.sha256
        return digest(b"blob %d\0" % len(data) + data).hexdigest() != blob.id

    def commit_config(self, head: Head, config: bytes, message: str) -> Head:
        """Commit train.toml on top of `head`; return the new head. UsageError if the branch has moved."""
        return self.commit_files(head, {CONFIG_NAME: config}, message)

    def commit_files(self, head: Head, files: Mapping[str, bytes], message: str) -> Head:
        """Commit files at the top of the checkout, by name, as `commit_config` does."""
        now = self._commit_on(head.branch)
        if now != head.commit:
            raise UsageError(
                f"{head.branch} moved to {now[:7]} while {', '.join(files)} was committed", "Run it again."
            )
        return Head(head.branch, self._commit(head.branch, now, files, message))

    def config_history(self, head: Head) -> list[ConfigCommit]:
        """The commits after `head.commit` that change train.toml, oldest first, a merge as one commit.

        One commit, `is_rewritten`, if HEAD does not descend from `head.commit` by first parents (reset or rebased).
        """
        since, tip = head.commit, self._commit_on(head.branch)
        if since is None or since == tip:
            return []
        listed = self._listed("--first-parent", "--reverse", f"{since}..{tip}")
        is_rewritten = not listed or listed[0][1] != since
        if is_rewritten:
            listed = self._listed("--max-count=1", tip)
        texts = [text or b"" for text in self._configs([since, *(commit for commit, _, _ in listed)])]
        changes = zip(listed, texts, texts[1:], strict=False)
        return [ConfigCommit(commit, s, a, b, is_rewritten) for (commit, _, s), a, b in changes if a != b]

    def start_campaign(self, tag: str) -> Head:
        """Create `autoresearch/<tag>` (`-2`, `-3`, ... where it is taken) at HEAD and stand on it; no file changes."""
        commit = self.head().commit
        if commit is None:
            raise UsageError(f"{self.root} has no commit to start a campaign from", "Commit the checkout first.")
        if self._has_branch(CAMPAIGN_PREFIX.rstrip("/")):
            cause = f"git has a branch {CAMPAIGN_PREFIX.rstrip('/')}, so it cannot make {CAMPAIGN_PREFIX}{tag}"
            raise UsageError(cause, f"Rename it: git branch -m {CAMPAIGN_PREFIX.rstrip('/')} NEW-NAME.")
        branch, number = f"{CAMPAIGN_PREFIX}{tag}", 1
        while self._has_branch(branch):
            number += 1
            branch = f"{CAMPAIGN_PREFIX}{tag}-{number}"
        self._git("update-ref", "-m", "nightshift", f"refs/heads/{branch}", commit, "")
        self._git("symbolic-ref", "-m", "nightshift", "HEAD", f"refs/heads/{branch}")
        return Head(branch, commit)

    def _has_branch(self, name: str) -> bool:
        return self._run("show-ref", "--verify", "--quiet", f"refs/heads/{name}").returncode == 0

    def clone(self, head: Head, folder: Path) -> None:
        """Copy the branch into `folder`, with no object, remote or reflog in common."""
        options = ("--quiet", "--no-local", "--single-branch", "--no-tags", "--template=", "--branch", head.branch)
        # From outside: the configuration of this checkout could lead the clone to another place.
        git = Repo(folder.parent)._git
        git("clone", *options, "-c", "core.logAllRefUpdates=false", "--", str(self.root.resolve()), str(folder))
        Repo(folder)._git("remote", "remove", "origin")

    def _commit_on(self, branch: str) -> str:
        """The commit that the checkout stands on. UsageError if it is no longer where the experiment began."""
        now = self.head()
        if now.branch != branch or now.commit is None:
            raise UsageError(f"the checkout moved from {branch} to {now.branch or 'a detached HEAD'}")
        return now.commit

    def _commit(self, branch: str, parent: str, files: Mapping[str, bytes], message: str) -> str:
        """One commit on top of `parent` that changes these files only, and the same in the index."""
        write_blob = ("hash-object", "-w", "--stdin", "--no-filters")
        blobs = {name: self._git(*write_blob, stdin=data).strip() for name, data in files.items()}
        listed = self._git("ls-tree", "-z", "--full-tree", parent).split("\0")[:-1]
        entries = [entry for entry in listed if entry.partition("\t")[2] not in blobs]
        entries += [f"100644 blob {blob}\t{name}" for name, blob in blobs.items()]
        tree = self._git("mktree", "-z", stdin=os.fsencode("".join(f"{entry}\0" for entry in entries))).strip()
        identity = []  # the author: what the person configured for this checkout or for all, else our own
        for key, ours in (("user.name", "Nightshift"), ("user.email", "nightshift@localhost")):
            person = self._git("config", "--get", key, check=False, is_personal=True).strip()
            identity += ["-c", f"{key}={person or ours}"]
        commit = self._git(*identity, "commit-tree", tree, "-p", parent, "-F", "-", stdin=message.encode()).strip()
        # First the index: with an older one, the user's next commit would take the change back. What else than a lock
        # is wrong with an index is not worth failing a verdict.
        for name, blob in blobs.items():
            self._run("update-index", "--add", "--cacheinfo", f"100644,{blob},{name}")
        # Compare-and-swap: a commit that somebody made this instant is not lost.
        self._git("update-ref", "-m", "nightshift", f"refs/heads/{branch}", commit, parent)
        return commit

    def _listed(self, *arguments: str) -> list[tuple[str, str, str]]:
        """The id, the first parent ("" if there is none) and the subject of each commit that `arguments` name."""
        lines = self._git("rev-list", "--parents", "--format=%s", *arguments).split("\n")[:-1]
        ids = [line.removeprefix("commit ").split() for line in lines[::2]]
        return [(names[0], "".join(names[1:2]), subject) for names, subject in zip(ids, lines[1::2], strict=True)]

    def _configs(self, commits: Sequence[str]) -> list[bytes | None]:
        """The bytes of train.toml in each commit; None where there is none."""
        names = "".join(f"{commit or 'no commit'}:{CONFIG_NAME}\n" for commit in commits)  # `:NAME` is in the index
        answer, configs = self._run("cat-file", "--batch", stdin=os.fsencode(names)).stdout, list[bytes | None]()
        for _ in commits:
            header, _, answer = answer.partition(b"\n")
            _, _, kind_and_size = header.partition(b" ")
            kind, _, size = kind_and_size.partition(b" ")
            if not size.isdigit():  # `missing`
                configs.append(None)
                continue
            configs.append(answer[: int(size)] if kind == b"blob" else None)
            answer = answer[int(size) + 1 :]
        return configs

    def _git(self, *arguments: str, check: bool = True, **options: Any) -> str:
        """The output of a git command. EngineError if it fails, unless `check` is False. `options`: of `_run_once`."""
        result = self._run(*arguments, **options)
        if check and result.returncode != 0:
            command = next((a for a in arguments if not a.startswith("-") and "=" not in a), arguments[0])
            reason = result.stderr.decode(errors="replace").strip().splitlines()
            raise EngineError(f"git {command} failed: {reason[-1] if reason else result.returncode}")
        return result.stdout.decode(errors="surrogateescape")

    def _run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            result = self._run_once(*arguments, **options)
            met = _LOCK_FILE.search(os.fsdecode(result.stderr)) if result.returncode else None
            if met is None:
                return result
            if time.monotonic() >= deadline:
                cause = f"git could not write: its lock file {self.root / met[1]} is still there"
                raise EngineError(cause, "End the git that holds it; if none runs, delete the file.")
            time.sleep(_LOCK_POLL_SECONDS)

    def _run_once(
        self, *arguments: str, stdin: bytes = b"", is_personal: bool = False
    ) -> subprocess.CompletedProcess[bytes]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        clean |= {"GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true", "LC_ALL": "C"}
        command = [_program() or "git", "--no-optional-locks", "--no-replace-objects", *_SAFE_OPTIONS, *arguments]
        try:
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


def _program() -> str | None:
    """The system's own git where there is one: PATH is the caller's, and the caller may be the agent."""
    return (shutil.which("git", path=os.defpath) if sys.platform == "linux" else None) or shutil.which("git")

"""The few git facts and actions. Only train.toml is ever touched; nothing is reset, cleaned or stashed.

Commits are built from plumbing (blob, tree, commit, compare-and-swap of the branch), so that the
submitted bytes are committed whatever else is staged or edited meanwhile, and no hook, filter,
signature or editor of the user runs at 3 a.m.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nightshift.errors import EngineError, UsageError
from nightshift.files import write_atomically

CAMPAIGN_PREFIX = "autoresearch/"
CONFIG_NAME = "train.toml"
_TIMEOUT_SECONDS = 60.0
_SAFE_OPTIONS = (
    *("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false", "-c", "core.fsmonitor=false"),
    *("-c", "core.pager=cat", "-c", "gc.auto=0", "-c", "core.quotePath=false"),
)


@dataclass(frozen=True, slots=True)
class Head:
    """Where the checkout stands. `branch` is "" when HEAD is detached; `commit` None before the first commit."""

    branch: str
    commit: str | None

    @property
    def is_campaign(self) -> bool:
        """True on a branch `autoresearch/<tag>`: the only place where results are settled in git."""
        return self.branch.startswith(CAMPAIGN_PREFIX)


class Blob(NamedTuple):
    """A file as git holds it: `mode` 120000 is a link, `id` hashes its bytes."""

    mode: str
    id: str


class Repo:
    """The git checkout at `root`; works, with no facts, where there is no git at all."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def head(self) -> Head:
        """Branch and commit now; ("", None) outside a git checkout."""
        try:
            branch = self._git("symbolic-ref", "--quiet", "--short", "HEAD", check=False).strip()
            commit = self._git("rev-parse", "--verify", "--quiet", "HEAD", check=False).strip()
        except FileNotFoundError:
            return Head("", None)
        return Head(branch, commit or None)

    def config_at(self, commit: str) -> bytes | None:
        """Bytes of train.toml in `commit`; None if it has none."""
        result = self._run("cat-file", "blob", f"{commit}:./{CONFIG_NAME}")
        return result.stdout if result.returncode == 0 else None

    def files_at(self, commit: str) -> dict[str, Blob]:
        """The files that `commit` holds, by their names relative to the root."""
        prefix, found = self._prefix(), {}
        for entry in self._git("ls-tree", "-r", "-z", "--full-tree", commit).split("\0")[:-1]:
            meta, name = entry.split("\t", 1)
            mode, kind, object_id = meta.split()
            if kind == "blob" and name.startswith(prefix):
                found[name.removeprefix(prefix)] = Blob(mode, object_id)
        if CONFIG_NAME not in found:
            top = self._git("rev-parse", "--show-toplevel").strip()
            raise UsageError(
                f"{commit[:7]} holds no {prefix}{CONFIG_NAME}: git takes {top} for the checkout",
                "Commit train.toml; if core.worktree is set, unset it: git config --unset core.worktree.",
            )
        return found

    def differs(self, name: str, blob: Blob) -> bool:
        """True if the working file is another one, or is gone.

        Hashed here, below the root as Python sees it, not by `git diff`: its answer can be bent by index flags,
        attributes, filters and core.worktree, which whoever edits the harness could set too.
        """
        path = self.root / name
        try:
            if path.is_symlink() != (blob.mode == "120000") or not (path.is_symlink() or path.is_file()):
                return True
            data = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        except OSError:
            return True
        digest = hashlib.sha1 if len(blob.id) == 40 else hashlib.sha256
        return digest(b"blob %d\0" % len(data) + data).hexdigest() != blob.id

    def keep(self, head: Head, candidate: bytes, message: str) -> tuple[str | None, str]:
        """Commit the candidate's bytes on the campaign branch. Returns (commit, what was done).

        An agent that committed first is adopted: no second commit.
        """
        refusal = self._moved(head)
        if refusal:
            return None, refusal
        now = self.head()
        assert now.commit is not None
        if self.config_at(now.commit) == candidate:
            return now.commit, f"adopted commit {now.commit[:7]}, which already holds the candidate"
        commit = self._commit(now, candidate, message)
        return commit, f"committed {commit[:7]} on {head.branch}"

    def discard(self, head: Head, candidate: bytes, incumbent: bytes, message: str, parent: bytes | None = None) -> str:
        """Put the incumbent back, in the working file and on the branch.

        The branch needs no commit unless the agent committed the candidate, or the incumbent is an
        earlier one than the candidate's `parent`, which the branch holds.
        """
        refusal = self._moved(head)
        if refusal:
            return refusal
        done = []
        now = self.head()
        held = self.config_at(now.commit) if now.commit else None
        if held is not None and held != incumbent and held in (candidate, parent):
            commit = self._commit(now, incumbent, message)
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

    def clone(self, head: Head, folder: Path) -> Path:
        """Copy the branch into `folder`, with no object, remote or reflog in common; the root's place in the copy."""
        top = self._git("rev-parse", "--show-toplevel").rstrip("\n")
        options = ("--quiet", "--no-local", "--single-branch", "--no-tags", "--template=", "--branch", head.branch)
        self._git("clone", *options, "-c", "core.logAllRefUpdates=false", "--", top, str(folder))
        Repo(folder)._git("remote", "remove", "origin")
        return folder / self._prefix()

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

    def _moved(self, head: Head) -> str | None:
        """Why nothing can be settled, if the checkout is no longer where the experiment began."""
        now = self.head()
        if now.branch != head.branch:
            return f"not settled: the checkout moved from {head.branch} to {now.branch or 'a detached HEAD'}"
        if now.commit is None:
            return f"not settled: {head.branch} has no commit"
        return None

    def _commit(self, head: Head, config: bytes, message: str) -> str:
        """One commit on top of `head` that changes train.toml only, then the same in the index."""
        assert head.commit is not None
        blob = self._git("hash-object", "-w", "--stdin", "--no-filters", stdin=config).strip()
        prefix = self._prefix()
        tree = self._tree_with(head.commit, prefix, f"100644 blob {blob}\t{CONFIG_NAME}")
        commit = self._git(
            *self._identity(), "commit-tree", tree, "-p", head.commit, "-F", "-", stdin=message.encode()
        ).strip()
        # Compare-and-swap: a commit that somebody made this instant is not lost.
        self._git("update-ref", "-m", "nightshift", f"refs/heads/{head.branch}", commit, head.commit)
        # A locked index leaves the commit right and only `git status` behind: not worth failing a verdict.
        self._run("update-index", "--add", "--cacheinfo", f"100644,{blob},{prefix}{CONFIG_NAME}")
        return commit

    def _tree_with(self, commit: str, folder: str, entry: str) -> str:
        """The tree of `commit` in which `folder` ("" or `a/b/`) holds `entry`, a line of ls-tree.

        Built from trees, without an index: a temporary index would outlive a harness that is killed here.
        """
        name = entry.partition("\t")[2]
        listed = self._git("ls-tree", "-z", "--full-tree", f"{commit}:{folder.rstrip('/')}")
        others = [line for line in listed.split("\0") if line and line.partition("\t")[2] != name]
        tree = self._git("mktree", "-z", stdin=os.fsencode("".join(f"{line}\0" for line in [*others, entry]))).strip()
        if not folder:
            return tree
        parent, _, child = folder.rstrip("/").rpartition("/")
        return self._tree_with(commit, f"{parent}/" if parent else "", f"040000 tree {tree}\t{child}")

    def _prefix(self) -> str:
        """Where the root lies in its repository: "" or `folder/`."""
        return self._git("rev-parse", "--show-prefix").rstrip("\n")

    def _identity(self) -> tuple[str, ...]:
        """Options that name an author where the user configured none."""
        options: tuple[str, ...] = ()
        for key, fallback in (("user.name", "Nightshift"), ("user.email", "nightshift@localhost")):
            if not self._git("config", "--get", key, check=False).strip():
                options += ("-c", f"{key}={fallback}")
        return options

    def _git(self, *arguments: str, stdin: bytes = b"", check: bool = True) -> str:
        result = self._run(*arguments, stdin=stdin)
        if check and result.returncode != 0:
            command = next((a for a in arguments if not a.startswith("-") and "=" not in a), arguments[0])
            reason = result.stderr.decode(errors="replace").strip().splitlines()
            raise EngineError(f"git {command} failed: {reason[-1] if reason else result.returncode}")
        return result.stdout.decode(errors="surrogateescape")

    def _run(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        clean |= {"GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true", "LC_ALL": "C"}
        try:
            return subprocess.run(
                [_program(), "--no-optional-locks", "--no-replace-objects", *_SAFE_OPTIONS, *arguments],
                cwd=self.root,
                input=stdin,
                capture_output=True,
                timeout=_TIMEOUT_SECONDS,
                env=clean,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"git {arguments[0]} did not answer in {_TIMEOUT_SECONDS:g} s") from None
        except FileNotFoundError:  # there is no git here: `head` knows what that means
            raise
        except OSError as error:
            raise EngineError(f"git {arguments[0]} cannot be started: {error.strerror}") from None


def _program() -> str:
    """The system's own git where there is one: PATH is the caller's, and the caller may be the agent."""
    return (shutil.which("git", path=os.defpath) if sys.platform == "linux" else None) or "git"

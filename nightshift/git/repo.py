"""The few git facts and actions, and what a verdict does. Only train.toml is ever touched; nothing is reset or cleaned.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from nightshift.errors import EngineError, UsageError
from nightshift.files import write_atomically
from nightshift.records import Failure, Record, Verdict

CAMPAIGN_PREFIX = "autoresearch/"
CONFIG_NAME = "train.toml"
_TIMEOUT_SECONDS = 60.0
_FAILED = "not settled: "
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
    """The git repository whose top is `root`; works, with no facts, where there is no git at all."""

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
        result = self._run("cat-file", "blob", f"{commit}:{CONFIG_NAME}")
        return result.stdout if result.returncode == 0 else None

    def files_at(self, commit: str) -> dict[str, Blob]:
        """The files that `commit` holds, by their names relative to the root."""
        found = {}
        for entry in self._git("ls-tree", "-r", "-z", "--full-tree", commit).split("\0")[:-1]:
            meta, name = entry.split("\t", 1)
            mode, kind, object_id = meta.split()
            if kind == "blob":
                found[name] = Blob(mode, object_id)
        if CONFIG_NAME not in found:
            raise UsageError(
                f"{commit[:7]} holds no {CONFIG_NAME} at its top", "Commit it, in a repository of its own."
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

    def keep(self, head: Head, candidate: bytes, message: str) -> tuple[str, str]:
        """Commit the candidate's bytes on the campaign branch. Returns (commit, what was done).

        An agent that committed first is adopted: no second commit. UsageError where the checkout left `head`'s branch.
        """
        now = self._commit_on(head.branch)
        if self.config_at(now) == candidate:
            return now, f"adopted commit {now[:7]}, which already holds the candidate"
        commit = self._commit(head.branch, now, candidate, message)
        return commit, f"committed {commit[:7]} on {head.branch}"

    def discard(self, head: Head, candidate: bytes, incumbent: bytes, message: str, parent: bytes | None = None) -> str:
        """Put the incumbent back, in the working file and on the branch; what was done.

        The branch needs no commit unless the agent committed the candidate, or the incumbent is an
        earlier one than the candidate's `parent`, which the branch holds. UsageError as `keep`.
        """
        now, done = self._commit_on(head.branch), []
        held = self.config_at(now)
        if held is not None and held != incumbent and held in (candidate, parent):
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
        self._git("clone", *options, "-c", "core.logAllRefUpdates=false", "--", str(self.root), str(folder))
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

    def _commit_on(self, branch: str) -> str:
        """The commit that the checkout stands on. UsageError if it is no longer where the experiment began."""
        now = self.head()
        if now.branch != branch or now.commit is None:
            raise UsageError(f"the checkout moved from {branch} to {now.branch or 'a detached HEAD'}")
        return now.commit

    def _commit(self, branch: str, parent: str, config: bytes, message: str) -> str:
        """One commit on top of `parent` that changes train.toml only, then the same in the index.

        Built from a tree, without an index: a temporary index would outlive a harness that is killed here.
        """
        blob = self._git("hash-object", "-w", "--stdin", "--no-filters", stdin=config).strip()
        listed = self._git("ls-tree", "-z", "--full-tree", parent).split("\0")[:-1]
        entries = [entry for entry in listed if entry.partition("\t")[2] != CONFIG_NAME]
        entries.append(f"100644 blob {blob}\t{CONFIG_NAME}")
        tree = self._git("mktree", "-z", stdin=os.fsencode("".join(f"{entry}\0" for entry in entries))).strip()
        options = (*self._identity(), "commit-tree", tree, "-p", parent, "-F", "-")
        commit = self._git(*options, stdin=message.encode()).strip()
        # Compare-and-swap: a commit that somebody made this instant is not lost.
        self._git("update-ref", "-m", "nightshift", f"refs/heads/{branch}", commit, parent)
        # A locked index leaves the commit right and only `git status` behind: not worth failing a verdict.
        self._run("update-index", "--add", "--cacheinfo", f"100644,{blob},{CONFIG_NAME}")
        return commit

    def _identity(self) -> list[str]:
        """Options that name an author where the user configured none."""
        fallbacks = {"user.name": "Nightshift", "user.email": "nightshift@localhost"}
        missing = [key for key in fallbacks if not self._git("config", "--get", key, check=False).strip()]
        return [word for key in missing for word in ("-c", f"{key}={fallbacks[key]}")]

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
                [_program() or "git", "--no-optional-locks", "--no-replace-objects", *_SAFE_OPTIONS, *arguments],
                cwd=self.root,
                input=stdin,
                capture_output=True,
                timeout=_TIMEOUT_SECONDS,
                env=clean,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"git {arguments[0]} did not answer in {_TIMEOUT_SECONDS:g} s") from None
        except OSError as error:
            raise EngineError(f"git {arguments[0]} cannot be started: {error.strerror}") from None


def _program() -> str | None:
    """The system's own git where there is one: PATH is the caller's, and the caller may be the agent."""
    return (shutil.which("git", path=os.defpath) if sys.platform == "linux" else None) or shutil.which("git")


def settle(record: Record, repo: Repo, source: Callable[[int], bytes], chain: str = "") -> Record:
    """What a verdict does to the branch: commits a kept config, puts the incumbent back after a discard.

    Never fails a measured experiment: `settled` says what was done, or why nothing was (`is_unsettled`).

    `source`: the train.toml that an experiment ran, by its number; UsageError where that cannot be had. `chain`: the
    head of the chain (campaign/chain.py), which has this verdict in it, for the commit's trailer.
    """
    head = Head(record.branch, record.commit)
    if not head.is_campaign:
        where = f"branch {head.branch}" if head.branch else "a detached HEAD"
        return replace(record, settled=f"not settled: {where} is no campaign (git switch -c autoresearch/<tag>)")
    if record.failure in (Failure.MACHINERY, Failure.INTERRUPTED):
        return replace(record, settled="train.toml left as it is: nothing was decided")
    if record.parent is None:
        return replace(record, settled="baseline: nothing to commit")
    assert record.judgement is not None
    trailers = f"Nightshift-Run: {record.number:04d}\n" + (f"Nightshift-Chain: {chain}\n" if chain else "")
    text = f"{record.description}\n\n{record.judgement.why}\n\n{trailers}"
    message = "".join(c if c.isprintable() or c == "\n" else " " for c in text)  # git takes neither NUL nor surrogates
    try:
        candidate = source(record.number)
        if record.judgement.verdict is Verdict.KEEP:
            commit, settled = repo.keep(head, candidate, message)
            return replace(record, kept_commit=commit, settled=settled)
        parent, back = source(record.parent), record.judgement.taken_back_to
        incumbent = parent if back is None else source(back)
        restore = f"Restore the incumbent after experiment {record.number:04d}\n\n{message}"
        return replace(record, settled=repo.discard(head, candidate, incumbent, restore, parent))
    except (EngineError, UsageError, OSError, ValueError) as error:
        return replace(record, settled=f"{_FAILED}{error}")


def is_unsettled(record: Record) -> bool:
    """True if what its verdict does to the branch was not done, or failed for a reason that may have passed."""
    failed = (record.settled or "").startswith(_FAILED) and Head(record.branch, None).is_campaign
    return record.judgement is not None and (record.settled is None or failed)

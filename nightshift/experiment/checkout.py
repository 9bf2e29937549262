"""The checkout of a campaign: its branch and its measuring files.

On main, master, the default branch of a remote, or a detached HEAD, a start continues the campaign that began at this
commit under the same rules, or creates a branch. Any other branch is the campaign. An experiment or a decision is
refused if a measuring file changed or another branch is checked out. Measuring files, those that the rules hash covers,
are hashed from their bytes: git's index and configuration could hide a change.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from nightshift.campaign.git import AGENT_CLONE_MARK, CONFIG_NAME, Head, Repo, campaign_branch
from nightshift.campaign.ledger import Ledger, baseline_of
from nightshift.campaign.records import Record
from nightshift.config.rules import RULES_NAME, Rules, is_covered
from nightshift.errors import ExitCode, NightshiftError, UsageError, listed

_MOST_NAMES = 5  # in a command; for more it is about the whole checkout


class Start(NamedTuple):
    """What a start does before its first experiment."""

    before: Head
    head: Head  # the campaign's branch and its commit, at which a new branch is created
    is_new: bool = False
    files: tuple[str, ...] = ()  # what is not committed of the baseline: the start commits them
    num_experiments: int = 0

    @property
    def is_switch(self) -> bool:
        """True if the branch exists and is not checked out."""
        return not self.is_new and self.head.branch != self.before.branch

    def describe(self, is_done: bool) -> str:
        """Return a line on what the start does, and how to go back. Empty if it only goes on with its own branch."""
        branch, before, num = self.head.branch, self.before, self.num_experiments
        would, ending, plural = ("", "d", "s") if is_done else ("would ", "", "")
        contents = f"its first commit {would}contain{plural} your {listed(self.files)}"
        if branch == before.branch:
            line = f"branch {branch} {would}become{plural} a campaign"
            return f"{line}; {contents}" if self.files else "" if num else line
        line = f"{would}create{ending} branch {branch} from {before}; "
        line += f"{contents}, and {before} is unchanged" if self.files else "no file changes"
        if num:
            line = f"{would}continue{ending} {branch}, a campaign that began at this commit "
            line += f"(experiments so far: {num}); --branch NEW begins another"
        place = shlex.quote(before.branch) if before.branch else f"--detach {str(before.commit)[:12]}"
        return f"{line}. To go back: git switch {place}"


def continued(repo: Repo, records: Sequence[Record], rules_hash: str | None) -> str:
    """Return the last campaign's branch that began at this commit, or "". `rules_hash`: None for any."""
    head = repo.head()
    if head.commit is None or not repo.is_default(head.branch):
        return ""
    branches, firsts = repo.branches(), {(record.branch, record.rules_hash): record for record in reversed(records)}
    for first in sorted(firsts.values(), key=lambda record: record.number, reverse=True):
        is_here = first.branch in branches and rules_hash in (None, first.rules_hash)
        if is_here and repo.campaign_start(first.commit) == head.commit:
            return first.branch
    return ""


def checked_head(repo: Repo) -> Head:
    """Return HEAD. UsageError without a commit, and while an operation of git is not finished."""
    if (repo.root / ".git" / AGENT_CLONE_MARK).exists():
        cause = f"{repo.root} is the throw-away clone of an agent, in which nothing is run"
        raise UsageError(cause, "Edit train.toml, write hypothesis.txt, and end: the night runs the proposal.")
    head = repo.head()
    if head.commit is None:
        cause = f"{repo.root} is no git repository with a commit, and a campaign is a branch of one"
        raise UsageError(cause, "Create it: git init && git add -A && git commit -m start")
    if operation := repo.unfinished():
        command = "bisect reset" if operation == "bisect" else f"{operation} --abort"
        raise UsageError(f"a git {operation} is not finished in this checkout", f"Finish it, or: git {command}")
    return head


def plan(
    repo: Repo,
    records: Sequence[Record],
    now: datetime,
    rules: Rules | None = None,
    rules_hash: str | None = None,
    name: str | None = None,
) -> Start:
    """Return what a start does with branches. UsageError if no campaign can begin or continue here. `name`: --branch.
    `rules`, `rules_hash`: None for a command that only looks; then `files` are not determined."""
    head, branches, known = checked_head(repo), repo.branches(), {record.branch for record in records}
    commit, is_new, files = (before := str(head.commit)), False, list[str]()
    if name in (None, head.branch) and not repo.is_default(head.branch):
        branch = head.branch
    elif (branch := continued(repo, records, rules_hash)) and name in (None, branch):
        commit = branches[branch]
    else:
        is_new = True
        taken = {*branches} | known
        branch = campaign_branch(now.astimezone(), taken) if name is None else name
        if not repo.is_branch_name(branch):
            raise UsageError(f"--branch {branch}: this is not a valid branch name", "Choose another.")
        if branch in taken or repo.is_default(branch):
            switch = f", or: git switch {shlex.quote(branch)}" if branch in branches else "."
            raise UsageError(f"--branch {branch}: the name is in use", f"Choose another{switch}")
    experiments = [record for record in records if record.branch == branch]
    if rules is not None and baseline_of(experiments, branch) is None:
        tracked = repo.files_at(before)
        files = [name for name in (CONFIG_NAME, RULES_NAME) if name in tracked and repo.differs(name, tracked[name])]
        files += changed_files(repo, before, rules)
    return Start(head, Head(branch, commit), is_new, tuple(files), len(experiments))


def next_start(ledger: Ledger, repo: Repo) -> str:
    """Return a line on what run.py or a night does with branches here; empty on a campaign's own branch."""
    try:
        return plan(repo, ledger.readable()[0], datetime.now(UTC)).describe(is_done=False)
    except NightshiftError as error:
        return str(error)


class IntegrityError(NightshiftError):
    """A measuring file or the branch is not the campaign's: nothing is decided until you restore it."""

    exit_code = ExitCode.USAGE


def changed_files(repo: Repo, commit: str, rules: Rules) -> list[str]:
    """Name the measuring files that are other ones here than in `commit`, or are not in it."""
    tracked = repo.files_at(commit)
    names = [name for name in tracked if is_covered(name, rules.measuring) and repo.differs(name, tracked[name])]
    return names + [name for name in repo.files() if name not in tracked and is_covered(name, rules.measuring)]


def require_unchanged(repo: Repo, rules: Rules, agreed_hash: str, commit: str | None, rules_hash: str) -> None:
    """Raise IntegrityError if a measuring file changed since the campaign's first experiment, which had `agreed_hash`
    and began at `commit`, or since this command began, with `rules_hash`."""
    try:
        now = rules.hash(repo.root)
        names = changed_files(repo, commit, rules) if commit and now != agreed_hash else []
    except UsageError as error:  # a folder became a link
        raise IntegrityError(error.cause, error.fix) from None
    if names and commit:
        command = shlex.join(["git", "diff", commit[:7], *(["--", *names] if len(names) <= _MOST_NAMES else [])])
        cause = f"{listed(names)} differ from commit {commit[:7]}, with which this campaign measures"
        raise IntegrityError(cause, f"See how: {command}. Restore them, or begin another campaign: --branch NEW.")
    if now not in (agreed_hash, rules_hash):
        places = [str(place) for place in rules.elsewhere(repo.root)]
        cause = f"{listed(places) or 'a measuring file that git ignores'} changed since this command began"
        raise IntegrityError(cause, "Restore what changed.")

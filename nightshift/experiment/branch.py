"""The branch of a campaign: which branch a start works on, and how a campaign begins.

On main, master, the default branch of a remote, or a detached HEAD, a start continues the campaign that began at this
commit under the same rules, or creates a branch. Any other branch is itself the campaign.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from nightshift.campaign.git import CONFIG_NAME, START_SUBJECT, Head, Repo, campaign_branch
from nightshift.campaign.ledger import Ledger, baseline_of
from nightshift.campaign.records import Record
from nightshift.config.rules import RULES_NAME, Rules
from nightshift.errors import NightshiftError, UsageError, listed
from nightshift.experiment.integrity import changed_files


@dataclass(frozen=True, slots=True)
class Start:
    """What a start does before its first experiment.

    `before`: HEAD. `head`: the campaign's branch, and the commit that it is at or is created at. `files`: what is not
    committed of the baseline; the start commits it on the branch.
    """

    before: Head
    head: Head
    is_new: bool = False
    files: tuple[str, ...] = ()
    num_experiments: int = 0

    @property
    def is_switch(self) -> bool:
        """True if the branch exists and is not checked out."""
        return not self.is_new and self.head.branch != self.before.branch

    @property
    def message(self) -> str:
        """The message of the commit of `files`."""
        names = f"{len(self.files)} files as they were" if len(self.files) > 1 else f"{listed(self.files)} as it was"
        return "\n".join([f"{START_SUBJECT}{names}", "", *self.files, ""])

    def describe(self, is_done: bool) -> str:
        """Return a line on what the start does, and how to go back. Empty if it only goes on with its own branch."""
        branch, before, would = self.head.branch, self.before, "" if is_done else "would "
        contents = f"its first commit {'contains' if is_done else 'would contain'} your {listed(self.files)}"
        if branch == before.branch:
            line = f"branch {branch} {'becomes' if is_done else 'would become'} a campaign"
            return f"{line}; {contents}" if self.files else "" if self.num_experiments else line
        if self.num_experiments:
            line = f"{would}continue{'d' * is_done} {branch}, a campaign that began at this commit "
            line += f"(experiments so far: {self.num_experiments}); --branch NEW begins another"
        else:
            line = f"{would}create{'d' * is_done} branch {branch} from {before}; "
            line += f"{contents}, and {before} is unchanged" if self.files else "no file changes"
        go_back = ["git", "switch", *([before.branch] if before.branch else ["--detach", str(before.commit)[:12]])]
        return f"{line}. To go back: {shlex.join(go_back)}"


def continued(repo: Repo, records: Sequence[Record], rules_hash: str | None) -> Record | None:
    """Return the first experiment of the last campaign that began at this commit: a start here continues it.

    None if there is none, or if HEAD is on a campaign's own branch. `rules_hash`: None for any rules.
    """
    head = repo.head()
    if head.commit is None or not repo.is_default(head.branch):
        return None
    branches = repo.branches()
    firsts = {(record.branch, record.rules_hash): record for record in reversed(records)}
    campaigns = [
        record
        for (branch, rules), record in firsts.items()
        if branch in branches and rules_hash in (None, rules) and repo.campaign_start(record.commit) == head.commit
    ]
    return max(campaigns, key=lambda record: record.number, default=None)


def checked_head(repo: Repo) -> Head:
    """Return HEAD. UsageError without a commit, and while an operation of git is not finished."""
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
    """Return what a start does with branches. Nothing is changed.

    Args:
        rules, rules_hash: None for a command that only looks; then `files` are not determined.
        name: --branch.

    Raises:
        UsageError: no campaign can begin or continue here.
    """
    head = checked_head(repo)

    def start(branch: str, commit: str, is_new: bool = False) -> Start:
        experiments = [record for record in records if record.branch == branch]
        files = list[str]()  # of train.toml, rules.toml and the measuring files, those that differ from HEAD
        if rules is not None and baseline_of(experiments, branch) is None:
            tracked = repo.files_at(str(head.commit))
            names = (CONFIG_NAME, RULES_NAME)
            files = [name for name in names if name in tracked and repo.differs(name, tracked[name])]
            files += changed_files(repo, str(head.commit), rules)
        return Start(head, Head(branch, commit), is_new, tuple(files), len(experiments))

    if name in (None, head.branch) and not repo.is_default(head.branch):
        return start(head.branch, str(head.commit))
    branches, known = repo.branches(), {record.branch for record in records}
    first = continued(repo, records, rules_hash)
    if first is not None and name in (None, first.branch):
        return start(first.branch, branches[first.branch])
    taken = {*branches} | known
    if name is None:
        name = campaign_branch(now.astimezone(), taken)
    elif not repo.is_branch_name(name):
        raise UsageError(f"--branch {name}: this is not a valid branch name", "Choose another.")
    elif name in taken or repo.is_default(name):
        switch = f", or: git switch {shlex.quote(name)}" if name in branches else "."
        raise UsageError(f"--branch {name}: the name is in use", f"Choose another{switch}")
    return start(name, str(head.commit), is_new=True)


def next_start(ledger: Ledger, repo: Repo) -> str:
    """Return a line on what run.py or a night does with branches here; empty on a campaign's own branch."""
    try:
        return plan(repo, ledger.readable()[0], datetime.now(UTC)).describe(is_done=False)
    except NightshiftError as error:
        return str(error)

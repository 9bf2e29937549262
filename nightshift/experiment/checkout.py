"""The checkout of a campaign: its branch and its measuring files.

On main, master, the default branch of a remote, or a detached HEAD, a start continues the campaign that began at this
commit under the same rules, or else creates a branch. On any other branch, a start continues or begins the campaign of
that branch. An experiment or a decision is refused if a measuring file changed or another branch is checked out. The
measuring files are hashed from their bytes, because git's index and configuration could hide a change.
"""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from nightshift.campaign.git import AGENT_CLONE_MARK, CONFIG_NAME, Head, Repo, campaign_branch
from nightshift.campaign.ledger import Ledger, baseline_of
from nightshift.campaign.records import Record
from nightshift.config.rules import RULES_NAME, Rules, is_covered
from nightshift.errors import ExitCode, NightshiftError, UsageError, listed


class Start(NamedTuple):
    """What a start does with branches before its first experiment."""

    before: Head
    head: Head  # the campaign's branch and its commit; a new branch is created at this commit
    is_new: bool = False
    files: tuple[str, ...] = ()  # files of the baseline that are not committed: the start commits them
    num_experiments: int = 0

    def describe(self) -> str:
        """Return a line on what the start does, and how to go back. Empty if it continues the checked-out branch."""
        branch, before, num = self.head.branch, self.before, self.num_experiments
        contents = f"; its first commit contains your {listed(self.files)}" if self.files else ""
        if branch == before.branch:
            return "" if num and not contents else f"branch {branch} becomes a campaign{contents}"
        line = f"new branch {branch} from {before}{contents}; {before} is unchanged"
        if num:
            line = f"branch {branch} continues, a campaign that began at this commit "
            line += f"(experiments so far: {num}); --branch NEW begins another"
        place = shlex.quote(before.branch) if before.branch else f"--detach {str(before.commit)[:12]}"
        return f"{line}. To go back: git switch {place}"


def continued(repo: Repo, records: Sequence[Record], rules_hash: str | None) -> str:
    """Return the branch of the campaign that began at this commit and ran last, or "". `rules_hash`: None for any."""
    head = repo.head()
    if head.commit is None or not repo.is_default(head.branch):
        return ""
    branches = repo.branches()
    for first in {record.campaign: record for record in reversed(records)}.values():
        is_here = first.branch in branches and rules_hash in (None, first.rules_hash)
        if is_here and repo.campaign_start(first.commit) == head.commit:
            return first.branch
    return ""


def checked_head(repo: Repo) -> Head:
    """Return HEAD. UsageError without a commit, during an operation of git such as a merge, and in an agent's clone."""
    if (repo.root / ".git" / AGENT_CLONE_MARK).exists():
        cause = f"{repo.root} is the temporary clone of an agent, in which no experiment may run"
        raise UsageError(cause, "Edit train.toml, write hypothesis.txt, and exit: the night runs the proposal.")
    head = repo.head()
    if head.commit is None:
        cause = f"{repo.root} is not a git repository with a commit, and a campaign needs a branch"
        raise UsageError(cause, "Create it: git init && git add -A && git commit -m start")
    if operation := repo.unfinished():
        raise UsageError(f"a git {operation} is not finished in this checkout", "Finish or abort it.")
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
    `rules`, `rules_hash`: None for a read-only command; then `files` is empty."""
    head, branches, known = checked_head(repo), repo.branches(), {record.branch for record in records}
    commit, is_new, files = (before := str(head.commit)), False, list[str]()
    if name in (None, head.branch) and not repo.is_default(head.branch):
        branch = head.branch
    elif (branch := continued(repo, records, rules_hash)) and name in (None, branch):
        commit = branches[branch]
    else:
        is_new = True
        in_use = {*branches} | known
        branch = campaign_branch(now.astimezone(), in_use) if name is None else name
        if branch in in_use or repo.is_default(branch):
            raise UsageError(f"--branch {branch}: the name is in use", "Choose another name, or switch to the branch.")
    experiments = [record for record in records if record.branch == branch]
    if rules is not None and baseline_of(experiments, branch) is None:
        tracked = repo.files_at(before)
        files = [name for name in (CONFIG_NAME, RULES_NAME) if name in tracked and repo.differs(name, tracked[name])]
        files += changed_files(repo, before, rules)
    return Start(head, Head(branch, commit), is_new, tuple(files), len(experiments))


def next_start(ledger: Ledger, repo: Repo) -> str:
    """Return a line on what run.py or a night would do with branches; empty on the branch of a campaign."""
    try:
        return plan(repo, ledger.readable()[0], datetime.now(UTC)).describe()
    except NightshiftError as error:
        return str(error)


class IntegrityError(NightshiftError):
    """A measuring file changed, or another branch is checked out. Nothing is decided until you restore it."""

    exit_code = ExitCode.USAGE


def changed_files(repo: Repo, commit: str, rules: Rules) -> list[str]:
    """Return the names of the measuring files that differ from `commit` or are not in it."""
    tracked = repo.files_at(commit)
    names = [name for name in tracked if is_covered(name, rules.measuring) and repo.differs(name, tracked[name])]
    return names + [name for name in repo.files() if name not in tracked and is_covered(name, rules.measuring)]


def require_unchanged(repo: Repo, rules: Rules, agreed_hash: str, commit: str | None, rules_hash: str) -> None:
    """Raise IntegrityError if a measuring file changed since the campaign's first experiment, which had `agreed_hash`
    and began at `commit`, or since this command began, with `rules_hash`."""
    try:
        hash_now = rules.hash(repo.root)
        names = changed_files(repo, commit, rules) if commit and hash_now != agreed_hash else []
    except UsageError as error:  # a folder was replaced by a link
        raise IntegrityError(error.cause, error.fix) from None
    if names and commit:
        cause = f"{listed(names)} differ from commit {commit[:7]}, with which this campaign measures"
        fix = f"See how: git diff {commit[:7]}. Restore them, or begin another campaign: --branch NEW."
        raise IntegrityError(cause, fix)
    if hash_now not in (agreed_hash, rules_hash):
        paths = [str(path) for path in rules.elsewhere(repo.root)]
        cause = f"{listed(paths) or 'a measuring file that git ignores'} changed since this command began"
        raise IntegrityError(cause, "Restore the file.")

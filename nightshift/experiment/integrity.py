"""Refuse an experiment or a decision if a measuring file changed or another branch is checked out. Measuring files,
those that the rules hash covers, are hashed from their bytes: git's index and configuration could hide a change."""

import shlex

from nightshift.campaign.git import Repo
from nightshift.config.rules import Rules, is_covered
from nightshift.errors import ExitCode, NightshiftError, UsageError, listed

_MOST_NAMES = 5  # in a command; for more it is about the whole checkout


class IntegrityError(NightshiftError):
    """A measuring file or the branch is not the campaign's: nothing is decided until you restore it."""

    exit_code = ExitCode.USAGE


def changed_files(repo: Repo, commit: str, rules: Rules) -> list[str]:
    """Name the measuring files that are other ones here than in `commit`, or are not in it."""
    tracked = repo.files_at(commit)
    names = [name for name in tracked if is_covered(name, rules.measuring) and repo.differs(name, tracked[name])]
    new = [name for name in repo.files() if name not in tracked]
    for folder in (name.rstrip("/") for name in new):
        path = repo.root / folder
        if path.is_dir() and not path.is_symlink() and is_covered(f"{folder}/", rules.measuring):
            cause = f"{folder} is a git repository of its own, and contains measuring files"
            raise UsageError(cause, "Make them files of this one: remove its .git, then git add.")
    return names + [name for name in new if is_covered(name, rules.measuring)]


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


def require_branch(repo: Repo, branch: str) -> None:
    """Raise IntegrityError if another branch is checked out than the campaign's."""
    if (now := repo.head().branch) != branch:
        cause = f"the checkout moved from {branch} to {now or 'a detached HEAD'}"
        raise IntegrityError(cause, f"Go back: git switch {shlex.quote(branch)}")

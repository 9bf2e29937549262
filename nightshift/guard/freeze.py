"""Is the harness that measures the one that was agreed on? Its files, tracked or not, against a commit.

Compared is what the rules name as frozen, and nothing else: documents, tests and environments that these rules do
not use come and go while a campaign lives.
"""

from __future__ import annotations

from nightshift.errors import UsageError
from nightshift.git.repo import Head, Repo
from nightshift.guard.untracked import untracked_code
from nightshift.rules import Rules, is_covered


def changed_harness_files(repo: Repo, commit: str, rules: Rules) -> list[str]:
    """Frozen files that differ from `commit`, then code among them that it does not hold; relative to the checkout."""
    tracked = repo.files_at(commit)
    changed = [name for name in tracked if is_covered(name, rules.frozen) and repo.differs(name, tracked[name])]
    return changed + untracked_code(repo.root, tracked, rules.frozen)


def require_clean_start(repo: Repo, head: Head, config: bytes, branch_point: str | None, rules: Rules) -> None:
    """Refuse an experiment on a campaign branch whose harness is not the one that was agreed.

    `branch_point` is the commit of the campaign's first experiment; None for that first one itself,
    which measures train.toml as it is committed. Raises UsageError.
    """
    if head.commit is None:
        raise UsageError(f"branch {head.branch} has no commit", "Commit the checkout first.")
    changed = changed_harness_files(repo, branch_point or head.commit, rules)
    if changed:
        names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise UsageError(
            f"{names} differ from the branch point {(branch_point or head.commit)[:7]}",
            "On a campaign branch only train.toml changes: restore or delete them, or start another branch.",
        )
    if branch_point is None and repo.config_at(head.commit) != config:
        raise UsageError(
            "train.toml differs from its committed version, and the first experiment measures the baseline",
            "Commit train.toml, or restore it, before the first run of a campaign.",
        )

"""What is done to git while an experiment runs, and how a person sets it right afterwards."""

from pathlib import Path

from tests.checkouts import git
from tests.faults.matrix import BRANCH

# States of git that are a file in .git, and those that are a commit of somebody to a file.
PLANTED = {"index locked": "index.lock", "HEAD locked": "HEAD.lock", "branch locked": f"refs/heads/{BRANCH}.lock",
           "merge under way": "MERGE_HEAD"}  # fmt: skip
COMMITTED = {"config committed": "train.toml", "document committed": "program.md", "harness committed": "prepare.py"}


def change(root: Path, how: str) -> None:
    """Put the repository into one of the states of GIT."""
    folder = root / ".git"
    if how in PLANTED:
        (folder / PLANTED[how]).write_text(git(root, "rev-parse", "HEAD") if how == "merge under way" else "")
    elif how in COMMITTED:
        with (root / COMMITTED[how]).open("a") as file:
            file.write("# somebody's\n")
        git(root, "commit", "--quiet", "-m", "somebody's", "--", COMMITTED[how])
    elif how == "packed refs":
        git(root, "pack-refs", "--all")
    elif how == "detached HEAD":
        (folder / "HEAD").write_text(git(root, "rev-parse", "HEAD"))
    elif how == "another branch":
        git(root, "symbolic-ref", "HEAD", "refs/heads/main")
    elif how == "branch renamed":
        git(root, "branch", "-m", BRANCH, f"{BRANCH}-renamed")
    elif how == "no repository":
        folder.rename(root / ".git-away")
    else:
        raise ValueError(f"no such state of git: {how}")


def restore(root: Path, how: str) -> None:
    """Take that back, as far as it hinders."""
    if how in PLANTED:
        (root / ".git" / PLANTED[how]).unlink(missing_ok=True)
    elif how in ("detached HEAD", "another branch"):
        git(root, "symbolic-ref", "HEAD", f"refs/heads/{BRANCH}")
        git(root, "reset", "--quiet")  # the index, which may be of the other branch
    elif how == "branch renamed":
        git(root, "branch", "-m", f"{BRANCH}-renamed", BRANCH)
    elif how == "harness committed":
        git(root, "revert", "--no-edit", git(root, "log", "-1", "--format=%H", "--", COMMITTED[how]).strip())
    elif how == "no repository":
        (root / ".git-away").rename(root / ".git")

"""What is done to files, disk and git while an experiment runs, and how a person sets it right afterwards."""

import os
import shutil
from pathlib import Path

from tests.checkouts import git
from tests.faults.matrix import BRANCH, Fault

BALLAST = "ballast"  # beside the checkout, on its small file system
# States of git that are a file in .git, and those that are a commit of somebody to a file.
PLANTED = {"index locked": "index.lock", "HEAD locked": "HEAD.lock", "branch locked": f"refs/heads/{BRANCH}.lock",
           "merge under way": "MERGE_HEAD"}  # fmt: skip
COMMITTED = {"config committed": "train.toml", "document committed": "program.md", "harness committed": "prepare.py"}


def do(fault: Fault, root: Path) -> bool:
    """Change the world as the fault says; False if there is nothing to change."""
    match fault.family:
        case "disk full":
            _fill(root.parent / BALLAST, 1024 * int(fault.failure.split()[0]))
        case "git state changed":
            change_git(root, fault.failure)
        case _:
            path = place(root, fault.victim)
            return path is not None and damage(path, fault.failure)
    return True


def undo(fault: Fault, root: Path) -> None:
    """What a person does in the morning: make room, unlock, put files and branches back where they were."""
    match fault.family:
        case "disk full":
            (root.parent / BALLAST).unlink(missing_ok=True)
        case "git state changed":
            restore_git(root, fault.failure)
        case _:
            for name in ("train.toml", "results.tsv", "runs/.controller"):
                path = root / name
                if path.is_symlink():
                    path.unlink()
                elif path.is_dir():
                    shutil.rmtree(path)


def damage(path: Path, how: str) -> bool:
    """Spoil a file or folder in one of the ways of DAMAGE; False if it is not there, or has no such way."""
    is_folder = path.is_dir()
    if path.is_symlink() or not path.exists() or (is_folder and how in ("garbled", "a folder instead")):
        return False
    data = b"" if is_folder else path.read_bytes()
    entries = sorted(path.iterdir()) if is_folder else []
    if how == "emptied" or how == "torn":
        for entry in entries[: len(entries) if how == "emptied" else len(entries) // 2]:
            _remove(entry)
        if not is_folder:
            path.write_bytes(b"" if how == "emptied" else data[: len(data) // 2])
    elif how == "garbled":
        path.write_bytes(bytes(range(256)))
    elif how == "edited":
        target = path / "notes.txt" if is_folder else path
        target.write_bytes(data + b"# a note\n")
    else:
        _remove(path)
        if how == "a folder instead":
            path.mkdir()
        elif how == "a link to nowhere instead":
            path.symlink_to("nowhere")
    return True


def last_run(root: Path) -> Path | None:
    """The folder of the last experiment."""
    return max((p for p in (root / "runs").glob("[0-9]*") if p.is_dir()), default=None)


def place(root: Path, name: str) -> Path | None:
    """The path of a victim: LAST is the last experiment."""
    last = last_run(root)
    if last is None and "LAST" in name:
        return None
    return root / name.replace("LAST", last.name if last else "")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _fill(ballast: Path, bytes_left: int) -> None:
    """Leave that many bytes on the file system of `ballast`."""
    status = os.statvfs(ballast.parent)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - bytes_left))


def change_git(root: Path, how: str) -> None:
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


def restore_git(root: Path, how: str) -> None:
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

"""What the agent of a cheat has at hand: the text of this file comes before its action. REAL is the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REAL, OUTSIDE, MARKER, HOME = *map(Path, sys.argv[1:4]), Path(os.environ["HOME"])
EVIL_MATH = "import math; math.exp = lambda x: 2.0\n"  # what the stand-in's score of any learning rate comes from


def put(name: str | Path, text: str = "x = 1\n") -> None:
    """A file of the checkout, or any other by its whole name."""
    _fresh(name).write_text(text)


def fifo(pattern: str) -> None:
    os.mkfifo(_fresh(next(REAL.glob(pattern), pattern)))


def link(pattern: str, to: str) -> None:
    _fresh(next(REAL.glob(pattern), pattern)).symlink_to(to)


def copy(name: str, other: str) -> None:
    shutil.copytree(REAL / name, REAL / other)


def move_out(name: str) -> None:
    """To a place outside; a link stays."""
    (REAL / name).rename(OUTSIDE / name)
    (REAL / name).symlink_to(OUTSIDE / name)


def edit(name: str, old: str, new: str) -> None:
    path = REAL / name
    path.write_text(path.read_text().replace(old, new, 1))


def program() -> Path:
    """One that tells that it ran, and passes on what it reads."""
    path = OUTSIDE / "program"
    path.write_text(f"#!/bin/sh\ntouch {MARKER}\ncat\n")
    path.chmod(0o755)
    return path


def git(*words: str, text: str = "") -> str:
    command = ["git", "-C", str(REAL), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, input=text, capture_output=True, check=True, text=True).stdout.strip()


def overwrite(name: str, other: str) -> None:
    """git's object of that name gets the bytes of another one."""
    path, there = (REAL / ".git" / "objects" / each[:2] / each[2:] for each in (name, other))
    path.unlink(missing_ok=True)
    shutil.copy(there, path)


def forge(name: str, more: str, *folders: str) -> None:
    """Edit a file, and have git say that it was always so: by its trees of these folders ("" for the root)."""
    agreed = {folder: git("rev-parse", f"HEAD:{folder}") for folder in folders}
    blob = git("rev-parse", f"HEAD:{name}")
    with (REAL / name).open("a") as file:
        file.write(f"\n{more}")
    git("add", name)
    for folder, tree in agreed.items():
        overwrite(tree, git("write-tree", *([f"--prefix={folder}/"] if folder else [])))
    git("update-index", "--cacheinfo", f"100644,{blob},{name}")


def _fresh(name: str | Path) -> Path:
    path = REAL / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path

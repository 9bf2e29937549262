"""What the agent of a cheat has at hand: the text of this file comes before its action. REAL is the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REAL, OUTSIDE, MARKER, HOME = *map(Path, sys.argv[1:4]), Path(os.environ["HOME"])
EVIL_MATH = "import math; math.exp = lambda x: 2.0\n"  # what the stand-in's score of any learning rate comes from


def put(name: str | Path, text: str = "x = 1\n") -> None:
    """A file of the checkout, or any other by its whole name."""
    _fresh(name).write_text(text)


def copy(name: str, other: str) -> None:
    shutil.copytree(REAL / name, REAL / other)


def edit(name: str, old: str, new: str) -> None:
    path = REAL / name
    path.write_text(path.read_text().replace(old, new, 1))


def program() -> Path:
    """One that tells that it ran, and passes on what it reads."""
    path = (OUTSIDE if os.access(OUTSIDE, os.W_OK) else Path(tempfile.gettempdir())) / "program"
    path.write_text(f"#!/bin/sh\ntouch {MARKER}\ncat\n")
    path.chmod(0o755)
    return path


def git(*words: str) -> str:
    command = ["git", "-C", str(REAL), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def _fresh(name: str | Path) -> Path:
    path = REAL / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path

"""Fixtures that several test files share: a throw-away git checkout on a campaign branch."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from nightshift.processes.watchdog import is_alive
from tests import checkouts
from tests.checkouts import git  # noqa: F401  (tests take it from here)

CAMPAIGN = "autoresearch/test"


def pytest_sessionstart() -> None:
    """Children inherit what is ignored, and a job in the background of a shell, or under nohup, ignores some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def living_children() -> list[psutil.Process]:
    """Descendants of pytest that still run. Zombies do not: pytest is a child subreaper after its first
    ProcessGroup, and nobody reaps what harnesses killed by other tests left to it."""
    return [p for p in psutil.Process().children(recursive=True) if is_alive(p)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository with a train.toml, a harness file and a document, on a campaign branch."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "train.toml").write_bytes(b"lr = 0\n")
    (root / "harness.py").write_text("MEASURES = True\n")
    (root / "program.md").write_text("Be tireless.\n")
    (root / ".gitignore").write_text("runs/\nresults.tsv\n")
    checkouts.commit_all(root, CAMPAIGN, "start")
    return root

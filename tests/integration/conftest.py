"""Fixtures that several files of whole processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.night_checkout import furnish, leftovers
from tests.notify_commands import notify_folder


@pytest.fixture
def root(checkout: Path) -> Iterator[Path]:
    """A checkout that run.py and a night can run in, and afterwards no process that names it."""
    yield furnish(checkout)
    for process in leftovers(checkout):
        process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the stand-in commands of --notify lie, and what they got."""
    with notify_folder(tmp_path) as made:
        yield made

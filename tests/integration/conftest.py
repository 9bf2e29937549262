"""Fixtures that several files of whole processes share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.night_checkout import BASELINE, furnish, leftovers
from tests.waiting import wait_for


@pytest.fixture
def root(checkout: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A checkout that run.py and a night can run in, and afterwards no process that names it.

    Its train.toml is the BASELINE of the module, if that has one.
    """
    yield furnish(checkout, getattr(request.module, "BASELINE", BASELINE))
    for process in leftovers(checkout):
        process.kill()
    wait_for(lambda: not leftovers(checkout), "the end of its processes")

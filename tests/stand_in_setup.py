"""A set-up for experiments and certificates in this process: stand-ins for the pool, the terminal and the trainer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nightshift import worker
from nightshift.campaign.ledger import Ledger
from nightshift.engines import Engine
from nightshift.engines.trl.engine import TrlEngine
from nightshift.git.repo import Repo
from nightshift.guard.surroundings import Surroundings
from nightshift.records import Progress
from nightshift.request import Request
from nightshift.rules import Rules
from nightshift.setup import Setup
from tests.conftest import git
from tests.stand_in_pool import StandInPool
from tests.stand_ins import Neighbours

TESTS = Path(__file__).resolve().parent
TRAINER = TESTS / "stand_in_trainer.py"


class SilentReporter:
    """A stand-in for the terminal; `on_note` lets a test act between two runs."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.on_note: Callable[[str], None] = lambda text: None

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.on_note(text)

    def show(self, readings: Mapping[Path, Progress]) -> None:
        """Nobody looks."""


def furnish(checkout: Path) -> None:
    """Give the `checkout` fixture what the engine looks for, and code that is frozen."""
    (checkout / "models").symlink_to(TESTS.parent / "models")
    with (checkout / ".gitignore").open("a") as file:
        file.write("models\nstand-in.json\n")
    git(checkout, "commit", "--quiet", "--all", "--amend", "--no-edit")
    git(checkout, "branch", "--force", "main")


def make_setup(
    checkout: Path,
    rules: Rules,
    monkeypatch: pytest.MonkeyPatch,
    trainer: Path | None = TRAINER,
    engine: Engine | None = None,
) -> Setup:
    """`trainer` None: the real one; `engine`: another than TRL."""
    engine = engine or TrlEngine(rules, checkout, dict(os.environ), trainer=trainer)
    monkeypatch.setattr(worker, "open_engine", lambda *arguments: engine)
    monkeypatch.setattr(worker, "Watch", Neighbours)  # tests run beside each other
    return Setup(
        root=checkout,
        rules=rules,
        rules_hash=rules.hash(checkout),
        harness_tree=rules.harness_tree(checkout),
        engine=engine,
        ledger=Ledger(checkout),
        repo=Repo(checkout),
        pool=StandInPool(checkout),
        surroundings=Surroundings(checkout, path=()),
        reporter=SilentReporter(),
        request=Request(),
        now=lambda: datetime.now(UTC),
        clock=time.monotonic,
    )


@contextmanager
def during(setup: Setup, act: Callable[[Path], object]) -> Iterator[None]:
    """Act in the middle of every run."""
    assert isinstance(setup.pool, StandInPool)
    setup.pool.during = act
    try:
        yield
    finally:
        setup.pool.during = lambda folder: None

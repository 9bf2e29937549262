"""A set-up for experiments and certificates in this process: stand-ins for executor, terminal and trainer."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest
from nightshift_arithmetic import data

from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Progress, Request
from nightshift.config.rules import Rules
from nightshift.engines.base import Engine
from nightshift.engines.trl.engine import TrlEngine
from nightshift.experiment import worker
from nightshift.experiment.experiment import run_experiment
from nightshift.experiment.setup import Setup
from tests.conftest import git
from tests.stand_in_pool import StandInExecutor

TESTS = Path(__file__).resolve().parent
TRAINER = (str(TESTS / "stand_in_trainer.py"),)
LOAD = cache(data.load)  # half of the time of a stand-in experiment is the drawing of its examples
GOOD, POOR = "3e-6", "6e-7"  # of learning rates the stand-in's best, and one that is easily beaten


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
    """Give the `checkout` fixture what the engine looks for."""
    (checkout / "models").symlink_to(TESTS.parent / "models")
    with (checkout / ".gitignore").open("a") as file:
        file.write("models\nstand-in.json\n")
    git(checkout, "commit", "--quiet", "--all", "--amend", "--no-edit")
    git(checkout, "branch", "--force", "main")


def make_setup(
    checkout: Path,
    rules: Rules,
    monkeypatch: pytest.MonkeyPatch,
    trainer: Sequence[str] = TRAINER,
    engine: Engine | None = None,
) -> Setup:
    """`trainer`: words of its command; `engine`: another than TRL."""
    engine = engine or TrlEngine(rules, checkout, dict(os.environ), trainer=trainer)
    monkeypatch.setattr(worker, "open_engine", lambda *arguments: engine)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power cut here
    monkeypatch.setattr(data, "load", LOAD)
    return Setup(
        root=checkout,
        rules=rules,
        rules_hash=rules.hash(checkout),
        engine=engine,
        ledger=Ledger(checkout),
        repo=Repo(checkout),
        executor=StandInExecutor(checkout),
        variables={},
        reporter=SilentReporter(),
        request=Request(),
        now=lambda: datetime.now(UTC),
        clock=time.monotonic,
    )


def write(setup: Setup, lr: str, extra: str = "") -> bytes:
    """Put a config in place, as an agent would; `extra` keys of the orchestrator."""
    orchestrator = f"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n{extra}\n"
    source = f"max_steps = 3\n{orchestrator}[trainer.optim]\nlr = {lr}\n".encode()
    (setup.root / "train.toml").write_bytes(source)
    return source


def make_poor(checkout: Path, rules: Rules, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """A set-up whose train.toml, as it is committed, is poor."""
    furnish(checkout)
    setup = make_setup(checkout, rules, monkeypatch)
    write(setup, POOR)
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline config")
    return setup


def keep(setup: Setup) -> Setup:
    """The same after one more experiment, which is kept."""
    write(setup, GOOD)
    assert run_experiment(Request(), setup).status == "keep"
    return setup


@contextmanager
def during(setup: Setup, act: Callable[[Path], object]) -> Iterator[None]:
    assert isinstance(setup.executor, StandInExecutor)
    setup.executor.during = act
    try:
        yield
    finally:
        setup.executor.during = lambda folder: None

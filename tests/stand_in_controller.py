"""A set-up for experiments and certificates in this process: stand-ins for executor, terminal and trainer."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Progress, Request, Weights
from nightshift.config.rules import Rules
from nightshift.engines.base import Engine
from nightshift.errors import EngineError
from nightshift.experiment import worker
from nightshift.experiment.experiment import Bench, Controller
from tests.conftest import git
from tests.stand_in_pool import StandInExecutor
from tests.stand_ins import StandInTrl

TESTS = Path(__file__).resolve().parent
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


def make_controller(
    checkout: Path,
    rules: Rules,
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine | None = None,
) -> Controller:
    """`engine`: another than TRL."""
    engine = engine or StandInTrl(rules, checkout, dict(os.environ))
    monkeypatch.setattr(worker, "open_engine", lambda *arguments: engine)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power cut here
    bench = Bench(
        root=checkout,
        rules=rules,
        rules_hash=rules.hash(checkout),
        engine=engine,
        executor=StandInExecutor(checkout),
        request=Request(),
    )
    return Controller(bench, Ledger(checkout), Repo(checkout), SilentReporter())


def with_bench(controller: Controller, **fields: Any) -> Controller:
    """The same with another bench. `fields`: of Bench."""
    return replace(controller, bench=replace(controller.bench, **fields))


def write(controller: Controller, lr: str, extra: str = "") -> bytes:
    """Put a config in place, as an agent would; `extra` keys of the orchestrator."""
    orchestrator = f"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n{extra}\n"
    source = f"max_steps = 3\n{orchestrator}[trainer.optim]\nlr = {lr}\n".encode()
    (controller.bench.root / "train.toml").write_bytes(source)
    return source


def make_poor(checkout: Path, rules: Rules, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """A set-up whose train.toml, as it is committed, is poor."""
    furnish(checkout)
    controller = make_controller(checkout, rules, monkeypatch)
    write(controller, POOR)
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline config")
    return controller


def keep(controller: Controller) -> Controller:
    """The same after one more experiment, which is kept."""
    write(controller, GOOD)
    assert controller.run(Request()).status == "keep"
    return controller


class StandInProof:
    """A proof that ends after `num_looks` looks, and fails if `is_bad`."""

    def __init__(self, run_dir: Path, num_looks: int, is_bad: bool) -> None:
        self.run_dir, self.num_looks, self.is_bad, self.is_done = run_dir, num_looks, is_bad, False

    def is_over(self) -> bool:
        self.num_looks -= 1
        return self.num_looks < 0

    def result(self) -> str:
        assert self.num_looks < 0
        self.is_done = True
        if self.is_bad:
            raise EngineError("the server did not serve the file")
        return "served = file: proven"

    def close(self) -> None:
        assert self.is_done, "a proof was cut off"


def install_proofs(
    monkeypatch: pytest.MonkeyPatch, num_looks: int, is_bad: Callable[[Path], bool]
) -> list[StandInProof]:
    """Have the engine prove by stand-ins whose weights exist. Return the proofs that began, as they begin."""
    proofs = list[StandInProof]()

    def begin(engine: Engine, run_dir: Path, weights: Weights, note: object) -> StandInProof:
        proofs.append(StandInProof(run_dir, num_looks, is_bad(run_dir)))
        return proofs[-1]

    monkeypatch.setattr(StandInTrl, "start_proof", begin)
    return proofs


@contextmanager
def during(controller: Controller, act: Callable[[Path], object]) -> Iterator[None]:
    assert isinstance(controller.bench.executor, StandInExecutor)
    controller.bench.executor.during = act
    try:
        yield
    finally:
        controller.bench.executor.during = lambda folder: None

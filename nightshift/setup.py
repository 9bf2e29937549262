"""The Lab that experiments run in: which set-up this machine and these flags mean."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Protocol

from nightshift import environments
from nightshift.campaign.campaign import fixed_by
from nightshift.campaign.ledger import Ledger
from nightshift.engines import Engine, ProgressCallback
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import UsageError
from nightshift.git.repo import Repo
from nightshift.processes.gpus import num_gpus, parse_gpus
from nightshift.records import Record, Side
from nightshift.rules import Rules, pick_rules

_VERSIONED = ("nightshift", "torch", "transformers", "trl")


class Reporter(Protocol):
    """Where an experiment tells how it goes; console.py implements it."""

    def note(self, text: str) -> None:
        """One line of news."""
        ...

    def progress(self, record: Record, run_index: int, side: Side) -> ProgressCallback:
        """A callback for the live line of one run."""
        ...


@dataclass(frozen=True, slots=True)
class Lab:
    """All that an experiment needs of the world."""

    root: Path
    rules: Rules
    rules_hash: str
    engine: Engine
    ledger: Ledger
    repo: Repo
    reporter: Reporter
    now: Callable[[], datetime]  # aware, UTC
    clock: Callable[[], float]  # monotonic seconds
    versions: Mapping[str, str]


def open_engine(rules: Rules, root: Path, gpus: str | None = None, keep_all: bool = False) -> Engine:
    """The engine that the rules name. `gpus` is --gpus, for prime-rl. UsageError for a flag that does not fit."""
    environment = dict(os.environ)
    if rules.engine == "trl":
        if gpus is not None:
            raise UsageError(f"--gpus {gpus} is for --engine prime-rl", "Choose the GPU with CUDA_VISIBLE_DEVICES.")
        return TrlEngine(rules, root, environment)
    from nightshift.engines.prime_rl.engine import (
        PrimeRlEngine,  # loads an HTTP client, which the other engine never needs
    )
    from nightshift.engines.prime_rl.installation import Installation, Pins

    gpu_ids = None if gpus is None else parse_gpus(gpus)
    installation = Installation.find(Pins.read(root / "pyproject.toml"), environment)
    return PrimeRlEngine(rules, root, environment, installation, gpu_ids, keep_all=keep_all)


def open_lab(
    root: Path,
    engine: str | None,
    budget_seconds: float | None,
    reporter: Reporter,
    gpus: str | None = None,
    keep_all: bool = False,
) -> Lab:
    """Everything an experiment needs, for this machine and these flags.

    On a campaign branch without --engine, the engine of its first experiment is taken. UsageError where Python
    would not import what the rules hash.
    """
    ledger, repo = Ledger(root), Repo(root)
    if engine is None and (head := repo.head()).is_campaign:
        first = fixed_by(ledger.records(), head)
        engine = first.engine if first else None
    rules = pick_rules(engine, num_gpus(os.environ), environments.chosen(root))
    environments.load(root, rules.environments)
    if budget_seconds is not None:
        rules = rules.with_budget(budget_seconds)
    return Lab(
        root=root,
        rules=rules,
        rules_hash=rules.hash(root),
        engine=open_engine(rules, root, gpus, keep_all),
        ledger=ledger,
        repo=repo,
        reporter=reporter,
        now=lambda: datetime.now(UTC),
        clock=time.monotonic,
        versions={"python": platform.python_version(), **{name: metadata.version(name) for name in _VERSIONED}},
    )

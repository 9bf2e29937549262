"""What turns (config, seed, budget) into a trained policy.

An engine starts processes; supervise owns them. Metrics come from structured files, never from log
text. Every engine passes the same contract suite (tests/contract).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from nightshift.records import Completion, Decoding, Progress, Training, Weights
from nightshift.train_toml.config import Config
from nightshift.train_toml.keys import KEYS

ProgressCallback = Callable[[Progress], None]
Message = Mapping[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class Effective:
    """What an engine makes of a config: two configs with equal `settings` train the same.

    `unused`: keys of train.toml that this engine does not use.
    """

    settings: Mapping[str, Any]
    unused: tuple[str, ...]


class Session(Protocol):
    """One run: processes are up and ready to train when `Engine.open` returns."""

    def train(self, budget_seconds: float, progress: ProgressCallback) -> Training:
        """Train until the budget ends or max_steps is reached. Never raises for a failed run."""
        ...

    def load_final_weights(self) -> Weights:
        """Load the last complete weights written before the end into what completes, and prove which."""
        ...

    def complete(
        self, prompts: Sequence[Sequence[Message]], decoding: Decoding, progress: ProgressCallback
    ) -> list[Completion]:
        """One completion a prompt, in order. Raises EngineError when the policy cannot answer."""
        ...

    def close(self) -> None:
        """Stop every process of the run and verify that none is left. Safe to call twice."""
        ...


class Engine(Protocol):
    """A way to train: `trl` (CPU or one GPU) or `prime-rl` (two GPUs)."""

    name: str

    def check(self) -> list[str]:
        """Problems that make a run impossible, each one line with its fix; empty when ready."""
        ...

    def hardware(self) -> str:
        """The kind of hardware, e.g. `cpu x86_64, 2 cores`: a campaign stays on one kind."""
        ...

    def validate(self, config: Config) -> Effective:
        """The engine's own settings for a checked train.toml. ConfigError for a value it cannot express."""
        ...

    def describe(self, settings: Mapping[str, Any], seed: int, run_dir: Path) -> list[str]:
        """What `open` would start, for --dry-run: command lines and their files, nothing written or started."""
        ...

    def open(self, settings: Mapping[str, Any], seed: int, run_dir: Path, deadline_seconds: float) -> Session:
        """Start the processes of one run and wait until they can train. Raises EngineError with the cause.

        `deadline_seconds` is the hard stop of the whole run, counted from this call.
        """
        ...


def used_keys(engine: Engine, config: Config) -> frozenset[str]:
    """Every open key but those of which the engine says that it does not use them.

    It is asked with a file that spells out every key that applies to `config`; what applies to other
    variants only is taken for used.
    """
    spelled_out = replace(config, values=config.resolved)
    return frozenset(key.path for key in KEYS) - set(engine.validate(spelled_out).unused)

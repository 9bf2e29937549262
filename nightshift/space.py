"""The search space of TPE and random search: the allow-list's keys that the engine uses, each with a sensible box."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nightshift.config import Config
from nightshift.values import Key, Value


class Scale(StrEnum):
    """How the values of a dimension are spread."""

    LOG = "log"
    LINEAR = "linear"
    POWER_OF_TWO = "power of two"  # searched by its exponent
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Dimension:
    """One searched key. `name` is its path, with the variant added where a path has several entries."""

    name: str
    key: Key
    scale: Scale
    low: float
    high: float
    choices: tuple[Value, ...]
    reason: str

    def sample(self, random_source: random.Random) -> Value:
        """A value from the box."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The dimensions around one incumbent."""

    dimensions: tuple[Dimension, ...]
    incumbent: Config

    @classmethod
    def for_engine(
        cls, used_keys: AbstractSet[str] | None, incumbent: Config, num_steps: float | None = None
    ) -> SearchSpace:
        """`used_keys`: what the engine uses, None for every key. `num_steps` of the incumbent's run: with it
        schedules that need max_steps are searched too.
        """
        raise NotImplementedError

    def build(self, choose: Callable[[Dimension], Value]) -> bytes:
        """A train.toml with every applicable dimension chosen by `choose`, comments and other keys kept."""
        raise NotImplementedError

    def sample(self, random_source: random.Random) -> bytes:
        """A train.toml at random."""
        return self.build(lambda dimension: dimension.sample(random_source))

    def params(self, config: Config) -> dict[str, Any] | None:
        """A config as Optuna parameters by dimension name; None if it lies outside the space."""
        raise NotImplementedError

    def to_distributions(self) -> Mapping[str, Any]:
        """Optuna distributions by dimension name."""
        raise NotImplementedError

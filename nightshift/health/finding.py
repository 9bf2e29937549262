"""What a check finds, and what it knows of a run beside its curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from nightshift.records import Result


class Severity(IntEnum):
    """What is at stake; findings are shown from the highest down."""

    NOTE = 0  # where the time went
    HINT = 1  # something to know for the next hypothesis
    COSTLY = 2  # it learns, but a good part of the budget or of the signal is lost
    BROKEN = 3  # it learnt nothing, or lost again what it had learnt


@dataclass(frozen=True, slots=True)
class Finding:
    """One line with its number, and the train.toml keys that it points to."""

    text: str
    keys: tuple[str, ...]
    severity: Severity

    def __str__(self) -> str:
        return f"{self.text} [{', '.join(self.keys)}]" if self.keys else self.text


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the digest knows of a run beside its curves.

    `values`: the config's keys with defaults (Config.resolved). `used_keys`: what the engine uses, None for every
    key; a finding points to no other. `remarks`: what its scores hide (Campaign.remarks).
    """

    run: Result
    budget_seconds: float
    values: Mapping[str, Any]
    used_keys: AbstractSet[str] | None = None
    remarks: Sequence[str] = ()

"""What a check finds, and what it knows of a run beside its curves."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from nightshift.records import Outcome, Result


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
    """What the digest knows of a run beside its curves; None is not measured.

    `values`: the config's keys with defaults (Config.resolved). `used_keys`: what the engine uses, None for every
    key; a finding points to no other.
    """

    budget_seconds: float | None = None
    training_seconds: float | None = None
    startup_seconds: float | None = None
    evaluation_seconds: float | None = None
    evaluation_truncated_share: float | None = None
    outcome: Outcome | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    used_keys: AbstractSet[str] | None = None


def conditions_of(
    run: Result, budget_seconds: float, values: Mapping[str, Any], used_keys: AbstractSet[str] | None = None
) -> Conditions:
    """The conditions of a recorded run under `values` (Config.resolved)."""
    return Conditions(
        budget_seconds=budget_seconds,
        training_seconds=run.training.training_seconds,
        startup_seconds=run.startup_seconds,
        evaluation_seconds=run.evaluation.seconds if run.evaluation else None,
        evaluation_truncated_share=run.evaluation.truncated_share if run.evaluation else None,
        outcome=run.training.outcome,
        values=values,
        used_keys=used_keys,
    )

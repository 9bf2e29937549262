"""The RL health digest: what the curves of a run say is wrong, in five lines that an agent can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from nightshift.metrics import Step
from nightshift.records import Outcome, Run

MAX_FINDINGS = 5


class Severity(IntEnum):
    """What is at stake; findings are shown from the highest down."""

    NOTE = 0  # a fact: where the time went
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
class Facts:
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


def facts_of(
    run: Run, budget_seconds: float, values: Mapping[str, Any], used_keys: AbstractSet[str] | None = None
) -> Facts:
    """The facts of a recorded run under `values` (Config.resolved)."""
    evaluation = run.evaluation
    return Facts(
        budget_seconds=budget_seconds,
        training_seconds=run.training.training_seconds,
        startup_seconds=run.startup_seconds,
        evaluation_seconds=evaluation.seconds if evaluation else None,
        evaluation_truncated_share=evaluation.truncated_share if evaluation else None,
        outcome=run.training.outcome,
        values=values,
        used_keys=used_keys,
    )


def examine(steps: Sequence[Step], facts: Facts) -> list[Finding]:
    """At most five findings, the worst first; one line that says so when all is well; empty without steps."""
    raise NotImplementedError


def digest(steps: Sequence[Step], facts: Facts) -> str:
    """`examine` as plain text, one finding a line."""
    return "\n".join(map(str, examine(steps, facts)))

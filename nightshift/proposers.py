"""Who proposes the next train.toml: the protocol, and the two proposers without a language model.

A proposer sees the ledger only, and gives a whole train.toml back. Everything it says is checked
like any other train.toml before it runs; agent.py has the proposer that asks a coding agent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nightshift.ledger import Ledger
from nightshift.records import Record
from nightshift.rules import Rules


@dataclass(frozen=True, slots=True)
class Context:
    """What the next proposal is made from.

    `records`: the closed experiments of this branch and rules hash, in order, failures included.
    `refusals`: why earlier proposals for this same experiment were not taken, one line each.
    """

    number: int  # of the experiment to come
    incumbent: Record
    source: bytes  # the incumbent's train.toml
    records: tuple[Record, ...]
    rules: Rules
    ledger: Ledger
    refusals: tuple[str, ...] = ()
    new_direction: bool = False  # nothing was kept for long: try something else
    seconds_left: float | None = None  # until the night ends


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed train.toml, or `source` None and the one-line `cause` why there is none.

    `lesson` is about the experiment before; `notes` name what the proposer did beside its one task.
    """

    source: bytes | None
    hypothesis: str = ""
    prediction: str | None = None
    lesson: str | None = None
    notes: tuple[str, ...] = ()
    cause: str | None = None


class Proposer(Protocol):
    """Makes one proposal at a time; keeps no state that the ledger does not hold."""

    name: str

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """The next proposal. Returns soon, without one, once `is_stopping` says so.

        Raises EngineError when the machinery is missing or broken.
        """
        ...

"""Who proposes the next train.toml.

A proposer sees the ledger only, and gives a whole train.toml back. Everything it says is checked like any other
train.toml before it runs. agent.py asks a coding agent; search.py needs no language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from nightshift.agents.history import load_configs
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Cost, Record
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config


@dataclass(frozen=True)
class Context:
    """What the next proposal is made from.

    `campaign`: the decided experiments of this branch and rules hash, in order, crashes included.
    `refusals`: why earlier proposals for this same experiment were not taken, one line each.
    """

    number: int  # of the experiment to come
    incumbent: Record
    source: bytes  # the train.toml that the next idea is tried on
    base: tuple[int, ...]  # the ideas that it holds, by experiment
    campaign: Campaign
    rules: Rules
    ledger: Ledger
    used_keys: AbstractSet[str] | None = None  # what the engine uses; None: every open key
    refusals: tuple[str, ...] = ()
    in_flight: tuple[Record, ...] = ()  # what runs now: not decided yet
    waiting: tuple[Proposal, ...] = ()  # what runs next: not begun
    flips: tuple[str, ...] = ()  # by kind of problem, how many the last one fixed and broke
    new_direction: bool = False  # nothing was kept for long: try something else
    seconds_left: float | None = None  # until the night ends

    @cached_property
    def configs(self) -> Mapping[int, Config]:
        """What the decided experiments submitted, by number, as `load_configs` says."""
        return load_configs(self.ledger, self.campaign.decided)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed train.toml; `source` is None where there was no edit at all.

    `cause`: why it cannot be taken, in one line. `lesson` is about the experiment before; `notes` name what the
    proposer did beside its one task. `repeats`: the experiment whose train.toml a night runs again by itself.
    `proposer`: who made it; empty where the night did. `mechanism` and `refuted_by` belong to the hypothesis,
    `told_outcome` to the lesson.
    """

    source: bytes | None
    hypothesis: str = ""
    prediction: str | None = None
    mechanism: str | None = None
    refuted_by: str | None = None
    told_outcome: str | None = None
    lesson: str | None = None
    proposer: str = ""
    notes: tuple[str, ...] = ()
    cause: str | None = None
    repeats: int | None = None
    base: tuple[int, ...] | None = None  # the ideas of the train.toml that it was made from
    cost: Cost | None = None  # of the agents that were asked for it, each of them; None: nobody was asked


class Proposer(Protocol):
    """Makes one proposal at a time; keeps no state that the ledger does not hold."""

    @property
    def name(self) -> str:
        """What the person calls it."""
        ...

    @property
    def is_walled(self) -> bool:
        """Whether nothing that it asks can write in the checkout."""
        ...

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """The next proposal. Returns soon, without one, once `is_stopping` says so.

        Raises EngineError when the machinery is missing or broken.
        """
        ...

"""The interface of a proposer: what it gets, and what it answers.

A proposer reads the ledger and answers with whole train.toml files, which are checked like any other before they run.
agent.py asks a coding agent; search.py needs no language model.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from msgspec import structs

from nightshift.agents.availability import Availability
from nightshift.agents.history import Memory, history, load_configs
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Change, Proposal, Record
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config, parse


@dataclass(frozen=True)
class Context:
    """The input of a proposal."""

    number: int  # of the experiment to come
    source: bytes  # the incumbent's train.toml
    campaign: Campaign  # the decided experiments of this branch and rules hash, crashes included
    rules: Rules
    ledger: Ledger
    rider: Change | None = None  # a discarded change that the run holds too, if the proposal sets none of its keys
    used_keys: AbstractSet[str] | None = None  # what the engine uses; None: every open key
    refusals: tuple[str, ...] = ()  # causes of earlier refusals for this same experiment, one line each
    in_flight: tuple[Record, ...] = ()  # experiments that run now
    waiting: tuple[Answer, ...] = ()  # proposals that run next
    weakest: str = ""  # where the incumbent scores worst (report/slices.py)
    seconds_left: float | None = None  # until the night ends
    runs_left: int | None = None  # until the night ends, this one included
    direction: str = ""  # the user's, at most 1,500 characters
    num_proposals: int = 1  # that are wanted at most

    @property
    def incumbent_run(self) -> Record:
        """The last run of the incumbent's config, or of the last kept change if no run had exactly that config."""
        run = self.campaign.incumbent_run or self.campaign.parent
        assert run is not None
        return run

    @cached_property
    def configs(self) -> Mapping[int, Config]:
        """The configs of the decided experiments, by number, as `load_configs` says."""
        return load_configs(self.ledger, self.campaign.decided)

    @cached_property
    def memory(self) -> Memory:
        """The table of the campaign's runs, and the scores by key and value."""
        return history(self.campaign, self.configs, parse(self.source), self.used_keys)


@dataclass(frozen=True, slots=True)
class Answer:
    """One proposal: a train.toml and its hypothesis. The fields from `number` on are set when the answer is taken."""

    source: bytes | None  # None if train.toml was not edited at all
    proposal: Proposal = field(default_factory=Proposal)
    lessons: dict[int, dict[str, str]] = field(default_factory=dict)  # of decided experiments (notebook.py)
    cause: str | None = None  # why the answer cannot be taken, in one line
    is_stopped: bool = False  # the agent was stopped with the night, so nobody waits for the answer
    unavailable: Availability | None = None  # the agent could not be asked, so nothing was proposed
    number: int = 0  # of the experiment that the proposal was made for
    change: Change | None = None
    rider: Change | None = None  # the change that the run measures again
    direction: str = ""  # the user's direction then

    def with_proposal(self, **changes: Any) -> Answer:
        return replace(self, proposal=structs.replace(self.proposal, **changes))


# Yields about twice a second while a program works; sending True stops the program. Returns the answers.
Proposing = Generator[None, bool | None, tuple[Answer, ...]]


class Proposer(Protocol):
    """Makes proposals; keeps no state that the ledger does not hold. `name`: what you call it. `sandbox`: in which its
    agents work, empty if it asks none. `is_instant`: it takes about a second, so it is asked when a slot is free, not
    before."""

    @property
    def name(self) -> str: ...
    @property
    def sandbox(self) -> str: ...
    @property
    def is_instant(self) -> bool: ...
    def propose(self, context: Context) -> Proposing:
        """Make at most `context.num_proposals` proposals, and at least one answer. EngineError if the infrastructure is
        missing or broken."""

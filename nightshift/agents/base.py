"""The interface of a proposer: its input (Context) and its output (Answer).

A proposer reads the ledger and answers with whole train.toml files, which are checked before they run. agent.py asks a
coding agent; search.py needs no language model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping
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
    """The input of a proposer."""

    number: int  # of the next experiment
    source: bytes  # the incumbent's train.toml
    campaign: Campaign  # the decided experiments of this branch and rules hash, crashes included
    rules: Rules
    ledger: Ledger
    used_keys: Collection[str]  # by the engine
    refusals: tuple[str, ...] = ()  # causes why earlier proposals for this experiment were refused, one line each
    in_flight: tuple[Record, ...] = ()  # running experiments
    waiting: tuple[Answer, ...] = ()  # accepted proposals that run next
    weakest: str = ""  # the problems on which the incumbent scores worst (report/slices.py)
    seconds_left: float = math.inf  # until the night ends
    runs_left: float = math.inf  # until the night ends, including this experiment
    direction: str = ""  # the user's, at most 1,500 characters
    num_proposals: int = 1  # at most

    @property
    def incumbent_run(self) -> Record:
        """The last run with exactly the incumbent's config, or else the run of the last kept change."""
        run = self.campaign.incumbent_run or self.campaign.parent
        assert run is not None
        return run

    @cached_property
    def configs(self) -> Mapping[int, Config]:
        """The configs of the decided experiments by number (see load_configs)."""
        return load_configs(self.ledger, self.campaign.decided)

    @cached_property
    def memory(self) -> Memory:
        """The results of the campaign: its runs, and the scores by key and value."""
        return history(self.campaign, self.configs, parse(self.source), self.used_keys)


@dataclass(frozen=True, slots=True)
class Answer:
    """One proposal: a train.toml and its hypothesis. The fields from `number` on are set when a night accepts it."""

    source: bytes | None  # None: train.toml was not edited
    proposal: Proposal = field(default_factory=Proposal)
    lessons: dict[int, dict[str, str]] = field(default_factory=dict)  # of decided experiments (notebook.py)
    cause: str | None = None  # why the proposal is refused, in one line
    is_stopped: bool = False  # the agent was stopped because the night ended
    unavailable: Availability | None = None  # why the agent made no proposal
    number: int = 0  # of the next experiment at that time
    change: Change | None = None
    direction: str = ""  # the user's direction at that time

    def with_proposal(self, **changes: Any) -> Answer:
        return replace(self, proposal=structs.replace(self.proposal, **changes))


# Yields about twice a second while a program works; sending True stops the program. Returns the answers.
Proposing = Generator[None, bool | None, tuple[Answer, ...]]


class Proposer(Protocol):
    """Makes proposals from the ledger alone, without state of its own. `sandbox`: of its agents, "" without agents.
    `is_instant`: a proposal needs about a second, so the night asks when a slot is free, not before."""

    @property
    def name(self) -> str: ...
    @property
    def sandbox(self) -> str: ...
    @property
    def is_instant(self) -> bool: ...
    def propose(self, context: Context) -> Proposing:
        """Return one to `context.num_proposals` answers. Raises EngineError for a failure of the infrastructure."""

"""Who proposes the next train.toml: the protocol, and the two proposers without a language model.

A proposer sees the ledger only, and gives a whole train.toml back. Everything it says is checked
like any other train.toml before it runs; agent.py has the proposer that asks a coding agent.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from nightshift import config as configs
from nightshift.ledger import Ledger
from nightshift.records import Record
from nightshift.rules import Rules
from nightshift.space import SearchSpace


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
    used_keys: AbstractSet[str] | None = None  # what the engine uses; None: every open key
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

    @property
    def name(self) -> str:
        """What the person calls it."""
        ...

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """The next proposal. Returns soon, without one, once `is_stopping` says so.

        Raises EngineError when the machinery is missing or broken.
        """
        ...


@dataclass(frozen=True, slots=True)
class RandomProposer:
    """Draws from the search space: what every other proposer has to beat."""

    seed: int
    name: str = "random"

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """One draw; the same ledger and seed give the same one."""
        source = space_of(context).sample(random.Random(_seed(self.seed, context)))
        return Proposal(source, _hypothesis(self.name, context.source, source))


def space_of(context: Context) -> SearchSpace:
    """The search space around the incumbent."""
    steps = [run.training.num_steps for run in context.incumbent.runs if run.evaluation is not None]
    num_steps = sum(steps) / len(steps) if steps else None
    return SearchSpace.for_engine(context.used_keys, configs.parse(context.source), num_steps)


def _seed(seed: int, context: Context) -> int:
    """A seed of its own for every proposal, also for one that follows a refusal; a resumed night repeats none."""
    return random.Random(f"{seed} {len(context.records)} {len(context.refusals)}").getrandbits(32)


def _hypothesis(name: str, incumbent: bytes, candidate: bytes) -> str:
    return f"{name}: {'; '.join(configs.diff(configs.parse(incumbent), configs.parse(candidate)))}"

"""Chance: what every other proposer has to beat."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from nightshift.errors import ConfigError
from nightshift.proposers import Context, Proposal
from nightshift.proposers.space import Dimension, SearchSpace
from nightshift.train_toml.config import diff, parse
from nightshift.train_toml.values import Value, shorten

_MAX_HYPOTHESIS = 200


@dataclass(frozen=True, slots=True)
class RandomProposer:
    """Draws from the search space."""

    seed: int
    name: str = "random"

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """One draw; the same ledger and seed give the same one."""
        draws = random.Random(seed_of(self.seed, context))
        return proposal_of(self.name, space_of(context), lambda dimension: dimension.sample(draws))


def proposal_of(name: str, space: SearchSpace, choose: Callable[[Dimension], Value]) -> Proposal:
    """The proposal whose values `choose` gives; one with a cause where they fit no train.toml."""
    try:
        source = space.build(choose)
    except ConfigError as error:
        return Proposal(b"", cause=str(error))
    changes = "; ".join(change.line for change in diff(space.incumbent, parse(source)))
    return Proposal(source, shorten(f"{name}: {changes}", _MAX_HYPOTHESIS))


def space_of(context: Context) -> SearchSpace:
    """The search space around the incumbent."""
    steps = [run.training.num_steps for run in context.incumbent.runs if run.evaluation is not None]
    num_steps = sum(steps) / len(steps) if steps else None
    return SearchSpace.for_engine(context.used_keys, parse(context.source), num_steps)


def seed_of(seed: int, context: Context) -> int:
    """A seed of its own for every proposal, also for one that follows a refusal; a resumed night repeats none."""
    return random.Random(f"{seed} {len(context.campaign.decided)} {len(context.refusals)}").getrandbits(32)

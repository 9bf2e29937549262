"""The config that the next idea is tried on: a set of ideas that were tried before, put together in one train.toml.

A night draws the set from what is believed of the effects, so that ideas meet each other and a doubtful one is measured
again, in or out, at no extra run: Thompson sampling. Towards the end it takes what is expected to be best instead, for
only a config that was run can become the incumbent.
An idea is the keys that an experiment set, with its values; whichever file comes out is written, shown to the proposer
and hashed before anything runs.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from nightshift.campaign.campaign import Campaign, is_set
from nightshift.campaign.records import Record
from nightshift.config.toml_edit import ABSENT, set_values
from nightshift.config.train_toml import Config, parse
from nightshift.errors import UsageError

DRAWN_UNTIL = 0.87  # of a night; 0.92 gains as much, 0.80 a little less
GREEDY_EVERY = 3  # experiments of a night without an end

_FIX = "Start from the incumbent's: git checkout train.toml."

Stored = Callable[[Record], Config]  # the config that an experiment ran; UsageError where it cannot be had any more


def is_drawn(place: int, used: float | None) -> bool:
    """Whether the next set is drawn: after so many experiments, and so much of the night, None where it has no end."""
    return place % GREEDY_EVERY != 0 if used is None else used < DRAWN_UNTIL


def chosen(campaign: Campaign, rng: np.random.Generator | None) -> frozenset[int]:
    """The ideas that the next one is tried with: those whose effect is above 0, as drawn from the belief (Thompson
    1933), or as expected where there is no `rng`; of two that set one key the better one."""
    belief, found = campaign.belief, frozenset[int]()
    assert belief is not None
    effects = belief.effects if rng is None else belief.draw(rng)
    for place in np.argsort(-effects[1:], kind="stable") + 1:
        more = found | {int(belief.ideas[place])}
        if effects[place] > 0 and is_set(campaign.ideas, more):
            found = more
    return found


def made_of(campaign: Campaign, record: Record) -> frozenset[int] | None:
    """The ideas of a decided config, its own with them; None where one of them is forgotten."""
    if record.parent is None:  # the baseline
        return frozenset()
    own = campaign.ideas.get(record.number)
    if own is None or record.proposal.base is None or not is_set(campaign.ideas, record.proposal.base):
        return None
    return frozenset(record.proposal.base) - own.replaced | {record.number}


def base_of(campaign: Campaign, record: Record, stored: Stored) -> tuple[int, ...] | None:
    """The ideas of a config that is run once more; None where they cannot be put together any more."""
    ideas = made_of(campaign, record)
    try:
        return None if ideas is None else start_from(campaign, tuple(sorted(ideas)), stored)[0]
    except UsageError:
        return None


def next_base(
    campaign: Campaign, used: float | None, stored: Stored, check: Callable[[Config], object], num_open: int = 0
) -> tuple[tuple[int, ...], Config]:
    """The ideas that the next one joins, by experiment, and the config that they make: the incumbent's where another
    set cannot be put together, or `check` raises UsageError for it.

    The same records, and the same number of ideas that are `num_open` (in flight, or waiting), give the same draw, so
    that a night that was cut off goes on with it.
    """
    assert campaign.incumbent is not None
    seed = hashlib.sha256(f"{campaign.incumbent.branch} {campaign.incumbent.rules_hash}".encode()).digest()
    place = len(campaign.decided)
    rng = np.random.default_rng([int.from_bytes(seed[:8]), place + num_open])
    ideas = chosen(campaign, rng if is_drawn(place, used) else None)
    try:
        config = combine(campaign, ideas, stored)
        check(config)
    except UsageError:  # no train.toml holds them all, or it could not run
        ideas = campaign.ideas_of(campaign.incumbent)
        config = combine(campaign, ideas, stored)
    return tuple(sorted(ideas)), config


def start_from(
    campaign: Campaign, base: tuple[int, ...] | None, stored: Stored
) -> tuple[tuple[int, ...] | None, Config | None]:
    """What a candidate was made from: the ideas, the incumbent's for None, and their config; None before a baseline."""
    if campaign.incumbent is None:
        return None, None
    base = tuple(sorted(campaign.ideas_of(campaign.incumbent))) if base is None else base
    return base, combine(campaign, frozenset(base), stored)


def combine(campaign: Campaign, ideas: frozenset[int], stored: Stored) -> Config:
    """A train.toml with these ideas and no others: a kept one, or the incumbent's with what is different.

    UsageError where they cannot stand together, or one of them is gone.
    """
    assert campaign.incumbent is not None
    for record in (campaign.incumbent, *campaign.kept):
        if campaign.ideas_of(record) == ideas:
            return stored(record)
    if not is_set(campaign.ideas, ideas):
        names = ", ".join(f"{number:04d}" for number in sorted(ideas))
        raise UsageError(f"the ideas of {names} make no train.toml: forgotten, or of one key", _FIX)
    incumbent, values = stored(campaign.incumbent), dict[str, Any](stored(campaign.kept[0]).values)
    for record in campaign.decided:
        if record.number in ideas:
            config = stored(record)
            values |= {key: config.values.get(key, ABSENT) for key in campaign.ideas[record.number].keys}
    wanted = {key: value for key, value in values.items() if value is not ABSENT}
    before, keys = incumbent.values, dict.fromkeys([*incumbent.values, *values])
    changes = {key: values.get(key, ABSENT) for key in keys if before.get(key, ABSENT) != values.get(key, ABSENT)}
    try:
        made = parse(set_values(incumbent.source, changes))
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # tables that do not fit into each other
        raise UsageError(f"the ideas make no train.toml: {error}", _FIX) from None
    # Where one idea switches off what another needs, the file is of fewer; and so it is where it is a known one's.
    if dict(made.values) != wanted or any(made.hash == record.config_hash for record in campaign.kept):
        raise UsageError("the ideas cannot stand side by side in one train.toml", _FIX)
    return made

"""Which keys matter, by the campaign's own belief: the effects of the ideas that set them, with 95 % intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.expected import Expected
from nightshift.report.data import Experiment
from nightshift.report.panels import lowest_shown
from nightshift.report.text import half

WIDTH = 1000.0  # of the axis that all bars share
_MAX_KEYS, _MAX_IDEAS = 12, 3
_MARGIN = 0.04  # of the axis, at both ends


@dataclass(frozen=True, slots=True)
class Effect:
    """One idea: what it adds to the baseline's score. `value`: what it set the key to, empty where a later idea took
    that over; `is_shared`: it set other keys, too. `x`, `low` and `high` stand on the axis, cut off at its ends."""

    number: int
    value: str
    effect: Expected
    is_shared: bool
    is_standing: bool  # part of the incumbent
    x: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Importance:
    """One key with the ideas that set it, those of the largest effects; `num_more` are left out."""

    key: str
    effects: tuple[Effect, ...]
    num_more: int


@dataclass(frozen=True, slots=True)
class Importances:
    """The keys of the largest effects first; `num_more` are left out. `zero` stands on the axis."""

    keys: tuple[Importance, ...]
    num_more: int
    zero: float


def importances(campaign: Campaign, experiments: Sequence[Experiment]) -> Importances | None:
    """Of all keys that remembered ideas set; None where there is none. An idea of several keys is counted for each."""
    belief = campaign.belief
    found = defaultdict[str, list[tuple[int, Expected]]](list)
    for place, number in enumerate(map(int, belief.ideas) if belief else ()):
        if belief is not None and (idea := campaign.ideas.get(number)) is not None:
            mean, sd = belief.of(np.eye(len(belief.ideas))[place])
            for key in sorted(idea.keys):
                found[key].append((number, Expected(float(mean), float(sd))))
    if not found:
        return None
    ranked = {key: sorted(each, key=lambda one: -abs(one[1].mean)) for key, each in found.items()}
    keys = sorted(ranked, key=lambda key: (-abs(ranked[key][0][1].mean), key))
    shown = {key: ranked[key][:_MAX_IDEAS] for key in keys[:_MAX_KEYS]}
    told = [effect for each in shown.values() for _, effect in each]
    floor = lowest_shown([100 * effect.mean for effect in told]) / 100
    ends = [0.0, *(e.mean + sign * half(e.stderr) for e in told if e.mean >= floor for sign in (-1, 1))]
    least, width = min(ends), (max(ends) - min(ends)) or 1.0
    by_number = {e.number: e for e in experiments}

    def x(value: float) -> float:
        place = _MARGIN + (1 - 2 * _MARGIN) * (value - least) / width
        return WIDTH * min(max(place, 0.0), 1.0)

    def drawn(key: str, number: int, effect: Expected) -> Effect:
        low, high = (x(effect.mean + sign * half(effect.stderr)) for sign in (-1, 1))
        e = by_number.get(number)
        value = next((c.new or "unset" for c in e.changes if c.key == key), "") if e else ""
        is_shared, is_standing = len(campaign.ideas[number].keys) > 1, number in campaign.parts
        return Effect(number, value, effect, is_shared, is_standing, x(effect.mean), low, high)

    return Importances(
        tuple(
            Importance(key, tuple(drawn(key, *one) for one in each), len(ranked[key]) - len(each))
            for key, each in shown.items()
        ),
        len(keys) - len(shown),
        x(0.0),
    )

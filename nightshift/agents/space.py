"""The search space of random, tpe and search: the allow-list's keys that the engine uses, each in its box.

A config is a point of the unit cube: each key has a place in its box, from 0 to 1. A proposal changes one to three keys
of the incumbent, so that its effect can be attributed. The steps of a schedule follow from the steps that a run is
expected to make (throughput.py), so that a decay ends with the budget at any batch size.

Not searched: keys that make steps faster (what fits depends on the machine), LoRA (needs a learning rate of its own),
adv_tau (scales the loss, which Adam divides out), min_lr, and the lengths of a warm-up and of a decay.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from nightshift.agents.throughput import LEAST_STEPS, Plan
from nightshift.config.allowlist import KEYS, Key, Search, Value, applies, resolve
from nightshift.config.train_toml import ABSENT, Config, set_values

KIND, WARMUP, DECAY = (f"trainer.scheduler.{leaf}" for leaf in ("type", "warmup_steps", "decay_steps"))
STEPS = "max_steps"
DECAYING = ("linear", "cosine")  # schedules, to the end of the budget

MAX_KEYS = 3  # of a proposal; steps that follow from another key do not count
_DIGITS = 3  # of a sampled number: 3.42e-6 is as good as 3.4193e-6 and can be read
_REACH = 3.0  # a log box goes at least so far to both sides of the incumbent: the optimum moves with other keys
_SHARES = {DECAY: 0.5, WARMUP: 0.05}  # of a new schedule's steps
# Planned steps beyond the expected ones, in sd: better to lose the last part of a decay than a part of the budget.
_BEYOND = 0.5
_BEGUN = 3.5  # a decay begins before the budget ends, even if a run is so many sd slower than expected
_SETTLED = 0.1  # a max_steps that is as near to the plan stays as it is


@dataclass(frozen=True, slots=True)
class Dimension:
    """One searched key; `name` is its path."""

    name: str
    key: Key
    box: Search

    def value(self, place: float) -> Value:
        """Return what train.toml holds for a place of the box."""
        if self.box.scale == "choice":
            return self.box.choices[round(place * (len(self.box.choices) - 1))]
        low, high = self._scaled(self.box.low), self._scaled(self.box.high)
        number = low + place * (high - low)
        if self.box.scale == "power of two":
            return int(2 ** round(number))
        return float(f"{2**number if self.box.scale == 'log' else number:.{_DIGITS}g}")

    def place(self, value: Value) -> float:
        """Return the nearest place to a value; the middle for None. ValueError: it is not one of the choices."""
        choices = self.box.choices
        if choices and (value is not None or None in choices):
            return choices.index(value) / max(len(choices) - 1, 1)
        low, high = self._scaled(self.box.low), self._scaled(self.box.high)
        if not isinstance(value, int | float) or low == high:
            return 0.5
        return min(max((self._scaled(max(value, self.box.low)) - low) / (high - low), 0.0), 1.0)

    def _scaled(self, number: float) -> float:
        return math.log2(number) if self.box.scale in ("log", "power of two") else number


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The dimensions around the config `base`; a selector stands before what it selects. `plan`: the steps of a run,
    from the keys that apply in its train.toml."""

    dimensions: tuple[Dimension, ...]
    base: Config
    plan: Callable[[Mapping[str, Value]], Plan]

    @classmethod
    def for_engine(
        cls, used_keys: AbstractSet[str] | None, base: Config, plan: Callable[[Mapping[str, Value]], Plan]
    ) -> SearchSpace:
        """`used_keys`: what the engine uses, None for every key."""
        dimensions = []
        for key in KEYS:
            is_searched = key.search is not None and (used_keys is None or key.path in used_keys)
            box = _around(key, key.search, base.resolved.get(key.path)) if is_searched and key.search else None
            if box is not None:
                dimensions.append(Dimension(key.path, key, box))
        return cls(tuple(dimensions), base, plan)

    def places(self, config: Config) -> dict[str, float]:
        """Return the place of each key, the middle if it does not apply. ValueError: a value is not a choice."""
        values, keys = config.resolved, self.dimensions
        return {key.name: key.place(values[key.key.path]) if _applies(key, values) else 0.5 for key in keys}

    def change(self, rng: random.Random, places: Mapping[str, float]) -> dict[str, float]:
        """Return one to three of the places, chosen by chance among the keys that apply to the base."""
        names = [dimension.name for dimension in self.dimensions if _applies(dimension, self.base.resolved)]
        return {name: places[name] for name in rng.sample(names, min(rng.randint(1, MAX_KEYS), len(names)))}

    def build(self, places: Mapping[str, float]) -> bytes:
        """Return the base's train.toml with these places, if they apply; comments and other keys are kept.

        Raises ConfigError if keys do not agree that were drawn one by one.
        """
        chosen = dict[str, Any](self.base.values)
        for dimension in self.dimensions:
            if dimension.name in places and _applies(dimension, resolve(chosen)):
                chosen[dimension.key.path] = dimension.value(places[dimension.name])
        if KIND in places or STEPS in chosen:
            self._schedule(chosen)
        resolved = resolve(chosen)
        changes: dict[str, Any] = {path: ABSENT for path in self.base.values if path not in chosen.keys() & resolved}
        for path, value in chosen.items():
            if path in resolved and self.base.resolved.get(path, ABSENT) != value:
                changes[path] = value
        return set_values(self.base.source, changes)

    def _schedule(self, chosen: dict[str, Any]) -> None:
        """Write the steps of the schedule, so that it ends with the budget. A decay keeps its share of them."""
        resolved: dict[str, Any] = resolve(chosen)
        if resolved[KIND] not in DECAYING:
            chosen.pop(STEPS, None)
            return
        num_steps, log_sd = self.plan(resolved)
        steps = max(round(num_steps * math.exp(_BEYOND * log_sd)), LEAST_STEPS)
        before: Any = self.base.get(STEPS)
        if before and abs(math.log(steps / before)) < _SETTLED:
            steps = before
        shares = {path: (before and (self.base.get(path) or 0) / before) or share for path, share in _SHARES.items()}
        chosen[STEPS], left = steps, steps - 1
        if resolved[KIND] == "linear":
            share = max(shares[DECAY], 1 - math.exp(-_BEGUN * log_sd))
            chosen[DECAY] = min(max(round(share * steps), 2), left)
            left -= chosen[DECAY]
        chosen[WARMUP] = min(max(round(shares[WARMUP] * steps), 1), left)


def _applies(dimension: Dimension, resolved: Mapping[str, Value]) -> bool:
    return applies(dimension.key, dimension.key.path, resolved)


def _around(key: Key, box: Search, now: Value) -> Search | None:
    """Return the box, moved or widened to the base's value; None if the base's value is no choice."""
    low, high = box.low, box.high
    if box.scale == "choice":
        return box if now is None or now in box.choices else None  # what suits the choices may not suit the base
    if isinstance(now, int | float) and now > 0:
        if box.scale == "linear" or low <= now <= high:
            low, high = min(low, now), max(high, now)
        else:
            low = high = now
        if box.scale == "log":
            low, high = min(low, now / _REACH), max(high, now * _REACH)
        elif box.scale == "power of two":
            low, high = 2 ** math.floor(math.log2(low)), 2 ** math.ceil(math.log2(high))
    low = max(low, key.minimum if key.minimum is not None else low)
    high = min(high, key.maximum if key.maximum is not None else high)
    return replace(box, low=low, high=high)

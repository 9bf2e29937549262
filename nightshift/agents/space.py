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
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from nightshift.agents.throughput import LEAST_STEPS, Plan
from nightshift.config.allowlist import CURRICULUM, KEYS, applies, resolve, variants
from nightshift.config.toml_edit import ABSENT, set_values
from nightshift.config.train_toml import Config
from nightshift.config.values import Key, Value


class Scale(StrEnum):
    """How the values of a dimension are spread."""

    LOG = "log"
    LINEAR = "linear"
    POWER_OF_TWO = "power of two"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Box:
    scale: Scale
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Value, ...] = ()


def _choice(*choices: Value) -> Box:
    return Box(Scale.CHOICE, choices=choices)


_LOG, _LINEAR, _POWER = Scale.LOG, Scale.LINEAR, Scale.POWER_OF_TWO
KIND, WARMUP, DECAY = (f"trainer.scheduler.{leaf}" for leaf in ("type", "warmup_steps", "decay_steps"))
STEPS = "max_steps"
DECAYING = ("linear", "cosine")  # schedules, to the end of the budget

# Measured: on the arithmetic task of the trl engine. Effects there are those of one key from the shipped train.toml.
BOXES: dict[str, Box] = {
    "orchestrator.batch_size": Box(_POWER, 32, 512),  # measured: 128 to 512 alike, 1024 makes too few steps
    "orchestrator.group_size": Box(_POWER, 2, 16),  # measured: 4 and 8 best, 16 behind; 2 is the least that compares
    "orchestrator.max_off_policy_steps": Box(_POWER, 1, 16),  # 1 is what prime-rl aims at, 8 its default bound
    "orchestrator.concurrency.initial_inflight": Box(_POWER, 64, 1024),  # from a small batch to prime-rl's most
    "orchestrator.train.filter_zero_advantages": _choice(False, True),
    "orchestrator.train.sampling.temperature": Box(_LINEAR, 0.6, 1.2),  # measured: 0.7 to 1 alike, 1.3 far behind
    # A GSM8K answer has 100 to 300 tokens; evaluation allows 1024.
    "orchestrator.train.sampling.max_completion_tokens": Box(_POWER, 256, 1024),
    f"{CURRICULUM}.sampler.type": _choice("standard", "difficulty_pool"),
    "orchestrator.algo.type": _choice("grpo", "max_rl"),  # rae needs groups of one, another space
    "orchestrator.algo.decay": _choice(0.9, 0.95, 0.99),  # a memory of 10, 20 or 100 rewards
    "orchestrator.algo.length_penalty": _choice(None, {}),
    "orchestrator.algo.length_penalty.num_output_tokens_weight": Box(_LOG, 0.02, 0.5),  # around prime-rl's 0.25
    KIND: _choice("constant", *DECAYING),
    "trainer.optim.type": _choice("adamw", "muon"),  # the same rates suit both; sgd and sign_sgd need others
    "trainer.optim.lr": Box(_LOG, 5e-7, 2e-5),  # measured: a third is slower, six times best, 25 times collapses
    "trainer.optim.weight_decay": Box(_LOG, 1e-3, 0.3),  # at these rates above 0.1 is the first to be felt
    "trainer.optim.max_norm": Box(_LOG, 0.05, 2.0),  # measured: gradient norms of 0.05 to 1
    "trainer.optim.betas1": _choice(0.8, 0.9, 0.95),
    "trainer.optim.betas2": _choice(0.95, 0.99, 0.999),  # 0.999 averages over a whole run
    "trainer.optim.mu": _choice(0.9, 0.95, 0.98),
    "trainer.optim.momentum": _choice(0.8, 0.9, 0.95),
    "trainer.optim.nesterov": _choice(False, True),
    "trainer.loss.type": _choice("default", "ipo"),
    "trainer.loss.dppo_mask_low": Box(_LINEAR, 0.05, 0.5),  # around prime-rl's 0.2; 1 is no mask
    "trainer.loss.dppo_mask_high": Box(_LINEAR, 0.05, 0.5),
    "trainer.loss.ipo_threshold": Box(_LINEAR, 0.03, 0.3),  # around prime-rl's 0.1
    "trainer.loss.kl_tau": Box(_LOG, 1e-4, 0.03),  # around prime-rl's 1e-3; at 0.1 it outweighs the reward
}
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
    """One searched key. `name` is its path, with the variant added where a path has several entries."""

    name: str
    key: Key
    box: Box

    def value(self, place: float) -> Value:
        """Return what train.toml holds for a place of the box."""
        if self.box.scale is Scale.CHOICE:
            return self.box.choices[round(place * (len(self.box.choices) - 1))]
        low, high = self._scaled(self.box.low), self._scaled(self.box.high)
        number = low + place * (high - low)
        if self.box.scale is Scale.POWER_OF_TWO:
            return int(2 ** round(number))
        return float(f"{2**number if self.box.scale is Scale.LOG else number:.{_DIGITS}g}")

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
        return math.log2(number) if self.box.scale in (Scale.LOG, Scale.POWER_OF_TWO) else number


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
            box = BOXES.get(key.path) if used_keys is None or key.path in used_keys else None
            box = box and _around(key, box, base.resolved.get(key.path))
            variant = f" ({key.only_if[1][0]})" if key.only_if and len(variants(key.path)) > 1 else ""
            if box is not None:
                dimensions.append(Dimension(key.path + variant, key, box))
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


def _around(key: Key, box: Box, now: Value) -> Box | None:
    """Return the box, moved or widened to the base's value; None if the base's value is no choice."""
    low, high = box.low, box.high
    if box.scale is Scale.CHOICE:
        return box if now is None or now in box.choices else None  # what suits the choices may not suit the base
    if isinstance(now, int | float) and now > 0:
        if box.scale is Scale.LINEAR or low <= now <= high:
            low, high = min(low, now), max(high, now)
        else:
            low = high = now
        if box.scale is Scale.LOG:
            low, high = min(low, now / _REACH), max(high, now * _REACH)
        elif box.scale is Scale.POWER_OF_TWO:
            low, high = 2 ** math.floor(math.log2(low)), 2 ** math.ceil(math.log2(high))
    low = max(low, key.minimum if key.minimum is not None else low)
    high = min(high, key.maximum if key.maximum is not None else high)
    return replace(box, low=low, high=high)

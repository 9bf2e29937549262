"""The search space of random, tpe and search: the allow-list's keys that the engine uses, each in its box.

A proposal changes one to three keys of the incumbent, so that its effect can be attributed. Schedules are searched as
shares of the run, and written in the steps that the run is expected to make (throughput.py): a decay ends with the
budget at any batch size, and a constant schedule has no max_steps.

Not searched: keys that make steps faster (what fits depends on the machine), LoRA (needs a learning rate of its own),
adv_tau (scales the loss, which Adam divides out), min_lr (matters less than when the decay begins).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from nightshift.agents.throughput import LEAST_STEPS, Plan
from nightshift.config.allowlist import CURRICULUM, KEYS, applies, resolve, variants
from nightshift.config.toml_edit import ABSENT, set_values
from nightshift.config.train_toml import Config
from nightshift.config.values import Key, Value


class Scale(StrEnum):
    """How the values of a dimension are spread."""

    LOG = "log"
    LINEAR = "linear"
    SHARE = "share"  # of the steps that the run is expected to make
    POWER_OF_TWO = "power of two"  # searched by its exponent
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
_ON_OFF = _choice(False, True)
KIND, WARMUP, DECAY, STEPS = (
    "trainer.scheduler.type",
    "trainer.scheduler.warmup_steps",
    "trainer.scheduler.decay_steps",
    "max_steps",
)
DECAYING = ("linear", "cosine")  # schedules, to the end of the budget

# Measured: on the arithmetic task of the trl engine. Effects there are those of one key from the shipped train.toml.
BOXES: dict[str, Box] = {
    "orchestrator.batch_size": Box(_POWER, 32, 512),  # measured: 128 to 512 alike, 1024 makes too few steps
    "orchestrator.group_size": Box(_POWER, 2, 16),  # measured: 4 and 8 best, 16 behind; 2 is the least that compares
    "orchestrator.max_off_policy_steps": Box(_POWER, 1, 16),  # 1 is what prime-rl aims at, 8 its default bound
    "orchestrator.concurrency.initial_inflight": Box(_POWER, 64, 1024),  # from a small batch to prime-rl's most
    "orchestrator.train.filter_zero_advantages": _ON_OFF,
    "orchestrator.train.sampling.temperature": Box(_LINEAR, 0.6, 1.2),  # measured: 0.7 to 1 alike, 1.3 far behind
    # A GSM8K answer has 100 to 300 tokens; evaluation allows 1024.
    "orchestrator.train.sampling.max_completion_tokens": Box(_POWER, 256, 1024),
    f"{CURRICULUM}.sampler.type": _choice("standard", "difficulty_pool"),
    "orchestrator.algo.type": _choice("grpo", "max_rl"),  # rae needs groups of one, another space
    "orchestrator.algo.decay": _choice(0.9, 0.95, 0.99),  # a memory of 10, 20 or 100 rewards
    "orchestrator.algo.length_penalty": _choice(None, {}),
    "orchestrator.algo.length_penalty.num_output_tokens_weight": Box(_LOG, 0.02, 0.5),  # around prime-rl's 0.25
    KIND: _choice("constant", *DECAYING),
    WARMUP: Box(Scale.SHARE, 0.01, 0.15),  # more is time lost
    DECAY: Box(Scale.SHARE, 0.2, 0.8),  # space.py begins it early enough that it is begun at all
    "trainer.optim.type": _choice("adamw", "muon"),  # the same rates suit both; sgd and sign_sgd need others
    "trainer.optim.lr": Box(_LOG, 5e-7, 2e-5),  # measured: a third is slower, six times best, 25 times collapses
    "trainer.optim.weight_decay": Box(_LOG, 1e-3, 0.3),  # at these rates above 0.1 is the first to be felt
    "trainer.optim.max_norm": Box(_LOG, 0.05, 2.0),  # measured: gradient norms of 0.05 to 1
    "trainer.optim.betas1": _choice(0.8, 0.9, 0.95),
    "trainer.optim.betas2": _choice(0.95, 0.99, 0.999),  # 0.999 averages over a whole run
    "trainer.optim.mu": _choice(0.9, 0.95, 0.98),
    "trainer.optim.momentum": _choice(0.8, 0.9, 0.95),
    "trainer.optim.nesterov": _ON_OFF,
    "trainer.loss.type": _choice("default", "ipo"),
    "trainer.loss.dppo_mask_low": Box(_LINEAR, 0.05, 0.5),  # around prime-rl's 0.2; 1 is no mask
    "trainer.loss.dppo_mask_high": Box(_LINEAR, 0.05, 0.5),
    "trainer.loss.ipo_threshold": Box(_LINEAR, 0.03, 0.3),  # around prime-rl's 0.1
    "trainer.loss.kl_tau": Box(_LOG, 1e-4, 0.03),  # around prime-rl's 1e-3; at 0.1 it outweighs the reward
    "trainer.model.lora.rank": Box(_POWER, 4, 128),  # around prime-rl's 16
    "trainer.model.lora.alpha": Box(_LOG, 8, 128),  # around prime-rl's 32
}


MAX_KEYS = 3  # that a proposal changes; steps that follow from another one do not count
_DIGITS = 3  # of a sampled number: 3.42e-6 is as good as 3.4193e-6 and can be read
_REACH = 3.0  # a log box goes at least so far to both sides of the incumbent: the optimum moves with other keys
_DECAY_FIRST = 0.4  # of the proposals for a config without a decay begin one: else few of three in fourteen keys would
_SHARES = {WARMUP: 0.05, DECAY: 0.5}  # of a schedule that is new
# Steps that are planned beyond those expected, in sd of that: rather a last part of a decay is lost than of the budget.
_BEYOND = 0.5
_BEGUN = 3.5  # a decay begins before the budget ends even where a run is so many sd slower than expected
_NONE = object()
_SETTLED = 0.1  # max_steps as far from the plan as this is left as it is


@dataclass(frozen=True, slots=True)
class Dimension:
    """One searched key. `name` is its path, with the variant added where a path has several entries."""

    name: str
    key: Key
    box: Box

    @property
    def is_choice(self) -> bool:
        return self.box.scale is Scale.CHOICE

    @property
    def is_exponent(self) -> bool:
        return self.box.scale is Scale.POWER_OF_TWO

    @property
    def distribution(self) -> BaseDistribution:
        """The box as Optuna knows it: of exponents for powers of two; a table is switched `on`, or None."""
        low, high = self.box.low, self.box.high
        if self.is_choice:
            choices: list[Any] = ["on" if choice == {} else choice for choice in self.box.choices]
            return CategoricalDistribution(choices)
        if self.is_exponent:
            return IntDistribution(round(math.log2(low)), round(math.log2(high)))
        return FloatDistribution(low, high, log=self.box.scale is Scale.LOG)

    def value(self, param: Any) -> Value:
        """What train.toml holds for an Optuna parameter; of a share that number."""
        if self.is_choice:
            return {} if param == "on" else param
        if self.is_exponent:
            return int(2**param)
        return float(f"{param:.{_DIGITS}g}")

    def param(self, value: Value) -> Any:
        """The Optuna parameter of a value, the nearest one of the box. Raises ValueError where there is none."""
        box: Any = self.distribution
        if self.is_choice:
            return box.choices[self.box.choices.index(value)]
        if not isinstance(value, int | float):
            raise ValueError(f"{self.name} = {value!r} is no number")
        number = math.log2(max(value, 1)) if self.is_exponent else value
        number = min(max(number, box.low), box.high)
        return round(number) if isinstance(box, IntDistribution) else number

    def place(self, param: Any) -> float:
        """Where a parameter lies in the box, 0..1; choices are spread evenly."""
        box: Any = self.distribution
        if self.is_choice:
            return int(box.choices.index(param)) / max(len(box.choices) - 1, 1)
        low, high, at = (math.log(x) if self.box.scale is Scale.LOG else x for x in (box.low, box.high, param))
        return float((at - low) / (high - low)) if high > low else 0.5

    def at(self, place: float) -> Any:
        """The parameter at a place, 0..1, of the box."""
        box: Any = self.distribution
        if self.is_choice:
            return box.choices[round(place * (len(box.choices) - 1))]
        low, high = (math.log(x) if self.box.scale is Scale.LOG else x for x in (box.low, box.high))
        number = low + place * (high - low)
        if self.box.scale is Scale.LOG:
            return min(max(math.exp(number), box.low), box.high)
        return round(number) if isinstance(box, IntDistribution) else number


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
        found = []
        for key in KEYS:
            box = BOXES.get(key.path) if used_keys is None or key.path in used_keys else None
            box = box and _around(key, box, base.resolved.get(key.path))
            variant = f" ({key.only_if[1][0]})" if key.only_if and len(variants(key.path)) > 1 else ""
            if box is not None:
                found.append(Dimension(key.path + variant, key, box))
        return cls(tuple(found), base, plan)

    def build(self, params: Mapping[str, Any]) -> bytes:
        """The base's train.toml with these Optuna parameters, where they apply; comments and other keys are kept.

        Raises ConfigError if a key that is not searched stands in the way.
        """
        chosen, shares = dict[str, Any](self.base.values), self._shares(self.base.resolved)
        resolved = resolve(chosen)
        for dimension in self.dimensions:
            if dimension.name in params and _applies(dimension, resolved):
                into = shares if dimension.box.scale is Scale.SHARE else chosen
                into[dimension.key.path] = dimension.value(params[dimension.name])
                if dimension.is_choice:  # it may select what follows
                    resolved = resolve(chosen)
        _fit(chosen)
        if params.keys() & {WARMUP, DECAY, KIND} or STEPS in self.base.values:
            self._schedule(chosen, shares)
        resolved = resolve(chosen)
        kept = {path: value for path, value in chosen.items() if path in resolved}
        changes: dict[str, Any] = {path: ABSENT for path in self.base.values if path not in kept}
        changes |= {path: value for path, value in kept.items() if self.base.resolved.get(path, ABSENT) != value}
        return set_values(self.base.source, changes)

    def params(self, config: Config) -> dict[str, Any] | None:
        """A config as Optuna parameters, by the names of the dimensions that apply to it.

        A number beyond the box becomes the nearest one in it. None where a searched key has no place in the space.
        """
        known = self._known(config.resolved)
        return known if all(d.name in known for d in self.dimensions if _applies(d, config.resolved)) else None

    def places(self, config: Config) -> list[float]:
        """A config in the unit cube of all dimensions; what does not apply, or has no place, lies in the middle."""
        return self._in_cube(self._known(config.resolved))

    def places_with(self, params: Mapping[str, Any]) -> list[float]:
        """The base with these parameters in that cube."""
        chosen = dict(self.base.values)
        for dimension in self.dimensions:
            if dimension.name in params and dimension.box.scale is not Scale.SHARE:
                chosen[dimension.key.path] = dimension.value(params[dimension.name])
        return self._in_cube({**self._known(resolve(chosen)), **params})

    def _in_cube(self, known: Mapping[str, Any]) -> list[float]:
        return [0.5 if (param := known.get(d.name, _NONE)) is _NONE else d.place(param) for d in self.dimensions]

    def change(
        self, rng: random.Random, draw: Callable[[Dimension, Any], Any], begins_decay: bool = False
    ) -> dict[str, Any]:
        """Other Optuna parameters for one to three dimensions. `draw` makes one from the present one, None where it has
        none. What a new choice selects is drawn with it, as far as three go, and has its defaults else.
        """
        chosen, known, params = dict(self.base.values), self._known(self.base.resolved), dict[str, Any]()
        resolved, wanted = self.base.resolved, rng.randint(1, MAX_KEYS)
        while len(params) < wanted:
            ours = [each for each in self.dimensions if each.name not in params and _applies(each, resolved)]
            new = [each for each in ours if not _applies(each, self.base.resolved)]
            if not ours:
                break
            dimension = rng.choice(new or ours)
            if begins_decay and not params:
                dimension = next((each for each in ours if each.key.path == KIND), dimension)
            param = params[dimension.name] = draw(dimension, known.get(dimension.name))
            if begins_decay and dimension.key.path == KIND and param not in DECAYING:
                param = params[dimension.name] = rng.choice(DECAYING)
            if dimension.is_choice:
                chosen[dimension.key.path] = dimension.value(param)
                resolved = resolve(chosen)
        return params

    def begins_decay(self, rng: random.Random) -> bool:
        """Whether the next proposal is to begin a decay, for a base that has none."""
        has_kind = any(dimension.key.path == KIND for dimension in self.dimensions)
        return has_kind and self.base.get(KIND) not in DECAYING and rng.random() < _DECAY_FIRST

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {dimension.name: dimension.distribution for dimension in self.dimensions}

    def _known(self, resolved: Mapping[str, Any]) -> dict[str, Any]:
        """As `params`, without what has no place, for the keys that apply."""
        shares, found = self._shares(resolved), dict[str, Any]()
        for dimension in self.dimensions:
            if _applies(dimension, resolved):
                is_share, path = dimension.box.scale is Scale.SHARE, dimension.key.path
                with suppress(ValueError):
                    found[dimension.name] = dimension.param(shares[path] if is_share else resolved.get(path))
        return found

    def _shares(self, resolved: Mapping[str, Any]) -> dict[str, Any]:
        """Of the run's steps that a warm-up and a decay take; the usual ones where there is none."""
        num_steps = resolved.get(STEPS) or self.plan(resolved).num_steps
        steps = {path: resolved.get(path) for path in _SHARES}
        return {path: _SHARES[path] if each is None else each / num_steps for path, each in steps.items()}

    def _schedule(self, chosen: dict[str, Any], shares: Mapping[str, float]) -> None:
        """Write the schedule's shares in steps, so that it ends with the budget."""
        resolved: Mapping[str, Any] = resolve(chosen)
        if resolved[KIND] not in DECAYING:
            chosen.pop(STEPS, None)
            return
        num_steps, log_sd = self.plan(resolved)
        steps = max(round(num_steps * math.exp(_BEYOND * log_sd)), LEAST_STEPS)
        before = self.base.get(STEPS)
        if before and abs(math.log(steps / before)) < _SETTLED:
            steps = before
        chosen[STEPS], warmup = steps, max(round(shares[WARMUP] * steps), 1)
        if resolved[KIND] == "linear":
            share = max(shares[DECAY], 1 - math.exp(-_BEGUN * log_sd))
            chosen[DECAY] = min(max(round(share * steps), 2), steps - 1)
            warmup = min(warmup, steps - 1 - chosen[DECAY])
        chosen[WARMUP] = min(warmup, steps - 1)


def _applies(dimension: Dimension, resolved: Mapping[str, Value]) -> bool:
    return applies(dimension.key, dimension.key.path, resolved)


def _around(key: Key, box: Box, now: Value) -> Box | None:
    """The box, moved or widened to the base's value; None where that value would be lost."""
    low, high = box.low, box.high
    if box.scale is Scale.SHARE:
        return box
    if box.scale is Scale.CHOICE:
        # Where the base has left this choice, what suits the others does not suit it.
        return box if now is None or now in box.choices else None
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


def _fit(chosen: dict[str, Any]) -> None:
    """Make keys agree that are drawn one by one (the rules of checks.py), by giving way to the one named first."""
    number: Mapping[str, Any] = resolve(chosen)
    batch, group = "orchestrator.batch_size", "orchestrator.group_size"
    if number.get(batch) is not None and number[batch] % number[group]:
        chosen[group] = math.gcd(number[batch], number[group])
    tokens = "orchestrator.train.sampling.max_completion_tokens"
    if number[tokens] is not None and number[tokens] >= number["seq_len"]:
        chosen[tokens] = number["seq_len"] // 2
    start, most = (f"orchestrator.concurrency.{name}_inflight" for name in ("initial", "max"))
    if number[start] is not None and number[most] is not None and number[start] > number[most]:
        chosen[start] = number[most]
    if number.get("trainer.scheduler.min_lr", 0.0) > number["trainer.optim.lr"]:
        chosen.pop("trainer.scheduler.min_lr", None)

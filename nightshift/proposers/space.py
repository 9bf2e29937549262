"""The search space of TPE and random search: the allow-list's keys that the engine uses, each in its box."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from nightshift.proposers.boxes import BOXES, Box, Scale, box_of
from nightshift.train_toml.config import Config
from nightshift.train_toml.edit import ABSENT, set_values
from nightshift.train_toml.keys import KEYS, applies, resolve, variants
from nightshift.train_toml.values import Key, Kind, Value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_DIGITS = 3  # of a sampled number: 3.42e-6 is as good as 3.4193e-6 and can be read
_REACH = 3.0  # a log box goes at least so far to both sides of the incumbent: the optimum moves with other keys
_SWITCHES = {key.path for key in KEYS if key.kind is Kind.TABLE}


@dataclass(frozen=True, slots=True)
class Dimension:
    """One searched key. `name` is its path, with the variant added where a path has several entries."""

    name: str
    key: Key
    box: Box

    def sample(self, random_source: random.Random) -> Value:
        """A value from the box."""
        if self.box.scale is Scale.CHOICE:
            return random_source.choice(self.box.choices)
        low, high = self._bounds
        if self._is_whole:
            return self.value(random_source.randint(int(low), int(high)))
        if self.box.scale is Scale.LOG:
            return self.value(math.exp(random_source.uniform(math.log(low), math.log(high))))
        return self.value(random_source.uniform(low, high))

    def value(self, param: Any) -> Value:
        """What train.toml holds for an Optuna parameter."""
        if self.box.scale is Scale.CHOICE:
            return {} if self.key.kind is Kind.TABLE and param == "on" else param
        if self.box.scale is Scale.POWER_OF_TWO:
            return int(2**param)
        return int(param) if self.key.kind is Kind.INT else float(f"{param:.{_DIGITS}g}")

    def param(self, value: Value) -> Any:
        """The Optuna parameter of a value, the nearest one of the box. Raises ValueError where there is none."""
        if self.box.scale is Scale.CHOICE:
            if value not in self.box.choices:
                raise ValueError(f"{self.name} = {value!r} is none of {self.box.choices}")
            return "on" if value == {} else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{self.name} = {value!r} is no number")
        low, high = self._bounds
        number = math.log2(value) if self.box.scale is Scale.POWER_OF_TWO and value > 0 else value
        number = min(max(number, low), high)
        return round(number) if self._is_whole else number

    def distribution(self) -> BaseDistribution:
        """The box as Optuna knows it."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # slow to import

        if self.box.scale is Scale.CHOICE:
            return CategoricalDistribution([self.param(choice) for choice in self.box.choices])
        low, high = self._bounds
        if self._is_whole:
            return IntDistribution(int(low), int(high))
        return FloatDistribution(low, high, log=self.box.scale is Scale.LOG)

    @property
    def _is_whole(self) -> bool:
        return self.box.scale is Scale.POWER_OF_TWO or self.key.kind is Kind.INT

    @property
    def _bounds(self) -> tuple[float, float]:
        """Of the parameter: exponents for powers of two."""
        low, high = self.box.low, self.box.high
        if self.box.scale is Scale.POWER_OF_TWO:
            return round(math.log2(low)), round(math.log2(high))
        if self._is_whole:  # a box in steps of a run ends anywhere
            return math.ceil(low), max(math.floor(high), math.ceil(low))
        return low, high


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The dimensions around one incumbent; a selector stands before what it selects."""

    dimensions: tuple[Dimension, ...]
    incumbent: Config

    @classmethod
    def for_engine(
        cls, used_keys: AbstractSet[str] | None, incumbent: Config, num_steps: float | None = None
    ) -> SearchSpace:
        """`used_keys`: what the engine uses, None for every key. `num_steps` of the incumbent's run: with it,
        schedules that end at max_steps are searched too.
        """
        found: dict[str, Dimension] = {}
        for key in KEYS:
            box = box_of(key, num_steps)
            if box is None or (used_keys is not None and key.path not in used_keys):
                continue
            box = _around(key, box, incumbent.resolved.get(key.path))
            variant = f" ({key.only_if[1][0]})" if key.only_if and len(variants(key.path)) > 1 else ""
            if box is not None and _can_apply(key, found, incumbent):
                found[key.path + variant] = Dimension(key.path + variant, key, box)
        last = sorted(found.values(), key=lambda d: d.key.path == "max_steps")  # the schedule selects it
        return cls(tuple(last), incumbent)

    def build(self, choose: Callable[[Dimension], Value]) -> bytes:
        """A train.toml with every applicable dimension chosen by `choose`; comments and other keys are kept.

        Raises ConfigError if a key that is not searched stands in the way.
        """
        chosen = dict(self.incumbent.values)
        resolved = resolve(chosen)
        for dimension in self.dimensions:
            if self._applies(dimension, resolved):
                chosen[dimension.key.path] = choose(dimension)
                if dimension.box.scale is Scale.CHOICE:  # it may select what follows
                    resolved = resolve(chosen)
        _fit(chosen, self.incumbent)
        resolved = resolve(chosen)
        values, before = self.incumbent.values, self.incumbent.resolved
        changes: dict[str, Any] = {path: ABSENT for path in values if path not in resolved or path not in chosen}
        changes |= {
            path: value
            for path, value in chosen.items()
            if path in resolved and not (path in before and before[path] == value)
        }
        return set_values(self.incumbent.source, changes)

    def sample(self, random_source: random.Random) -> bytes:
        """A train.toml at random."""
        return self.build(lambda dimension: dimension.sample(random_source))

    def params(self, config: Config) -> dict[str, Any] | None:
        """A config as Optuna parameters, by the names of the dimensions that apply to it.

        A number beyond the box becomes the nearest one in it. None where a searched key has no place in the space.
        """
        try:
            return {
                dimension.name: dimension.param(config.get(dimension.key.path))
                for dimension in self.dimensions
                if self._applies(dimension, config.resolved)
            }
        except ValueError:
            return None

    def distributions(self) -> dict[str, BaseDistribution]:
        """Of all dimensions, by name."""
        return {dimension.name: dimension.distribution() for dimension in self.dimensions}

    @staticmethod
    def _applies(dimension: Dimension, resolved: Mapping[str, Value]) -> bool:
        condition = dimension.box.only_if
        is_selected = condition is None or resolved.get(condition[0]) in condition[1]
        return is_selected and applies(dimension.key, dimension.key.path, resolved)


def _around(key: Key, box: Box, now: Value) -> Box | None:
    """The box, moved or widened to the incumbent's value; None where that value would be lost."""
    low, high = box.low, box.high
    if box.scale is Scale.CHOICE:
        if now is not None and now not in box.choices:
            return None  # the incumbent has left this choice: what suits the others does not suit it
    elif isinstance(now, int | float) and now > 0 and key.path in BOXES:  # boxes in steps follow the run instead
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


def _can_apply(key: Key, others: Mapping[str, Dimension], incumbent: Config) -> bool:
    """True if the key's variant and the tables around it are the incumbent's or can be chosen."""

    def can_be(path: str, wanted: Callable[[Value], bool]) -> bool:
        selector = others.get(path)
        return wanted(incumbent.resolved.get(path)) or any(map(wanted, selector.box.choices if selector else ()))

    condition = key.only_if
    if condition is not None and not can_be(condition[0], lambda value: value in condition[1]):
        return False
    tables = accumulate(key.table.split("."), "{}.{}".format)
    return all(can_be(table, lambda value: value is not None) for table in tables if table in _SWITCHES)


def _fit(chosen: dict[str, Value], incumbent: Config) -> None:
    """Make keys agree that are drawn one by one (the rules of checks.py), by giving way to the one named first."""
    resolved = resolve(chosen)

    def number(path: str) -> Any:
        return resolved.get(path)

    batch, group = "orchestrator.batch_size", "orchestrator.group_size"
    if number(batch) is not None and number(batch) % number(group):
        chosen[group] = math.gcd(number(batch), number(group))
    tokens = "orchestrator.train.sampling.max_completion_tokens"
    if number(tokens) is not None and number(tokens) >= number("seq_len"):
        chosen[tokens] = number("seq_len") // 2
    table = "orchestrator.concurrency"
    start, most = f"{table}.initial_inflight", number(f"{table}.max_inflight")
    if number(start) is not None and most is not None and number(start) > most:
        chosen[start] = most
    kind, least = number("trainer.scheduler.type"), "trainer.scheduler.min_lr"
    if number(least) is not None and number(least) > number("trainer.optim.lr"):
        chosen.pop(least, None)
    warmup, decay, steps = "trainer.scheduler.warmup_steps", "trainer.scheduler.decay_steps", number("max_steps")
    if kind == "linear" and steps is None:
        chosen[decay] = 0
    elif kind in ("linear", "cosine") and number(warmup) + (number(decay) or 0) > steps - 1:
        chosen[warmup] = min(number(warmup), steps // 10)
        if number(decay):
            chosen[decay] = min(number(decay), steps // 2)
    if kind == "constant" and incumbent.get("trainer.scheduler.type") != "constant":
        chosen.pop("max_steps", None)  # it was the schedule's end

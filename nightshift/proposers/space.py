"""The search space of tpe and random: the allow-list's keys that the engine uses, each in its box."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from nightshift.proposers.boxes import BOXES, Box, Scale, box_of
from nightshift.train_toml.config import Config
from nightshift.train_toml.edit import ABSENT, set_values
from nightshift.train_toml.keys import KEYS, applies, resolve, variants
from nightshift.train_toml.values import Key, Kind, Value

_DIGITS = 3  # of a sampled number: 3.42e-6 is as good as 3.4193e-6 and can be read
_REACH = 3.0  # a log box goes at least so far to both sides of the incumbent: the optimum moves with other keys


@dataclass(frozen=True, slots=True)
class Dimension:
    """One searched key. `name` is its path, with the variant added where a path has several entries."""

    name: str
    key: Key
    box: Box

    @property
    def distribution(self) -> BaseDistribution:
        """The box as Optuna knows it: of exponents for powers of two; a table is switched `on`, or None."""
        low, high = self.box.low, self.box.high
        if self.box.scale is Scale.CHOICE:
            choices: list[Any] = ["on" if choice == {} else choice for choice in self.box.choices]
            return CategoricalDistribution(choices)
        if self.box.scale is Scale.POWER_OF_TWO:
            return IntDistribution(round(math.log2(low)), round(math.log2(high)))
        if self.key.kind is Kind.INT:  # a box in steps of a run ends anywhere
            return IntDistribution(math.ceil(low), max(math.floor(high), math.ceil(low)))
        return FloatDistribution(low, high, log=self.box.scale is Scale.LOG)

    def value(self, param: Any) -> Value:
        """What train.toml holds for an Optuna parameter."""
        if self.box.scale is Scale.CHOICE:
            return {} if param == "on" else param
        if self.box.scale is Scale.POWER_OF_TWO:
            return int(2**param)
        return int(param) if self.key.kind is Kind.INT else float(f"{param:.{_DIGITS}g}")

    def param(self, value: Value) -> Any:
        """The Optuna parameter of a value, the nearest one of the box. Raises ValueError where there is none."""
        box: Any = self.distribution
        if self.box.scale is Scale.CHOICE:
            return box.choices[self.box.choices.index(value)]
        if not isinstance(value, int | float):
            raise ValueError(f"{self.name} = {value!r} is no number")
        number = math.log2(max(value, 1)) if self.box.scale is Scale.POWER_OF_TWO else value
        number = min(max(number, box.low), box.high)
        return round(number) if isinstance(box, IntDistribution) else number


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
        found = []
        for key in KEYS:
            box = box_of(key, num_steps) if used_keys is None or key.path in used_keys else None
            box = box and _around(key, box, incumbent.resolved.get(key.path))
            variant = f" ({key.only_if[1][0]})" if key.only_if and len(variants(key.path)) > 1 else ""
            if box is not None:
                found.append(Dimension(key.path + variant, key, box))
        last = sorted(found, key=lambda dimension: dimension.key.path == "max_steps")  # the schedule selects it
        return cls(tuple(last), incumbent)

    def build(self, params: Mapping[str, Any]) -> bytes:
        """A train.toml with the Optuna parameter of every applicable dimension; comments and other keys are kept.

        Raises ConfigError if a key that is not searched stands in the way.
        """
        chosen = dict(self.incumbent.values)
        resolved = resolve(chosen)
        for dimension in self.dimensions:
            if _applies(dimension, resolved):
                chosen[dimension.key.path] = dimension.value(params[dimension.name])
                if dimension.box.scale is Scale.CHOICE:  # it may select what follows
                    resolved = resolve(chosen)
        _fit(chosen, self.incumbent)
        resolved = resolve(chosen)
        kept = {path: value for path, value in chosen.items() if path in resolved}
        changes: dict[str, Any] = {path: ABSENT for path in self.incumbent.values if path not in kept}
        changes |= {path: value for path, value in kept.items() if self.incumbent.resolved.get(path, ABSENT) != value}
        return set_values(self.incumbent.source, changes)

    def params(self, config: Config) -> dict[str, Any] | None:
        """A config as Optuna parameters, by the names of the dimensions that apply to it.

        A number beyond the box becomes the nearest one in it. None where a searched key has no place in the space.
        """
        ours = (dimension for dimension in self.dimensions if _applies(dimension, config.resolved))
        try:
            return {dimension.name: dimension.param(config.get(dimension.key.path)) for dimension in ours}
        except ValueError:
            return None

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Of all dimensions, by name."""
        return {dimension.name: dimension.distribution for dimension in self.dimensions}


def _applies(dimension: Dimension, resolved: Mapping[str, Value]) -> bool:
    condition = dimension.box.only_if
    is_selected = condition is None or resolved.get(condition[0]) in condition[1]
    return is_selected and applies(dimension.key, dimension.key.path, resolved)


def _around(key: Key, box: Box, now: Value) -> Box | None:
    """The box, moved or widened to the incumbent's value; None where that value would be lost."""
    low, high = box.low, box.high
    if box.scale is Scale.CHOICE:
        # Where the incumbent has left this choice, what suits the others does not suit it.
        return box if now is None or now in box.choices else None
    if isinstance(now, int | float) and now > 0 and key.path in BOXES:  # boxes in steps follow the run instead
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


def _fit(chosen: dict[str, Value], incumbent: Config) -> None:
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
    kind, least = number["trainer.scheduler.type"], "trainer.scheduler.min_lr"
    if number.get(least, 0.0) > number["trainer.optim.lr"]:
        chosen.pop(least, None)
    warmup, decay, steps = "trainer.scheduler.warmup_steps", "trainer.scheduler.decay_steps", number["max_steps"]
    if kind == "linear" and steps is None:
        chosen[decay] = 0
    elif kind in ("linear", "cosine") and number[warmup] + number.get(decay, 0) > steps - 1:
        chosen[warmup] = min(number[warmup], steps // 10)
        if number.get(decay):
            chosen[decay] = min(number[decay], steps // 2)
    if kind == "constant" and incumbent.get("trainer.scheduler.type") != "constant":
        chosen.pop("max_steps", None)  # it was the schedule's end

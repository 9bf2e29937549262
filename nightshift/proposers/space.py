"""The search space of TPE and random search: the allow-list's keys that the engine uses, each with a sensible box.

Types, variants and legal ranges come from keys.py. What needs judgement, where in its legal range a key is worth a
run, is the table `_BOXES`; a key that is not worth a search stands in `_NOT_SEARCHED`, both with the reason. A
choice or switch that stands in neither is searched over all that is legal.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nightshift.train_toml.config import Config
from nightshift.train_toml.edit import ABSENT, set_values
from nightshift.train_toml.keys import KEYS, applies, resolve, variants
from nightshift.train_toml.locks import CURRICULUM
from nightshift.train_toml.values import Key, Kind, Value

_DIGITS = 3  # of a sampled number: 3.42e-6 is as good as 3.4193e-6 and can be read
_REACH = 3.0  # a log box goes at least so far to both sides of the incumbent: the optimum moves with other keys


class Scale(StrEnum):
    """How the values of a dimension are spread."""

    LOG = "log"
    LINEAR = "linear"
    POWER_OF_TWO = "power of two"  # searched by its exponent
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Box:
    """Where a key is searched, and why there. `only_if` as in values.Key, beside the key's own."""

    scale: Scale
    reason: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Value, ...] = ()
    only_if: tuple[str, tuple[Value, ...]] | None = None


_LOG, _LINEAR, _POWER, _CHOICE = Scale.LOG, Scale.LINEAR, Scale.POWER_OF_TWO, Scale.CHOICE
_SWITCHES = {key.path for key in KEYS if key.kind is Kind.TABLE}
_DECAYING = ("trainer.scheduler.type", ("linear", "cosine"))

# Measured: on the arithmetic task of the trl engine. Effects there are those of one key from the shipped train.toml.
_BOXES: dict[str, Box] = {
    "orchestrator.batch_size": Box(_POWER, "measured: 128 to 512 alike, 1024 makes too few steps", 32, 512),
    "orchestrator.group_size": Box(_POWER, "measured: 4 and 8 best, 16 behind; 2 is the least that compares", 2, 16),
    "orchestrator.max_off_policy_steps": Box(_POWER, "1 is what prime-rl aims at, 8 its default bound", 1, 16),
    "orchestrator.concurrency.initial_inflight": Box(_POWER, "from a small batch to prime-rl's most", 64, 1024),
    "orchestrator.train.sampling.temperature": Box(_LINEAR, "measured: 0.7 to 1 alike, 1.3 far behind", 0.6, 1.2),
    "orchestrator.train.sampling.max_completion_tokens": Box(
        _POWER, "a GSM8K answer has 100 to 300 tokens; evaluation allows 1024", 256, 1024
    ),
    "orchestrator.algo.type": Box(_CHOICE, "rae needs groups of one, another space", choices=("grpo", "max_rl")),
    "orchestrator.algo.decay": Box(_CHOICE, "a memory of 10, 20 or 100 rewards", choices=(0.9, 0.95, 0.99)),
    "orchestrator.algo.length_penalty.num_output_tokens_weight": Box(_LOG, "around prime-rl's 0.25", 0.02, 0.5),
    "trainer.optim.type": Box(
        _CHOICE, "the same learning rates suit both; sgd and sign_sgd need others", choices=("adamw", "muon")
    ),
    "trainer.optim.lr": Box(_LOG, "measured: a third is slower, three times fine, ten times collapses", 5e-7, 2e-5),
    "trainer.optim.weight_decay": Box(_LOG, "at these rates above 0.1 is the first to be felt", 1e-3, 0.3),
    "trainer.optim.max_norm": Box(_LOG, "measured: gradient norms of 0.05 to 1", 0.05, 2.0),
    "trainer.optim.betas1": Box(_CHOICE, "the values in use", choices=(0.8, 0.9, 0.95)),
    "trainer.optim.betas2": Box(_CHOICE, "0.999 averages over a whole run", choices=(0.95, 0.99, 0.999)),
    "trainer.optim.mu": Box(_CHOICE, "the values in use", choices=(0.9, 0.95, 0.98)),
    "trainer.optim.momentum": Box(_CHOICE, "the values in use", choices=(0.8, 0.9, 0.95)),
    "trainer.loss.dppo_mask_low": Box(_LINEAR, "around prime-rl's 0.2; 1 is no mask", 0.05, 0.5),
    "trainer.loss.dppo_mask_high": Box(_LINEAR, "around prime-rl's 0.2; 1 is no mask", 0.05, 0.5),
    "trainer.loss.ipo_threshold": Box(_LINEAR, "around prime-rl's 0.1", 0.03, 0.3),
    "trainer.loss.kl_tau": Box(_LOG, "around prime-rl's 1e-3; at 0.1 it outweighs the reward", 1e-4, 0.03),
    "trainer.model.lora.rank": Box(_POWER, "around prime-rl's 16", 4, 128),
    "trainer.model.lora.alpha": Box(_LOG, "around prime-rl's 32", 8, 128),
}  # fmt: skip

_SPEED = "it makes steps faster, not better: a profile finds it, and what fits depends on the machine"
_NAMED = "a person names its entries"
_NOT_SEARCHED: dict[str, str] = {
    "seq_len": "it must fit prompt and completion; beyond that it is speed",
    "orchestrator.token_batch_size": "another way to say batch_size",
    "orchestrator.concurrency.min_inflight": "a floor below initial_inflight",
    "orchestrator.concurrency.max_inflight": "a ceiling above initial_inflight",
    "orchestrator.algo.length_penalty.type": "it has one choice",
    "orchestrator.algo.length_penalty.num_input_tokens_weight": "the prompt is the same in a group",
    "orchestrator.algo.length_penalty.num_turns_weight": "these environments have one turn",
    f"{CURRICULUM}.sampler.pools.*": _NAMED,
    f"{CURRICULUM}.sampler.pools.*.threshold": _NAMED,
    f"{CURRICULUM}.sampler.pools.*.weight": _NAMED,
    f"{CURRICULUM}.gates.*": _NAMED,
    f"{CURRICULUM}.gates.*.type": _NAMED,
    f"{CURRICULUM}.gates.*.reject_min": _NAMED,
    f"{CURRICULUM}.gates.*.reject_max": _NAMED,
    "trainer.scheduler.min_lr": "0 by default; it matters less than when the decay begins",
    "trainer.loss.adv_tau": "it scales the loss, which Adam divides out again; kl_tau is its ratio",
    "trainer.matmul_precision": _SPEED,
    "trainer.model.lora": "it needs a learning rate of its own, about ten times as high",
    "trainer.model.lora.dropout": "a minute of training does not overfit",
    "trainer.model.lora.target_modules": "all of them by default; a subset only saves memory",
    "trainer.model.optimization_dtype": "updates of 1e-6 vanish in bfloat16 weights",
    **{
        f"trainer.model.{name}": _SPEED
        for name in (
            "compile", "compile.fullgraph", "ac", "ac.freq", "ac_offloading", "ac_offloading.pin_memory",
            "ac_offloading.max_inflight_activations", "fsdp_cpu_offload", "optim_cpu_offload", "reshard_after_forward",
            "reduce_dtype", "fused_lm_head_token_chunk_size",
        )
    },
    **{
        f"inference.vllm.{name}": _SPEED
        for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager")
    },
}  # fmt: skip


def _schedule(num_steps: float | None) -> dict[str, Box]:
    """Boxes in steps: of the incumbent's run, so that a decay ends where the budget does."""
    kinds = "trainer.scheduler.type"
    if num_steps is None:  # a warm-up needs no end
        return {
            kinds: Box(_CHOICE, "how many steps fit is unknown: no decay", choices=("constant", "linear")),
            "trainer.scheduler.warmup_steps": Box(_LINEAR, "up to twice prime-rl's 10", 1, 20),
        }
    n = max(num_steps, 10.0)
    return {
        kinds: Box(_CHOICE, "all of them", choices=("constant", "linear", "cosine")),
        "trainer.scheduler.warmup_steps": Box(_LINEAR, "up to a tenth of the run", 1, max(2, n // 10)),
        "trainer.scheduler.decay_steps": Box(_LINEAR, "up to the last half of the run", 1, n // 2),
        "max_steps": Box(_LINEAR, "about as many as the budget allows", math.ceil(0.8 * n), 1.1 * n, only_if=_DECAYING),
    }


@dataclass(frozen=True, slots=True)
class Dimension:
    """One searched key. `name` is its path, with the variant added where a path has several entries."""

    name: str
    key: Key
    scale: Scale
    low: float
    high: float
    choices: tuple[Value, ...]
    reason: str
    only_if: tuple[str, tuple[Value, ...]] | None = None

    def sample(self, random_source: random.Random) -> Value:
        """A value from the box."""
        if self.scale is _CHOICE:
            return random_source.choice(self.choices)
        low, high = self._bounds
        if self._is_whole:
            return self.value(random_source.randint(int(low), int(high)))
        if self.scale is _LOG:
            return self.value(math.exp(random_source.uniform(math.log(low), math.log(high))))
        return self.value(random_source.uniform(low, high))

    def value(self, param: Any) -> Value:
        """What train.toml holds for an Optuna parameter."""
        if self.scale is _CHOICE:
            return {} if self.key.kind is Kind.TABLE and param == "on" else param
        if self.scale is _POWER:
            return int(2**param)
        return int(param) if self.key.kind is Kind.INT else float(f"{param:.{_DIGITS}g}")

    def param(self, value: Value) -> Any:
        """The Optuna parameter of a value, the nearest one of the box. Raises ValueError where there is none."""
        if self.scale is _CHOICE:
            if value not in self.choices:
                raise ValueError(f"{self.name} = {value!r} is none of {self.choices}")
            return "on" if value == {} else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{self.name} = {value!r} is no number")
        low, high = self._bounds
        number = math.log2(value) if self.scale is _POWER and value > 0 else value
        number = min(max(number, low), high)
        return round(number) if self._is_whole else number

    def distribution(self) -> str:
        """As optuna.distributions.json_to_distribution reads it."""
        if self.scale is _CHOICE:
            attributes: dict[str, Any] = {"choices": [self.param(choice) for choice in self.choices]}
            return json.dumps({"name": "CategoricalDistribution", "attributes": attributes})
        low, high = self._bounds
        if self._is_whole:
            attributes = {"log": False, "step": 1, "low": int(low), "high": int(high)}
            return json.dumps({"name": "IntDistribution", "attributes": attributes})
        attributes = {"step": None, "low": low, "high": high, "log": self.scale is _LOG}
        return json.dumps({"name": "FloatDistribution", "attributes": attributes})

    @property
    def _is_whole(self) -> bool:
        return self.scale is _POWER or self.key.kind is Kind.INT

    @property
    def _bounds(self) -> tuple[float, float]:
        """Of the parameter: exponents for powers of two."""
        if self.scale is _POWER:
            return round(math.log2(self.low)), round(math.log2(self.high))
        if self._is_whole:  # a box in steps of a run ends anywhere
            return (low := math.ceil(self.low)), max(math.floor(self.high), low)
        return self.low, self.high


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
        boxes = {**_BOXES, **_schedule(num_steps)}
        found: dict[str, Dimension] = {}
        for key in KEYS:
            box = boxes.get(key.path) or _whole_range(key)
            if box is None or (used_keys is not None and key.path not in used_keys):
                continue
            has_variants = len(variants(key.path)) > 1
            variant = f" ({key.only_if[1][0]})" if has_variants and key.only_if else ""
            dimension = _around(key, box, incumbent.resolved.get(key.path), key.path + variant)
            if dimension is not None and _can_apply(dimension, found, incumbent):
                found[dimension.name] = dimension
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
                if dimension.scale is _CHOICE:  # it may select what follows
                    resolved = resolve(chosen)
        _fit(chosen, self.incumbent)
        resolved = resolve(chosen)
        changes: dict[str, Any] = {path: ABSENT for path in self.incumbent.values if path not in resolved}
        changes |= {path: ABSENT for path in self.incumbent.values if path not in chosen}
        before = self.incumbent.resolved
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

    def to_distributions(self) -> Mapping[str, str]:
        """Of all dimensions, by name, as optuna.distributions.json_to_distribution reads them."""
        return {dimension.name: dimension.distribution() for dimension in self.dimensions}

    @staticmethod
    def _applies(dimension: Dimension, resolved: Mapping[str, Value]) -> bool:
        is_selected = dimension.only_if is None or resolved.get(dimension.only_if[0]) in dimension.only_if[1]
        return is_selected and applies(dimension.key, dimension.key.path, resolved)


def _whole_range(key: Key) -> Box | None:
    """The box of a choice or switch that has none of its own; None for what is not searched."""
    if key.path in _NOT_SEARCHED:
        return None
    if key.kind is Kind.BOOL:
        return Box(_CHOICE, "on or off", choices=(False, True))
    if key.kind is Kind.TABLE:
        return Box(_CHOICE, "on or off", choices=(None, {}))
    if key.kind is Kind.CHOICE:
        return Box(_CHOICE, "all that is open", choices=key.choices)
    return None  # a schedule's length in steps, when how many fit is unknown


def _around(key: Key, box: Box, now: Value, name: str) -> Dimension | None:
    """The dimension of a box, moved or widened to the incumbent's value; None where that value would be lost."""
    low, high = box.low, box.high
    if box.scale is _CHOICE:
        if now is not None and now not in box.choices:
            return None  # the incumbent has left this choice: what suits the others does not suit it
    elif isinstance(now, int | float) and now > 0 and key.path in _BOXES:  # boxes in steps follow the run instead
        if box.scale is _LINEAR or low <= now <= high:
            low, high = min(low, now), max(high, now)
        else:
            low = high = now
        if box.scale is _LOG:
            low, high = min(low, now / _REACH), max(high, now * _REACH)
        elif box.scale is _POWER:
            low, high = 2 ** math.floor(math.log2(low)), 2 ** math.ceil(math.log2(high))
    low = max(low, key.minimum if key.minimum is not None else low)
    high = min(high, key.maximum if key.maximum is not None else high)
    only_if = box.only_if if box.only_if is not None else key.only_if
    return Dimension(name, key, box.scale, low, high, box.choices, box.reason, only_if)


def _can_apply(dimension: Dimension, others: Mapping[str, Dimension], incumbent: Config) -> bool:
    """True if its variant and the tables around it are the incumbent's or can be chosen."""

    def can_be(path: str, wanted: Callable[[Value], bool]) -> bool:
        selector = others.get(path)
        return wanted(incumbent.resolved.get(path)) or any(map(wanted, selector.choices if selector else ()))

    condition = dimension.key.only_if
    if condition is not None and not can_be(condition[0], lambda value: value in condition[1]):
        return False
    segments = dimension.key.path.split(".")
    tables = (".".join(segments[:length]) for length in range(1, len(segments)))
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

"""A search without a language model, from the ledger alone: Optuna's TPE, or values drawn by chance.

The space has the keys of the allow-list that the engine uses, each in a box around the incumbent's value. A config is a
point of the unit cube: each key has a place in its box, from 0 to 1. A proposal changes one to three keys by a step: a
factor of two or three, another choice, or a third of a linear box. The steps of a schedule follow from the steps that a
run is expected to make, so that a decay ends with the budget at any batch size.

Not searched: keys that make steps faster (what fits depends on the machine), LoRA (needs a learning rate of its own),
adv_tau (scales the loss, which Adam divides out), min_lr, and the lengths of a warm-up and of a decay.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import optuna
from msgspec.structs import replace
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, FloatDistribution

from nightshift.agents.base import Answer, Context, Proposing
from nightshift.agents.history import load_configs
from nightshift.campaign.records import Proposal, Result
from nightshift.config.allowlist import LOSS, PARAMETERS, Key, Search, Value, applies, is_accepted, resolve, shorten
from nightshift.config.losses import keys_with
from nightshift.config.scope import is_within, scope_of
from nightshift.config.train_toml import ABSENT, Config, diff, parse, set_values
from nightshift.errors import ConfigError

# Random experiments before a model is asked; Optuna's default of 10 is a good part of a night of 40.
NUM_STARTUP = 8
_MAX_DRAWS = 40  # of which each changes nothing, was tried, or has keys that do not agree
_MAX_HYPOTHESIS = 200

KIND, WARMUP, DECAY = (f"trainer.scheduler.{leaf}" for leaf in ("type", "warmup_steps", "decay_steps"))
STEPS = "max_steps"
DECAYING = ("linear", "cosine")  # schedules, to the end of the budget
MAX_KEYS = 3  # of a proposal; steps that follow from another key do not count
FACTORS = (1 / 3, 1 / 2, 2, 3)  # by which a number changes; a smaller step drowns in noise
_DIGITS = 3  # of a sampled number: 3.42e-6 is as good as 3.4193e-6 and can be read
_SHARES = {DECAY: 0.5, WARMUP: 0.05}  # of a new schedule's steps
# Planned steps beyond the expected ones, in sd: better to lose the last part of a decay than a part of the budget.
_BEYOND = 0.5
_BEGUN = 3.5  # a decay begins before the budget ends, even if a run is so many sd slower than expected
_SETTLED = 0.1  # a max_steps that is as near to the plan stays as it is

NOISE_SD = 0.1  # of the logarithm of one run's seconds per step
LEAST_STEPS = 10  # of a plan: below that no schedule has a shape
_TOKENS = 512  # of a completion, if train.toml sets no maximum
# Of each driver's slope before the first run, in the order of _drivers.
_MEANS = np.array([0.0, 0.9, 0.2, 0.9, 0.7, 0.3, 0.2, -0.1])
_SDS = np.array([10.0, 0.2, 0.15, 0.5, 0.4, 0.3, 0.2, 0.1])


@dataclass(frozen=True, slots=True)
class SearchProposer:
    """Changes one to three keys of the incumbent. `random` draws the values by chance; every other proposer has to beat
    it. `tpe` draws them from TPE, key by key (Watanabe 2023, arXiv:2304.11127)."""

    name: str
    seed: int
    sandbox: ClassVar = ""  # it asks nobody
    is_instant: ClassVar = True

    def propose(self, context: Context) -> Proposing:
        yield from ()
        return (self.answer(context),)

    def answer(self, context: Context) -> Answer:
        """Return one change; the same ledger and seed give the same change."""
        space = space_of(context)
        # A seed of its own for every proposal, also for one that follows a refusal; a resumed night repeats none.
        seed = f"{self.seed} {len(context.campaign.decided)} {len(context.refusals)}"
        if context.in_flight or context.waiting:
            seed += f" {context.number + len(context.waiting)}"
        rng = random.Random(seed)
        name = "random" if len(context.campaign.decided) < NUM_STARTUP else self.name
        tried = {config.hash for config in (*context.configs.values(), *_configs_ahead(context))}
        cause = "no change by one step is left to try"
        for _ in range(_MAX_DRAWS):
            try:
                config = parse(space.build(_draw(name, context, space, rng)))
            except ConfigError as error:
                cause = str(error)
                continue
            if config.hash not in tried and (changes := diff(space.base, config)):
                description = f"{self.name}: {', '.join(change.line for change in changes)}"
                return Answer(config.source, Proposal(description=shorten(description, _MAX_HYPOTHESIS)))
        return Answer(b"", cause=cause)


def space_of(context: Context) -> SearchSpace:
    results = {record.number: record.result for record in context.campaign.decided}
    runs = [(config, result) for number, config in context.configs.items() if (result := results[number])]
    plan = planner(runs, context.rules.budget_seconds)
    base, used = parse(context.source), context.used_keys
    keys = (key for key in keys_with(context.rules.losses, base.get(LOSS)) if used is None or key.path in used)
    return SearchSpace.of(keys, base, plan, scope_of(context.direction))


def scores(context: Context) -> list[tuple[Config, float]]:
    """Return every decided config, re-tests included, with the posterior mean of its score, a fraction of 1. A crash
    counts as the worst score."""
    campaign = context.campaign
    means = {
        record.number: campaign.posterior.predict(record.run.changes)[0]
        for record in campaign.decided
        if campaign.posterior is not None and record.score is not None and record.number in context.configs
    }
    worst = min(means.values(), default=0.0)
    return [(config, means.get(number, worst)) for number, config in context.configs.items()] if means else []


def _draw(name: str, context: Context, space: SearchSpace, rng: random.Random) -> dict[str, Value]:
    if name == "random":
        return space.change(rng, {dimension.name: rng.random() for dimension in space.dimensions})
    # Multivariate TPE gains 2.2 ± 0.5 pp less in 40 nights. The constant liar tells proposals in flight apart.
    seed = rng.getrandbits(32)
    sampler = optuna.samplers.TPESampler(n_startup_trials=1, seed=seed, multivariate=False, constant_liar=True)
    return space.change(rng, _ask(context, space, sampler))


def _configs_ahead(context: Context) -> list[Config]:
    """Return the configs that are in flight or wait for a slot."""
    in_flight = [*load_configs(context.ledger, context.in_flight).values()]
    return in_flight + [parse(answer.source) for answer in context.waiting if answer.source]


def _ask(context: Context, space: SearchSpace, sampler: optuna.samplers.BaseSampler) -> dict[str, float]:
    """Return the point of the unit cube that the sampler proposes, after the campaign's runs and those in flight."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    distributions: dict[str, BaseDistribution] = {d.name: FloatDistribution(0, 1) for d in space.dimensions}
    trials: list[tuple[Config, dict[str, Any]]] = [(config, {"value": score}) for config, score in scores(context)]
    trials += [(config, {"state": optuna.trial.TrialState.RUNNING}) for config in _configs_ahead(context)]
    for config, result in trials:
        with suppress(ValueError):  # a config that has left the space
            study.add_trial(optuna.create_trial(params=space.places(config), distributions=distributions, **result))
    return study.ask(distributions).params


# -- the space ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dimension:
    """One searched key. `box`: its places 0 to 1, with the incumbent's number in the middle. `steps`: the values that a
    proposal may set."""

    key: Key
    box: Search
    steps: tuple[Value, ...]

    @property
    def name(self) -> str:
        return self.key.path

    @classmethod
    def of(cls, key: Key, search: Search, now: Value) -> Dimension | None:
        """Return the dimension around the incumbent's value; None if that value is not one of the choices."""
        if search.scale == "choice":
            is_known = now is None or now in search.choices  # what suits the choices may not suit another value
            return cls(key, search, tuple(choice for choice in search.choices if choice != now)) if is_known else None
        is_whole, is_linear = search.scale == "power of two", search.scale == "linear"
        if not isinstance(now, int | float) or (now <= 0 and not is_linear):
            spread = (search.low, math.sqrt(search.low * search.high), search.high)
            return cls(key, search, tuple(round(n) if is_whole else float(f"{n:.3g}") for n in spread))
        low, high = min(search.low, now), max(search.high, now)
        if is_linear:
            reach, step = max(now - low, high - now), (search.high - search.low) / 3
            box, numbers = replace(search, low=now - reach, high=now + reach), [now + n * step for n in (-2, -1, 1, 2)]
        else:
            reach = max(now / low, high / now, FACTORS[-1])
            box, numbers = replace(search, low=now / reach, high=now * reach), [now * factor for factor in FACTORS]
        steps: list[int | float] = [float(f"{number:.{_DIGITS}g}") for number in numbers]
        if is_whole:
            steps = [*([] if now % 2 else [int(now) // 2]), int(now) * 2]
        is_bounded = is_whole or is_linear
        steps = [step for step in steps if low <= step <= high or not is_bounded]
        return cls(key, box, tuple(step for step in steps if is_accepted(key, step)))

    def place(self, value: Value) -> float:
        """Return the nearest place to a value; the middle for None. ValueError: it is not one of the choices."""
        choices = self.box.choices
        if choices and (value is not None or None in choices):
            return choices.index(value) / max(len(choices) - 1, 1)
        low, high = self._scaled(self.box.low), self._scaled(self.box.high)
        if not isinstance(value, int | float) or low == high:
            return 0.5
        return min(max((self._scaled(max(value, self.box.low)) - low) / (high - low), 0.0), 1.0)

    def step(self, place: float) -> Value:
        """Return the step that is nearest to a place."""
        return min(self.steps, key=lambda value: abs(self.place(value) - place))

    def _scaled(self, number: float) -> float:
        return math.log2(number) if self.box.scale in ("log", "power of two") else number


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The dimensions around the config `base`; a selector stands before what it selects. `plan`: the steps of a run,
    from the keys that apply in its train.toml. `scope`: the keys and tables that may change; empty for all."""

    dimensions: tuple[Dimension, ...]
    base: Config
    plan: Planner
    scope: tuple[str, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[Key], base: Config, plan: Planner, scope: tuple[str, ...] = ()) -> SearchSpace:
        """Return the space of `keys`, those that the engine uses."""
        keys = (key for key in keys if is_within(scope, key.path))
        dimensions = (Dimension.of(key, key.search, _value(key, base)) for key in keys if key.search)
        return cls(tuple(filter(None, dimensions)), base, plan, scope)

    def places(self, config: Config) -> dict[str, float]:
        """Return the place of each key, the middle if it does not apply. ValueError: a value is not a choice."""
        return {d.name: d.place(_value(d.key, config)) if _applies(d, config) else 0.5 for d in self.dimensions}

    def change(self, rng: random.Random, places: Mapping[str, float]) -> dict[str, Value]:
        """Return the steps to these places of one to three keys, chosen by chance among those that apply to the base.

        Raises ConfigError if no key can change.
        """
        dimensions = [dimension for dimension in self.dimensions if dimension.steps and _applies(dimension, self.base)]
        if not dimensions:
            scope = f" within {', '.join(self.scope)}" if self.scope else ""
            raise ConfigError(f"the search has no key to change{scope}", "Name searched keys, or ask an agent.")
        chosen = rng.sample(dimensions, min(rng.randint(1, MAX_KEYS), len(dimensions)))
        return {dimension.name: dimension.step(places[dimension.name]) for dimension in chosen}

    def build(self, values: Mapping[str, Value]) -> bytes:
        """Return the base's train.toml with these values, if their keys apply; comments and other keys are kept.

        Raises ConfigError if keys do not agree that were drawn one by one.
        """
        chosen = dict[str, Any](self.base.values)
        for dimension in self.dimensions:
            if dimension.name in values and applies(dimension.key, dimension.name, resolve(chosen)):
                chosen[dimension.name] = values[dimension.name]
        if chosen.get(LOSS) != self.base.values.get(LOSS):  # another loss begins with its own defaults
            chosen = {path: value for path, value in chosen.items() if not path.startswith(f"{PARAMETERS}.")}
        if KIND in values or (STEPS in chosen and is_within(self.scope, STEPS)):
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


def _value(key: Key, config: Config) -> Value:
    """Return a key's value in a config; the default of a parameter that is not set, of which train.toml knows none."""
    return config.resolved.get(key.path, key.default if key.table == PARAMETERS else None)


def _applies(dimension: Dimension, config: Config) -> bool:
    return applies(dimension.key, dimension.name, config.resolved)


# -- the steps of a run ------------------------------------------------------------------------------


# The steps that a run is expected to make in its budget, and the sd of their logarithm.
Planner = Callable[[Mapping[str, Value]], tuple[float, float]]


def planner(runs: Iterable[tuple[Config, Result]], budget_seconds: float) -> Planner:
    """Return a function that predicts the steps of a run from the keys of its train.toml, fitted to runs.

    The logarithm of the seconds per step is linear in what drives them. The slopes before the first run are those of
    arithmetic on the embedded engine (benchmarks/slope.py). Their sd let a few runs teach another model and machine. A
    run without a step does not count.
    """
    precision, pull = np.diag(_SDS**-2), _MEANS * _SDS**-2
    for config, run in runs:
        training, drivers = run.training, _drivers(config.resolved)
        if training.training_seconds and training.num_steps:
            # A run that trains longer spent the whole budget: CPU time passes more slowly than wall-clock time.
            seconds = min(training.training_seconds, budget_seconds) / training.num_steps
            precision += np.outer(drivers, drivers) / NOISE_SD**2
            pull += drivers * math.log(seconds) / NOISE_SD**2
    covariance = np.linalg.inv(precision)
    mean = covariance @ pull

    def plan(resolved: Mapping[str, Value]) -> tuple[float, float]:
        drivers = _drivers(resolved)
        log_sd = math.sqrt(float(drivers @ covariance @ drivers) + NOISE_SD**2)
        return max(budget_seconds * math.exp(-float(drivers @ mean)), LEAST_STEPS), log_sd

    return plan


def _drivers(resolved: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return what drives the seconds per step, each about 0 under the shipped train.toml."""
    tokens = resolved.get("orchestrator.train.sampling.max_completion_tokens") or _TOKENS
    batch = resolved.get("orchestrator.batch_size") or resolved["orchestrator.token_batch_size"] / tokens
    is_whole = not resolved["orchestrator.train.filter_zero_advantages"]
    return np.array([
        1.0,
        math.log(batch / 256),
        0.0 if is_whole else math.log(resolved["orchestrator.group_size"] / 4),  # small groups are left out more often
        float(is_whole),
        (resolved["orchestrator.train.sampling.temperature"] or 1.0) - 1.0,
        math.log(tokens / _TOKENS),
        float(resolved["trainer.optim.type"] == "muon"),
        math.log(resolved["trainer.optim.lr"] / 3e-6),
    ])  # fmt: skip

"""Search without a language model: Optuna's TPE, or random values.

The search space has the keys of the allow-list that the engine uses, each in a box around the incumbent's value. A
config is a point of the unit cube: each key has a place in its box, from 0 to 1. A proposal changes one to three keys
by one step: a factor of two or three, another choice, or a third of a linear box. The length of a schedule follows from
the expected steps of a run, so that a decay ends with the budget at any batch size.

Not searched: keys that only change the speed, LoRA (needs another learning rate), adv_tau (a scale of the loss, which
Adam divides out), min_lr, and the lengths of warm-up and decay.
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
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, FloatDistribution

from nightshift.agents.base import Answer, Context, Proposing
from nightshift.agents.history import load_configs
from nightshift.campaign.records import Proposal, Result
from nightshift.config.allowlist import LOSS, PARAMETERS, Key, Search, Value, applies, is_accepted, resolve
from nightshift.config.losses import keys_with
from nightshift.config.scope import is_within, scope_of
from nightshift.config.train_toml import ABSENT, Config, diff, parse, set_values
from nightshift.errors import ConfigError

NUM_STARTUP = 8  # random experiments before TPE; Optuna's default of 10 is a quarter of a night of 40
_MAX_DRAWS = 40  # until a change is new and valid

KIND, WARMUP, DECAY = (f"trainer.scheduler.{leaf}" for leaf in ("type", "warmup_steps", "decay_steps"))
STEPS = "max_steps"
DECAYING = ("linear", "cosine")  # schedules that end with the budget
MAX_KEYS = 3  # of a proposal, without the length of a schedule
FACTORS = (1 / 3, 1 / 2, 2, 3)  # by which a number changes; a smaller step is lost in noise
_SHARES = {DECAY: 0.5, WARMUP: 0.05}  # of a new schedule's steps
# Planned steps beyond the expected steps, in sd: losing the end of a decay costs less than losing a part of the budget.
_BEYOND = 0.5
_BEGUN = 3.5  # a decay begins within the budget of a run that is this many sd slower than expected
_SETTLED = 0.1  # max_steps stays if its logarithm differs less from the plan

NOISE_SD = 0.1  # of the logarithm of one run's seconds per step
LEAST_STEPS = 10  # of a plan: a shorter schedule has no shape
_TOKENS = 512  # of a completion, if train.toml sets no maximum
# Prior of the slopes, in the order of _drivers.
_MEANS = np.array([0.0, 0.9, 0.2, 0.9, 0.7, 0.3, 0.2, -0.1])
_SDS = np.array([10.0, 0.2, 0.15, 0.5, 0.4, 0.3, 0.2, 0.1])


@dataclass(frozen=True)
class SearchProposer:
    """Changes one to three keys of the incumbent. `random` is the yardstick of all proposers. `tpe` draws each key from
    TPE (Watanabe 2023, arXiv:2304.11127)."""

    name: str
    seed: int
    sandbox: ClassVar = ""
    is_instant: ClassVar = True

    def propose(self, context: Context) -> Proposing:
        yield from ()
        return (self.answer(context),)

    def answer(self, context: Context) -> Answer:
        """Return one change. The same ledger and seed give the same change."""
        space = space_of(context)
        # Every proposal has another seed, also after a refusal and in a resumed night.
        seed = f"{self.seed} {len(context.campaign.decided)} {len(context.refusals)}"
        ahead = [*load_configs(context.ledger, context.in_flight).values()]
        ahead += [parse(answer.source) for answer in context.waiting if answer.source]
        if context.in_flight or context.waiting:
            seed += f" {context.number + len(context.waiting)}"
        rng = random.Random(seed)
        is_random = self.name == "random" or len(context.campaign.decided) < NUM_STARTUP
        tried = {config.hash for config in (*context.configs.values(), *ahead)}
        cause = "no change by one step is left to try"
        for _ in range(_MAX_DRAWS):
            places = (
                {name: rng.random() for name in space.dimensions} if is_random else _tpe(context, space, ahead, rng)
            )
            try:
                config = parse(space.build(space.change(rng, places)))
            except ConfigError as error:
                cause = str(error)
                continue
            if config.hash not in tried and (changes := diff(space.base, config)):
                description = f"{self.name}: {', '.join(change.line for change in changes)}"
                return Answer(config.source, Proposal(description=description))
        return Answer(b"", cause=cause)


def space_of(context: Context) -> SearchSpace:
    configs, base = context.configs, parse(context.source)
    runs = [(configs[r.number], r.result) for r in context.campaign.decided if r.result and r.number in configs]
    keys = (key for key in keys_with(context.rules.losses, base.get(LOSS)) if key.path in context.used_keys)
    return SearchSpace.of(keys, base, planner(runs, context.rules.budget_seconds), scope_of(context.direction))


def scores(context: Context) -> list[tuple[Config, float]]:
    """Return each decided config with the posterior mean of its score. A crash counts as the worst score."""
    posterior, decided = context.campaign.posterior, context.campaign.decided
    assert posterior is not None
    means = {record.number: posterior.predict(record.run.changes)[0] for record in decided if record.score is not None}
    worst = min(means.values())
    return [(config, means.get(number, worst)) for number, config in context.configs.items()]


def _tpe(context: Context, space: SearchSpace, ahead: Iterable[Config], rng: random.Random) -> dict[str, float]:
    """Return the point of the unit cube that TPE proposes. `ahead`: the configs that run or wait for a slot."""
    # Multivariate TPE gains 2.2 ± 0.5 pp less in 40 nights. The constant liar keeps simultaneous proposals different.
    seed = rng.getrandbits(32)
    sampler = optuna.samplers.TPESampler(n_startup_trials=1, seed=seed, multivariate=False, constant_liar=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    distributions: dict[str, BaseDistribution] = dict.fromkeys(space.dimensions, FloatDistribution(0, 1))

    def add(config: Config, **result: Any) -> None:
        with suppress(ValueError):  # a config outside the space
            study.add_trial(optuna.create_trial(params=space.places(config), distributions=distributions, **result))

    for config, score in scores(context):
        add(config, value=score)
    for config in ahead:
        add(config, state=optuna.trial.TrialState.RUNNING)
    return study.ask(distributions).params


@dataclass(frozen=True)
class Dimension:
    """One searched key. Its box is `middle` ± `reach` on the scale of `_scaled`; the incumbent is in the middle."""

    key: Key
    search: Search
    middle: float
    reach: float
    steps: tuple[Value, ...]  # the values that a proposal may set

    @classmethod
    def of(cls, key: Key, base: Config) -> Dimension | None:
        """Return the dimension around the value of `base`; None if the key is not searched for this value."""
        search, now = key.search, _value(key, base)
        if search is None:
            return None
        if search.scale == "choice":
            middle, is_known = (len(search.choices) - 1) / 2, now is None or now in search.choices
            steps = tuple(choice for choice in search.choices if choice != now)
            return cls(key, search, middle, middle, steps) if is_known else None
        low, high, is_linear = _scaled(search, search.low), _scaled(search, search.high), search.scale == "linear"
        if isinstance(now, int | float) and (now > 0 or is_linear):
            middle, third = _scaled(search, now), (search.high - search.low) / 3
            reach = max(middle - low, high - middle, 0.0 if is_linear else math.log2(FACTORS[-1]))
            numbers = [now + n * third for n in (-2, -1, 1, 2)] if is_linear else [now * factor for factor in FACTORS]
            if search.scale == "power of two":
                numbers = [now * 2] if now % 2 else [now // 2, now * 2]
        else:
            middle, reach = (low + high) / 2, (high - low) / 2
            numbers = [search.low, math.sqrt(search.low * search.high), search.high]
        rounded = [round(n) if search.scale == "power of two" else float(f"{n:.3g}") for n in numbers]
        low, high = min(low, middle), max(high, middle)
        allowed = (n for n in rounded if search.scale == "log" or low <= _scaled(search, n) <= high)
        return cls(key, search, middle, reach, tuple(n for n in allowed if is_accepted(key, n)))

    def place(self, value: Value) -> float:
        """Return the place nearest to a value, the middle for None. Raises ValueError for an unknown choice."""
        number, choices = self.middle, self.search.choices
        if choices and (value is not None or None in choices):
            number = choices.index(value)
        elif isinstance(value, int | float):
            number = _scaled(self.search, value)
        return min(max(0.5 + (number - self.middle) / (2 * self.reach or 1.0), 0.0), 1.0)

    def step(self, place: float) -> Value:
        """Return the step nearest to a place."""
        return min(self.steps, key=lambda value: abs(self.place(value) - place))


def _scaled(search: Search, number: float) -> float:
    if search.scale == "linear":
        return number
    return math.log2(number) if number > 0 else -math.inf


@dataclass(frozen=True)
class SearchSpace:
    """The search space around the config `base`."""

    dimensions: Mapping[str, Dimension]  # by key; the key of a variant before the keys of its variants
    base: Config
    plan: Planner
    scope: tuple[str, ...]  # keys and tables that may change; empty: all

    @classmethod
    def of(cls, keys: Iterable[Key], base: Config, plan: Planner, scope: tuple[str, ...] = ()) -> SearchSpace:
        """Return the space of `keys`, which the engine uses."""
        dimensions = (Dimension.of(key, base) for key in keys if is_within(scope, key.path))
        return cls({dimension.key.path: dimension for dimension in dimensions if dimension}, base, plan, scope)

    def places(self, config: Config) -> dict[str, float]:
        """Return the place of each key, the middle for a key that does not apply. Raises ValueError like `place`."""
        return {
            name: d.place(_value(d.key, config)) if applies(d.key, name, config.resolved) else 0.5
            for name, d in self.dimensions.items()
        }

    def change(self, rng: random.Random, places: Mapping[str, float]) -> dict[str, Value]:
        """Return new values for one to three random keys that apply to the base: the steps nearest to `places`. Raises
        ConfigError if no key can change."""
        names = [name for name, d in self.dimensions.items() if d.steps and applies(d.key, name, self.base.resolved)]
        if not names:
            scope = f" within {', '.join(self.scope)}" if self.scope else ""
            raise ConfigError(f"the search has no key to change{scope}", "Name other keys, or use an agent.")
        chosen = rng.sample(names, min(rng.randint(1, MAX_KEYS), len(names)))
        return {name: self.dimensions[name].step(places[name]) for name in chosen}

    def build(self, values: Mapping[str, Value]) -> bytes:
        """Return the base's train.toml with those of the values whose keys apply. Raises ConfigError if the new values
        do not fit together."""
        chosen = dict[str, Any](self.base.values)
        for name, dimension in self.dimensions.items():
            if name in values and applies(dimension.key, name, resolve(chosen)):
                chosen[name] = values[name]
        if chosen.get(LOSS) != self.base.values.get(LOSS):  # another loss starts from its defaults
            chosen = {path: value for path, value in chosen.items() if not path.startswith(f"{PARAMETERS}.")}
        if KIND in values or (STEPS in chosen and is_within(self.scope, STEPS)):
            self._schedule(chosen)
        resolved = resolve(chosen)
        kept = {path: value for path, value in chosen.items() if path in resolved}
        changes: dict[str, Any] = {path: ABSENT for path in self.base.values if path not in kept}
        changes |= {path: value for path, value in kept.items() if self.base.resolved.get(path, ABSENT) != value}
        return set_values(self.base.source, changes)

    def _schedule(self, chosen: dict[str, Any]) -> None:
        """Set the steps of the schedule, which ends with the budget. Warm-up and decay keep their shares."""
        resolved: dict[str, Any] = resolve(chosen)
        if resolved[KIND] not in DECAYING:
            chosen.pop(STEPS, None)
            return
        num_steps, log_sd = self.plan(resolved)
        steps, before = round(num_steps * math.exp(_BEYOND * log_sd)), self.base.get(STEPS)
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
    """Return a key's value in a config, or the default of a loss parameter, which `resolved` lacks."""
    return config.resolved.get(key.path, key.default if key.table == PARAMETERS else None)


# Returns the expected steps of a run within its budget, and the sd of their logarithm.
Planner = Callable[[Mapping[str, Value]], tuple[float, float]]


def planner(runs: Iterable[tuple[Config, Result]], budget_seconds: float) -> Planner:
    """Fit a function that predicts the steps of a run from the keys of its train.toml.

    Bayesian linear regression of the logarithm of the seconds per step on the drivers. The prior is from arithmetic on
    the engine trl (benchmarks/slope.py), wide enough that a few runs fit it to another model and machine.
    """
    precision, pull = np.diag(_SDS**-2), _MEANS * _SDS**-2
    for config, run in runs:
        training, drivers = run.training, _drivers(config.resolved)
        if training.training_seconds and training.num_steps:
            # A longer run spent the whole budget: CPU time passes more slowly than wall-clock time.
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
    """Return the drivers of the seconds per step. All but the first are about 0 for the shipped train.toml."""
    tokens = resolved.get("orchestrator.train.sampling.max_completion_tokens") or _TOKENS
    batch = resolved.get("orchestrator.batch_size") or resolved["orchestrator.token_batch_size"] / tokens
    is_whole = not resolved["orchestrator.train.filter_zero_advantages"]
    return np.array([
        1.0,
        math.log(batch / 256),
        0.0 if is_whole else math.log(resolved["orchestrator.group_size"] / 4),  # small groups are dropped more often
        float(is_whole),
        (resolved["orchestrator.train.sampling.temperature"] or 1.0) - 1.0,
        math.log(tokens / _TOKENS),
        float(resolved["trainer.optim.type"] == "muon"),
        math.log(resolved["trainer.optim.lr"] / 3e-6),
    ])  # fmt: skip

"""What a train.toml would score, made up: landscapes for nights without training (proposers.py).

bowl      a bowl over every searched key, the optimum some way from the shipped config and 5 pp above it, weak
          interactions; whoever leaps far falls deep. Decided with GSM8K's constants, on whose scale it is. Its seconds
          a step are those of the recorded nights.
emulator  the 62 recorded runs of arithmetic, by a random forest: another family than any proposer's model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from recorded import NIGHTS, runs
from sklearn.ensemble import RandomForestRegressor

from nightshift.agents.space import STEPS, SearchSpace
from nightshift.agents.throughput import Throughput
from nightshift.campaign.records import Result
from nightshift.config.decision_rules import DecisionRules
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import rules_here
from nightshift.config.train_toml import Config, parse
from nightshift.engines.trl.engine import TrlEngine

ROOT = Path(__file__).parents[1]
HELD_OUT = 0.3  # of the recorded runs, for what the emulator is worth
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Landscape:
    """`score`: the true one of a config, 0..1, given the steps that its run makes and those that it was planned for;
    `decision`: the constants of the rule for effects of its size."""

    name: str
    score: Callable[[Config, float, float], float]
    throughput: Throughput  # the true one
    decision: DecisionRules


@cache
def rules() -> Rules:
    """Those of arithmetic on the CPU."""
    return rules_here(ROOT, "trl", 0)


@cache
def engine() -> TrlEngine:
    return TrlEngine(rules(), ROOT, {})


@cache
def shipped() -> Config:
    return parse((ROOT / "train.toml").read_bytes())


@cache
def used_keys() -> frozenset[str]:
    from nightshift.engines.base import used_keys

    return frozenset(used_keys(engine(), shipped()) or ())


@cache
def recorded() -> tuple[tuple[Config, Result], ...]:
    """The runs of the two recorded nights, with their configs."""
    return tuple(run for night in NIGHTS for run in runs(night))


@cache
def true_throughput() -> Throughput:
    return Throughput.of(recorded(), 60.0)


def space() -> SearchSpace:
    """Around the shipped config; its cube is what landscapes are made over."""
    return SearchSpace.for_engine(used_keys(), shipped(), true_throughput().plan)


def bowl(seed: int) -> Landscape:
    """Additive in every dimension, 5 pp to be had, with interactions of 15 %."""
    rng, around = np.random.default_rng((seed, 5)), space()
    start = np.array(around.places(shipped()))
    best = np.clip(start + rng.normal(0, 0.3, len(start)), 0, 1)
    steepness = np.exp(rng.normal(0, 1, len(start)))
    steepness *= 0.05 / (steepness * (best - start) ** 2).sum()
    raw = rng.normal(0, 1, (len(start), len(start)))
    mixed = 0.15 * (raw + raw.T) / 2
    np.fill_diagonal(mixed, 0)

    def score(config: Config, num_steps: float, planned: float) -> float:
        away = np.sqrt(steepness) * (np.array(around.places(config)) - best)
        return max(0.525 - float(away @ away + away @ mixed @ away), 0.02)

    return Landscape("bowl", score, true_throughput(), DecisionRules())


@cache
def forest() -> tuple[RandomForestRegressor, float]:
    """Fitted to all recorded runs, and how much of the variance it explains of those that were left out of a fit."""
    around, budget = space(), 60.0
    rows, scores = [], []
    for config, run in recorded():
        planned = config.get(STEPS) or run.training.num_steps
        seconds = run.training.training_seconds or budget
        rows.append([*around.places(config), min(seconds / budget, 1.0), min(run.training.num_steps / planned, 1.0)])
        scores.append(run.evaluation.eval_score if run.evaluation else math.nan)
    x, y, rng = np.array(rows), np.array(scores), np.random.default_rng(0)
    explained = []
    for _ in range(20):
        order = rng.permutation(len(y))
        out, fit = np.split(order, [round(HELD_OUT * len(y))])
        error = y[out] - _fitted(x[fit], y[fit], 0).predict(x[out])
        explained.append(1 - (error**2).mean() / ((y[out] - y[fit].mean()) ** 2).mean())
    return _fitted(x, y, 0), float(np.median(explained))


def _fitted(x: Floats, y: Floats, seed: int) -> RandomForestRegressor:
    return RandomForestRegressor(200, min_samples_leaf=2, max_features=0.7, random_state=seed, n_jobs=1).fit(x, y)


def emulator(seed: int) -> Landscape:
    """The forest over a resample of the recorded runs: each night meets another one."""
    around, whole = space(), forest()[0]
    trees = [whole.estimators_[i] for i in np.random.default_rng((seed, 6)).integers(0, 200, 40)]

    def score(config: Config, num_steps: float, planned: float) -> float:
        row = np.array(
            [[*around.places(config), min(num_steps / _budget_steps(config), 1.0), min(num_steps / planned, 1)]]
        )
        return float(np.mean([tree.predict(row)[0] for tree in trees]))

    return Landscape("emulator", score, true_throughput(), rules().decision)


def _budget_steps(config: Config) -> float:
    return true_throughput().plan(config.resolved).num_steps


LANDSCAPES = {"bowl": bowl, "emulator": emulator}

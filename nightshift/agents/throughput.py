"""Predict how many steps a run makes in its budget, from the campaign's own runs.

The logarithm of the seconds per step is linear in what drives them. The slopes before the first run are those of
arithmetic on the embedded engine (benchmarks/slope.py). Their sd let a few runs teach another model and machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nightshift.agents.base import Context
from nightshift.campaign.records import Result
from nightshift.config.allowlist import Value
from nightshift.config.train_toml import Config

NOISE_SD = 0.1  # of the logarithm of one run's seconds per step
LEAST_STEPS = 10  # of a plan: below that no schedule has a shape
_TOKENS = 512  # of a completion, if train.toml sets no maximum
# Of each driver's slope before the first run, in the order of _drivers.
_MEANS = np.array([0.0, 0.9, 0.2, 0.9, 0.7, 0.3, 0.2, -0.1])
_SDS = np.array([10.0, 0.2, 0.15, 0.5, 0.4, 0.3, 0.2, 0.1])


class Plan(NamedTuple):
    """The steps that a run is expected to make in its budget, and the sd of their logarithm."""

    num_steps: float
    log_sd: float


@dataclass(frozen=True, slots=True, eq=False)
class Throughput:
    """A Gaussian belief over the slopes: `mean` (k,), `covariance` (k, k)."""

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]
    budget_seconds: float

    @classmethod
    def of(cls, runs: Iterable[tuple[Config, Result]], budget_seconds: float) -> Throughput:
        """Fit runs with their configs. A run without a step does not count."""
        precision, pull = np.diag(_SDS**-2), _MEANS * _SDS**-2
        for config, run in runs:
            if seconds := step_seconds(run, budget_seconds):
                drivers = _drivers(config.resolved)
                precision += np.outer(drivers, drivers) / NOISE_SD**2
                pull += drivers * math.log(seconds) / NOISE_SD**2
        covariance = np.linalg.inv(precision)
        return cls(covariance @ pull, covariance, budget_seconds)

    def plan(self, resolved: Mapping[str, Value]) -> Plan:
        drivers = _drivers(resolved)
        log_sd = math.sqrt(float(drivers @ self.covariance @ drivers) + NOISE_SD**2)
        return Plan(max(self.budget_seconds * math.exp(-float(drivers @ self.mean)), LEAST_STEPS), log_sd)


def step_seconds(run: Result, budget_seconds: float) -> float | None:
    """Return the seconds per step; None for a run without a step.

    A run that trains longer than its budget spent the whole budget: CPU time passes more slowly than wall-clock time.
    """
    seconds, num_steps = run.training.training_seconds, run.training.num_steps
    return min(seconds, budget_seconds) / num_steps if seconds and num_steps else None


def throughput_of(context: Context) -> Throughput:
    results = {record.number: record.result for record in context.campaign.decided}
    runs = [(config, result) for number, config in context.configs.items() if (result := results[number])]
    return Throughput.of(runs, context.rules.budget_seconds)


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

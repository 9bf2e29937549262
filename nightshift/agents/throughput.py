"""How long a training step takes under a config, learnt from the campaign's own runs.

A schedule ends at max_steps and a run at its budget: who plans the one for the other needs the number of steps before
the run. The logarithm of the seconds a step is linear in what drives them. The slopes before the first run are those of
arithmetic on the embedded engine (benchmarks/slope.py), uncertain enough that another model and machine is learnt in a
few runs.
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
from nightshift.config.train_toml import Config
from nightshift.config.values import Value

NOISE_SD = 0.1  # of one run, in the logarithm: how soon it learns decides how much of a batch is trained on
LEAST_STEPS = 10  # of a plan: below that no schedule has a shape
_TOKENS = 512  # of a completion where train.toml sets no most
# What drives the seconds of a step: mean and sd of its slope before the first run.
_PRIOR = {
    "constant": (0.0, 10.0),
    "log batch": (0.9, 0.2),
    "log batch, squared": (0.0, 0.05),
    "log group, where groups without an advantage are left out": (0.2, 0.15),  # of small groups more are
    "they are trained on": (0.9, 0.5),
    "temperature": (0.7, 0.4),
    "log tokens of a completion": (0.3, 0.3),
    "muon": (0.2, 0.2),
    "log learning rate": (-0.1, 0.1),
}


class Plan(NamedTuple):
    """Steps that a run is expected to make in its budget, and the sd of the logarithm of that."""

    num_steps: float
    log_sd: float


@dataclass(frozen=True, slots=True, eq=False)
class Throughput:
    """A belief over the slopes, Gaussian: `mean` (k,), `covariance` (k, k)."""

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]
    budget_seconds: float

    @classmethod
    def of(cls, runs: Iterable[tuple[Config, Result]], budget_seconds: float) -> Throughput:
        """From runs with their configs; a run on a busy machine says less, one that made no step nothing."""
        means, sds = np.array([*_PRIOR.values()]).T
        precision, pull = np.diag(sds**-2), means * sds**-2
        for config, run in runs:
            if seconds := step_seconds(run):
                drivers, variance = (
                    _drivers(config.resolved),
                    NOISE_SD**2 + (run.contention.taken if run.contention else 0.0) ** 2,
                )
                precision += np.outer(drivers, drivers) / variance
                pull += drivers * math.log(seconds) / variance
        covariance = np.linalg.inv(precision)
        return cls(covariance @ pull, covariance, budget_seconds)

    def plan(self, resolved: Mapping[str, Value]) -> Plan:
        drivers = _drivers(resolved)
        log_sd = math.sqrt(float(drivers @ self.covariance @ drivers) + NOISE_SD**2)
        return Plan(max(self.budget_seconds * math.exp(-float(drivers @ self.mean)), LEAST_STEPS), log_sd)


def step_seconds(run: Result) -> float | None:
    """Of a step, on the budget's clock; where that was not measured, on the wall's; None without one."""
    if run.contention and run.contention.step_seconds:
        return run.contention.step_seconds
    seconds, num_steps = run.training.training_seconds, run.training.num_steps
    return seconds / num_steps if seconds and num_steps else None


def throughput_of(context: Context) -> Throughput:
    known = [record for record in context.campaign.decided if record.number in context.configs]
    runs = [(context.configs[record.number], record.result) for record in known if record.result]
    return Throughput.of(runs, context.rules.budget_seconds)


def _drivers(resolved: Mapping[str, Any]) -> NDArray[np.float64]:
    """In the order of _PRIOR, each about 0 under the shipped train.toml."""
    tokens = resolved.get("orchestrator.train.sampling.max_completion_tokens") or _TOKENS
    batch = resolved.get("orchestrator.batch_size") or resolved["orchestrator.token_batch_size"] / tokens
    log_batch, is_whole = math.log(batch / 256), not resolved["orchestrator.train.filter_zero_advantages"]
    return np.array([
        1.0,
        log_batch,
        log_batch**2,
        0.0 if is_whole else math.log(resolved["orchestrator.group_size"] / 4),
        float(is_whole),
        (resolved["orchestrator.train.sampling.temperature"] or 1.0) - 1.0,
        math.log(tokens / _TOKENS),
        float(resolved["trainer.optim.type"] == "muon"),
        math.log(resolved["trainer.optim.lr"] / 3e-6),
    ])  # fmt: skip

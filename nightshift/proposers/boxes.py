"""Where a key is worth a search: the judgement that the allow-list (train_toml/keys.py) cannot hold.

What stands in no box is not searched:
    speed          makes steps faster, not better; a profile finds it, and what fits depends on the machine
    lora           needs a learning rate of its own, about ten times as high
    pools, gates   a person names them
    adv_tau        scales the loss, which Adam divides out again; kl_tau is its ratio
    min_lr         matters less than when the decay begins
    the rest       follows from another key, or changes nothing in environments of one turn
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nightshift.train_toml.locks import CURRICULUM
from nightshift.train_toml.values import Value


class Scale(StrEnum):
    """How the values of a dimension are spread."""

    LOG = "log"
    LINEAR = "linear"
    SHARE = "share"  # of the steps that the run is expected to make
    POWER_OF_TWO = "power of two"  # searched by its exponent
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Box:
    """Where a key is searched."""

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
    "trainer.optim.lr": Box(_LOG, 5e-7, 2e-5),  # measured: a third is slower, three times fine, ten times collapses
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

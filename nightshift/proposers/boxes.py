"""Where a key is worth a search, and why there: the judgement that the allow-list cannot hold.

Types, variants and legal ranges come from keys.py. What needs judgement is the table `BOXES`; a key that is not
worth a search stands in `NOT_SEARCHED`, both with the reason. A choice or switch that stands in neither is searched
over all that is legal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from nightshift.train_toml.locks import CURRICULUM
from nightshift.train_toml.values import Key, Kind, Value


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
_DECAYING = ("trainer.scheduler.type", ("linear", "cosine"))

# Measured: on the arithmetic task of the trl engine. Effects there are those of one key from the shipped train.toml.
BOXES: dict[str, Box] = {
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
NOT_SEARCHED: dict[str, str] = {
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


def box_of(key: Key, num_steps: float | None) -> Box | None:
    """The box of a key; None for what is not searched. `num_steps` of the incumbent's run, None where it is unknown."""
    box = _schedule(num_steps).get(key.path) or BOXES.get(key.path)
    if box is not None or key.path in NOT_SEARCHED:
        return box
    switches: dict[Kind, tuple[Value, ...]] = {Kind.BOOL: (False, True), Kind.TABLE: (None, {})}
    if key.kind in switches:
        return Box(_CHOICE, "on or off", choices=switches[key.kind])
    if key.kind is Kind.CHOICE:
        return Box(_CHOICE, "all that is open", choices=key.choices)
    return None  # a schedule's length in steps, when how many fit is unknown


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

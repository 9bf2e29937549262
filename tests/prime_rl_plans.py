"""Configs of many kinds, and the prime-rl runs that are planned from them; shared by unit and integration tests."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from nightshift.config.allowlist import ANY, CURRICULUM, KEYS, Key, Kind, Value
from nightshift.config.rules import NO_CARD
from nightshift.config.train_toml import Config, parse, set_values
from nightshift.engines.prime_rl.config import effective
from nightshift.engines.prime_rl.launch import Launch
from nightshift.errors import ConfigError
from nightshift.executors.gpus import Gpu
from tests.rules import GSM8K_PRIME_RL

SHIPPED = (Path(__file__).parents[1] / "train.toml").read_bytes()
# The shipped file, and what it would be with adapters, and with a schedule that ends.
VARIANTS: dict[str, dict[str, Any]] = {
    "train": {},
    "lora": {"trainer.model.lora": {}, "trainer.model.lora.rank": 24},
    "max_steps": {"max_steps": 40, "trainer.scheduler.type": "linear", "trainer.scheduler.decay_steps": 30},
}
PORT = 20001
# As Installation.environment makes it.
ENVIRONMENT = {
    "PATH": "/opt/prime-rl/.venv/bin:/usr/bin",
    "PYTHONPATH": "/opt/prime-rl/.nightshift/environments/0123456789abcdef",
    "VLLM_CACHE_ROOT": "/opt/prime-rl/.nightshift/caches/vllm",
}
# Two cards that an installation is checked and prepared for.
GPU = Gpu(0, "NVIDIA A100-SXM4-80GB", "GPU-1", 85.0, 85.0, "570.86", (8, 0))
PAIR = (GPU, replace(GPU, index=1, uuid="GPU-2"))
_BASE = b"max_steps = 1000\n[orchestrator]\ngroup_size = 2\n"
_POOL, _OTHER_POOL = (f"{CURRICULUM}.sampler.pools.{name}" for name in ("one", "two"))
# What a key needs beside it for each of its values to be valid.
_BESIDE: dict[str, dict[str, Any]] = {
    "orchestrator.batch_size": {"orchestrator.group_size": 1, "orchestrator.algo.type": "rae"},
    "orchestrator.group_size": {"orchestrator.token_batch_size": 1024, "orchestrator.algo.type": "rae"},
    "orchestrator.concurrency.initial_inflight": {"orchestrator.group_size": 1, "orchestrator.algo.type": "rae"},
    "orchestrator.concurrency.max_inflight": {"orchestrator.group_size": 1, "orchestrator.algo.type": "rae"},
    f"{_POOL}.weight": {f"{_OTHER_POOL}.threshold": 1.0, f"{_OTHER_POOL}.weight": 1.0},
    "trainer.optim.momentum": {"trainer.optim.nesterov": False},
}


def variant(name: str) -> Config:
    return parse(set_values(SHIPPED, VARIANTS[name]))


def launch_of(source: Config, run_dir: Path, seed: int = 1000, **changes: Any) -> Launch:
    """The plan of one run, with invented GPUs, ports and installation unless `changes` names others."""
    given: dict[str, Any] = {
        "port": PORT,
        "gpu_ids": (0, 1),
        "bin_dir": Path("/opt/prime-rl/.venv/bin"),
        "environment": ENVIRONMENT,
        "variables": {},
        "seats": {"gsm8k": "agent"},
    }
    rules = replace(changes.pop("rules", GSM8K_PRIME_RL), memory=changes.pop("memory", NO_CARD))
    return Launch(settings=effective(source, rules, 448), seed=seed, run_dir=run_dir, **(given | changes))


@cache
def open_configs() -> dict[str, Config]:
    """A config for every open key at each of its choices and near each of its bounds, as far as it is valid alone."""
    found = {}
    for key in KEYS:
        for value in samples(key):
            changes: dict[str, Any] = {}
            if key.only_if and key.only_if[1] != (None,):
                changes[key.only_if[0]] = key.only_if[1][0]
            if key.path.startswith(_POOL.removesuffix(".one")):
                changes |= {f"{CURRICULUM}.sampler.type": "difficulty_pool"}
                changes |= {f"{_POOL}.threshold": 0.5, f"{_POOL}.weight": 1.0}
            path = key.path.replace(ANY, "one")
            changes |= _BESIDE.get(path, {})
            changes[path] = value
            try:
                checked = parse(set_values(_BASE, changes))
                effective(checked, GSM8K_PRIME_RL, 448)
            except ConfigError:
                continue  # these rules have no game and no second environment, and serve shorter completions
            found[f"{key.path} = {value}"] = checked
    return found


def samples(key: Key) -> list[Value]:
    """Return values of an open key: its choices, its default, and those at its bounds."""
    if key.kind is Kind.BOOL:
        return [True, False]
    if key.kind is Kind.TABLE:
        return [{}, None] if key.nullable else [{}]
    if key.kind is Kind.LIST:
        return [key.choices[:1], key.choices]
    step = 1 if key.kind is Kind.INT else 1e-9
    bounds = (key.minimum, key.maximum, _shifted(key.above, step), _shifted(key.below, -step))
    numbers = [int(bound) if key.kind is Kind.INT else float(bound) for bound in bounds if bound is not None]
    default = [] if key.default is None else [key.default]
    return list(dict.fromkeys([*key.choices, *numbers, *default, *([None] if key.nullable else [])]))


def _shifted(bound: float | None, by: float) -> float | None:
    return None if bound is None else bound + by


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree with its dotted path; `[0]` counts in lists of tables."""
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    elif isinstance(node, list) and node and isinstance(node[0], Mapping):
        for index, value in enumerate(node):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, node

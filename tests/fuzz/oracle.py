"""A second opinion on an accepted train.toml, which shares no code with what accepted it.

Only the tables are shared: which keys are open, their types, bounds and choices, and what is locked.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nightshift.campaign.commits import incumbent_config
from nightshift.config.allowlist import FORMER, KEYS, LOCKS
from nightshift.config.train_toml import parse
from nightshift.config.values import Key, Kind
from nightshift.engines.prime_rl.config import effective
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import ConfigError, UsageError
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL

_PREFIXES = {path for lock in LOCKS for path in lock.paths} | set(FORMER)
LOCKED_ANYWHERE = {prefix.removeprefix("*.") for prefix in _PREFIXES if prefix.startswith("*.")}
LOCKED = {prefix for prefix in _PREFIXES if not prefix.startswith("*.")}
PROMPT_TOKENS = 448  # room for a question of GSM8K
_TYPES: dict[Kind, tuple[type, ...]] = {
    Kind.INT: (int,), Kind.FLOAT: (int, float), Kind.BOOL: (bool,), Kind.CHOICE: (str,), Kind.LIST: (list,),
    Kind.TABLE: (dict,),
}  # fmt: skip
_PATTERNS = [(re.compile(re.escape(key.path).replace(r"\*", r"[A-Za-z][A-Za-z0-9_-]{0,31}")), key) for key in KEYS]


def doubts(source: bytes) -> Iterator[str]:
    """Why this file should not have been accepted; nothing for a valid one."""
    yield from doubts_of_values(source)
    yield from _uses(source)


def doubts_of_values(source: bytes) -> Iterator[str]:
    """The same, without asking what train_toml.py and the engines make of it."""
    document = tomllib.loads(source.decode("utf-8"))
    leaves = dict(_leaves(document, ()))
    for path, value in leaves.items():
        found = [key for pattern, key in _PATTERNS if pattern.fullmatch(".".join(path))]
        if any("." in part for part in path) or not found:
            yield f"{'.'.join(path)} is no open key"
        elif not any(_takes(key, value) for key in found):
            yield f"{'.'.join(path)} = {value!r} is not what the key takes"
        yield from _locks(path)
    flat = {".".join(path): value for path, value in leaves.items()}
    yield from _between(flat)


def _leaves(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, name))
        elif value != {} or any(pattern.fullmatch(".".join((*path, name))) for pattern, _ in _PATTERNS):
            yield (*path, name), value  # an empty table that is no key says nothing


def _takes(key: Key, value: Any) -> bool:
    if value == "None" and key.nullable:
        return True
    if isinstance(value, str) and key.kind in (Kind.CHOICE, Kind.INT, Kind.FLOAT):
        return value in key.choices
    if not isinstance(value, _TYPES[key.kind]) or (isinstance(value, bool) and key.kind is not Kind.BOOL):
        return False
    if key.kind is Kind.LIST:
        return len(value) > 0 and len(set(value)) == len(value) and set(value) <= set(key.choices)
    if key.kind in (Kind.INT, Kind.FLOAT):
        return (
            math.isfinite(value)
            and (key.minimum is None or value >= key.minimum)
            and (key.maximum is None or value <= key.maximum)
            and (key.above is None or value > key.above)
            and (key.below is None or value < key.below)
        )
    return True


def _locks(path: tuple[str, ...]) -> Iterator[str]:
    prefixes = {".".join(path[:length]) for length in range(1, len(path) + 1)}
    yield from (f"{name} is locked" for name in (prefixes & LOCKED) | (set(path) & LOCKED_ANYWHERE))


def _between(values: dict[str, Any]) -> Iterator[str]:
    """Rules between keys that would waste a run."""
    group = values.get("orchestrator.group_size", 1)
    tokens = values.get("orchestrator.token_batch_size", "None")
    batch = values.get("orchestrator.batch_size", 128)
    if tokens == "None" and batch % group:
        yield f"groups of {group} do not divide a batch of {batch}"
    if group < 2 and values.get("orchestrator.algo.type", "grpo") != "rae":
        yield "a group of one has no advantage"
    length = values.get("orchestrator.train.sampling.max_completion_tokens", "None")
    if length != "None" and length >= values.get("seq_len", 2048):
        yield f"completions of {length} do not fit"
    steps, kind = values.get("max_steps", "None"), values.get("trainer.scheduler.type", "constant")
    if kind != "constant" and steps != "None" and values.get("trainer.scheduler.warmup_steps", 10) >= steps:
        yield "the warm-up never ends"
    if kind == "cosine" and steps == "None":
        yield "the decay never ends"


def _uses(source: bytes) -> Iterator[str]:
    """What is done with an accepted file: rewrite it, and hand it to both engines."""
    parsed = parse(source)
    try:
        if incumbent_config(parsed, ()).hash != parsed.hash:
            yield "a rewrite makes another config of it"
    except UsageError as error:  # valid, but its tables are in an order that tomlkit does not read
        if "already exists" not in error.cause:
            yield f"it cannot be edited: {error.cause}"
    engine = TrlEngine(ARITHMETIC_TRL, Path(), {})
    for name, settings in (
        ("trl", lambda: engine.validate(parsed).settings),
        ("prime-rl", lambda: effective(parsed, GSM8K_PRIME_RL, PROMPT_TOKENS)),
    ):
        try:
            json.dumps(settings(), allow_nan=False)
        except ConfigError:
            continue  # named as what this engine cannot do
        except (TypeError, ValueError) as error:
            yield f"{name} cannot take it: {error}"

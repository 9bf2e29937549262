"""The memory preset: the defaults that the smallest GPU in use chooses. train.toml may overwrite them.

Its name is a value of the rules, `2 x 80 GB`, so results of two presets do not compare. The defaults stand beside each
engine.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nightshift.config.allowlist import value_text
from nightshift.config.rules import NO_CARD, Rules
from nightshift.config.rules_toml import memory_gb
from nightshift.config.train_toml import Config, line_of
from nightshift.errors import EngineError
from nightshift.executors.gpus import SIZES_GB, Gpu, choose_gpus, list_gpus, parse_gpus


def on_cards(rules: Rules, root: Path, environ: Mapping[str, str], gpus: str | None) -> Rules:
    """Return `rules` with the memory preset of the smallest GPU that a run would use: the largest that fits, or the
    least. Without GPUs `rules` as they are: the engine's own check reports it.

    rules.toml may name another preset, also where no GPU is visible: for a dry run, or on a cluster's login node.
    `gpus` is --gpus; UsageError if they are none.
    """
    ids = parse_gpus(gpus, rules.num_gpus) if gpus is not None and rules.num_gpus else None
    if rules.num_gpus == 0 or ids == ():
        return rules
    cards: Sequence[Gpu] = ()
    with suppress(EngineError):
        cards = choose_gpus(list_gpus(), ids, rules.num_gpus, environ)
    size = memory_gb(root)
    if not size and cards:
        least = min(gpu.memory_gb or 0.0 for gpu in cards)
        size = max((preset for preset in SIZES_GB if preset <= least), default=min(SIZES_GB))
    num_cards = len({gpu.index for gpu in cards}) or len({*(ids or range(rules.num_gpus))})
    return replace(rules, memory=f"{num_cards} x {size} GB") if size else rules


def size_of(memory: str) -> tuple[bool, int]:
    """Return whether inference and trainer share a card, and the preset's size in GB, by Rules.memory."""
    num_cards, _, size = memory.removesuffix(" GB").partition(" x ")
    return (False, max(SIZES_GB)) if memory == NO_CARD else (num_cards == "1", int(size))


def line_in(config: Config, path: str) -> int | None:
    """Return the line of train.toml that sets a key; None if the file leaves it out."""
    return line_of(config.source.decode(), tuple(path.split(".")))


def where(config: Config, path: str) -> str:
    """Return a key's value with its line, for the beginning of a refusal."""
    return f"train.toml:{line_in(config, path)}: {path} = {value_text(config.get(path))}"

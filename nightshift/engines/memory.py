"""The preset of memory that a set-up keeps to: by the cards it runs on, as NVML tells them, or by rules.toml.

Its name is a value of the rules, `2 x 80 GB`, so results of two presets do not compare. What an engine makes of it
stands beside that engine.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nightshift.config.rules import RULES_NAME, Rules
from nightshift.config.rules_toml import memory_gb
from nightshift.config.toml_text import line_of
from nightshift.config.train_toml import Config
from nightshift.config.values import value_text
from nightshift.errors import ConfigError, EngineError, UsageError
from nightshift.executors.gpus import SIZES_GB, Gpu, choose_gpus, list_gpus, parse_gpus


def on_cards(rules: Rules, root: Path, environ: Mapping[str, str], gpus: str | None) -> Rules:
    """`rules` with the preset of the smallest GPU that a run would use: the next smaller of SIZES_GB.

    rules.toml may name a smaller one, or any where no GPU is, for a dry run. `gpus` is --gpus. Without GPUs, and with
    those that are too small, `rules` as they are: the engine's own check says so. UsageError for a preset that the card
    cannot hold, and for `gpus` that are none.
    """
    if rules.num_gpus == 0:
        return rules
    ids = None if gpus is None else parse_gpus(gpus, rules.num_gpus)
    if ids == ():
        return rules
    cards: Sequence[Gpu] = ()
    with suppress(EngineError):
        cards = choose_gpus(list_gpus(), ids, rules.num_gpus, environ)
    smallest = min(cards, key=lambda gpu: gpu.memory_gb or 0.0, default=None)
    fits = [size for size in SIZES_GB if smallest is None or size <= (smallest.memory_gb or 0.0)]
    wanted = memory_gb(root)
    if wanted and wanted not in fits:
        cause = f"{RULES_NAME}: memory_gb = {wanted} does not fit on {smallest}"
        raise UsageError(cause, f"Write memory_gb = {max(fits, default=0)}, or 0 for what is here.")
    size = wanted or (max(fits, default=0) if smallest else 0)
    num_cards = len({gpu.index for gpu in cards}) or len({*(ids or range(rules.num_gpus))})
    return replace(rules, memory=f"{num_cards} x {size} GB") if size else rules


def smaller(memory: str) -> int | None:
    """The memory_gb below that of a preset; None for the smallest, and without cards."""
    _, _, size = memory.removesuffix(" GB").rpartition(" ")
    return max((each for each in SIZES_GB if size.isdecimal() and each < int(size)), default=None)


def line_in(config: Config, path: str) -> int | None:
    """The line of train.toml that writes a key; None where the file leaves it out."""
    return line_of(config.source.decode(), tuple(path.split(".")))


def where(config: Config, path: str) -> str:
    """A key's value with its line, as refusals begin."""
    return f"train.toml:{line_in(config, path)}: {path} = {value_text(config.get(path))}"


def above_cap(config: Config, memory: str, path: str, allowed: str, fix: str) -> ConfigError:
    """The refusal of a value that train.toml writes, of which the preset allows only so much."""
    return ConfigError(f"{where(config, path)}: the memory preset {memory} allows {allowed}", fix)

"""What the train.toml of each experiment sets: the values that its run had, of all keys that any of them writes."""

from __future__ import annotations

from collections.abc import Mapping

from nightshift.train_toml.config import Config
from nightshift.train_toml.keys import BY_PRESET
from nightshift.train_toml.values import Value, value_text

Settings = Mapping[str, Value | None]  # by key; None: unset


def settings(configs: Mapping[int, Config]) -> dict[int, Settings]:
    """By experiment; one without a config has its row all the same, and is compared without its settings."""
    keys = list(dict.fromkeys(key for config in configs.values() for key in config.values))
    return {number: {key: _value(config, key) for key in keys} for number, config in configs.items()}


def spelled(value: Value | None) -> str:
    """As train.toml writes it."""
    return "unset" if value is None else value_text(value)


def _value(config: Config, key: str) -> Value | None:
    return (config.values if key in BY_PRESET else config.resolved).get(key)

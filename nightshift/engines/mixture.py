"""The keys of train.toml for the training examples: ratios of environments, opponent of a game."""

from typing import Any

from nightshift.config.allowlist import OPPONENT, RATIO, value_text
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config, line_numbers
from nightshift.errors import ConfigError


def where(config: Config, path: str) -> str:
    """Return a key with its value and line, for the beginning of an error."""
    line = line_numbers(config.source.decode()).get(tuple(path.split(".")))
    return f"train.toml:{line}: {path} = {value_text(config.get(path))}"


def ratios(config: Config, rules: Rules) -> dict[str, float]:
    """Return the ratio of every environment of the rules, by default 1; {} for a single environment.

    ConfigError for a ratio of an environment that the rules do not have, or of a single environment.
    """
    names = rules.environment_names
    for path, name in _written(config, RATIO):
        if name not in names or len(names) == 1:
            raise _unfit(config, path, rules)
    return {name: config.get(f"{RATIO}.{name}") or 1.0 for name in names} if len(names) > 1 else {}


def opponent(config: Config, rules: Rules) -> dict[str, Any]:
    """Return the opponent's settings by the last part of their keys. {} if no environment is a game; then ConfigError
    if train.toml sets such a key."""
    if any(environment.is_game for environment in rules.environments):
        return {leaf: config.get(f"{OPPONENT}.{leaf}") for leaf in ("type", "temperature", "interval")}
    for path, _ in _written(config, OPPONENT):
        raise _unfit(config, path, rules)
    return {}


def without(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without the ratio and the opponent."""
    return {path: value for path, value in values.items() if not path.startswith((f"{RATIO}.", f"{OPPONENT}."))}


def _written(config: Config, table: str) -> list[tuple[str, str]]:
    """Return path and last name of each key of a table in train.toml."""
    return [(path, path.removeprefix(f"{table}.")) for path in config.values if path.startswith(f"{table}.")]


def _unfit(config: Config, path: str, rules: Rules) -> ConfigError:
    names = " and ".join(rules.environment_names)
    return ConfigError(f"{where(config, path)}: these rules train on {names}", "Delete it.")

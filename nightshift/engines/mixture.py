"""The keys of train.toml for the training examples: ratios of environments, opponent of a game."""

from collections.abc import Sequence
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
    names = rules.environment_names if len(rules.environments) > 1 else ()
    return {name: ratio or 1.0 for name, ratio in _values(config, RATIO, names, rules).items()}


def opponent(config: Config, rules: Rules) -> dict[str, Any]:
    """Return the opponent's settings by the last part of their keys. {} if no environment is a game; then ConfigError
    if train.toml sets such a key."""
    is_game = any(environment.is_game for environment in rules.environments)
    return _values(config, OPPONENT, ("type", "temperature", "interval") if is_game else (), rules)


def _values(config: Config, table: str, names: Sequence[str], rules: Rules) -> dict[str, Any]:
    """Return the values of a table by name. ConfigError if train.toml sets another name in this table."""
    paths = {f"{table}.{name}": name for name in names}
    for path in config.values:
        if path.startswith(f"{table}.") and path not in paths:
            cause = f"{where(config, path)}: these rules train on {' and '.join(rules.environment_names)}"
            raise ConfigError(cause, "Delete it.")
    return {name: config.get(path) for path, name in paths.items()}

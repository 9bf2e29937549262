"""The examples that train, by train.toml: how much each of several environments gives, how often an example is drawn,
and who plays the other seat of a game.
"""

from typing import Any

from nightshift.config.allowlist import CURRICULUM, OPPONENT, RATIO, value_text
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config, line_numbers
from nightshift.errors import ConfigError

POOL = ("threshold", "weight")
DEFAULT_POOLS = {  # prime-rl's
    "hard": {"threshold": 0.25, "weight": 0.2},
    "normal": {"threshold": 0.75, "weight": 1.0},
    "easy": {"threshold": 1.0, "weight": 0.2},
}


def where(config: Config, path: str) -> str:
    """Return a key's value with its line, for the beginning of a refusal."""
    line = line_numbers(config.source.decode()).get(tuple(path.split(".")))
    return f"train.toml:{line}: {path} = {value_text(config.get(path))}"


def ratios(config: Config, rules: Rules) -> dict[str, float]:
    """Return the ratio of every environment of the rules, by default 1. Empty for one environment.

    ConfigError for an environment that is none of theirs, or that is alone.
    """
    names = rules.environment_names
    for path, name in _written(config, RATIO):
        if name not in names or len(names) == 1:
            raise _unfit(config, path, rules)
    return {name: config.get(f"{RATIO}.{name}") or 1.0 for name in names} if len(names) > 1 else {}


def opponent(config: Config, rules: Rules) -> dict[str, Any]:
    """Return who plays the other seat, by leaf. Empty if no environment is a game; then ConfigError for a key of it."""
    if any(environment.is_game for environment in rules.environments):
        return {leaf: config.get(f"{OPPONENT}.{leaf}") for leaf in ("type", "temperature", "interval")}
    for path, _ in _written(config, OPPONENT):
        raise _unfit(config, path, rules, ", no game")
    return {}


def difficulty_pools(config: Config, rules: Rules) -> dict[str, dict[str, float]]:
    """Return threshold and weight of each difficulty pool by its name. Empty if examples come in order.

    ConfigError for several environments: their shares would follow from the pools, whatever their ratio.
    """
    table = f"{CURRICULUM}.sampler"
    if config.get(f"{table}.type") != "difficulty_pool":
        return {}
    if len(rules.environments) > 1:
        raise _unfit(config, f"{table}.type", rules, ", and pools go with one environment on this engine")
    names = [path for path in config.resolved if path.rpartition(".")[0] == f"{table}.pools"]
    pools = {path.rpartition(".")[2]: {leaf: config.get(f"{path}.{leaf}") for leaf in POOL} for path in names}
    return pools or DEFAULT_POOLS


def without(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values for an engine that knows nothing of all this."""
    return {path: value for path, value in values.items() if not path.startswith((f"{RATIO}.", f"{OPPONENT}."))}


def _written(config: Config, table: str) -> list[tuple[str, str]]:
    """Return path and last name of the keys of a table that the file sets."""
    return [(path, path.removeprefix(f"{table}.")) for path in config.values if path.startswith(f"{table}.")]


def _unfit(config: Config, path: str, rules: Rules, more: str = "") -> ConfigError:
    names = " and ".join(rules.environment_names)
    return ConfigError(f"{where(config, path)}: these rules train on {names}{more}", "Delete it.")

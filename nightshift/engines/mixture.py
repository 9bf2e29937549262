"""What train.toml says of the examples that train: how much each of several environments gives, how often an example is
drawn, and who plays the other seat of a game.
"""

from difflib import get_close_matches
from typing import Any

from nightshift.config.allowlist import CURRICULUM, OPPONENT, RATIO
from nightshift.config.rules import Rules
from nightshift.config.train_toml import Config
from nightshift.engines.memory import line_in, where
from nightshift.errors import ConfigError

LEAST_RATIO = 1e-6
POOL = ("threshold", "weight")
DEFAULT_POOLS = {  # prime-rl's
    "hard": {"threshold": 0.25, "weight": 0.2},
    "normal": {"threshold": 0.75, "weight": 1.0},
    "easy": {"threshold": 1.0, "weight": 0.2},
}


def ratios(config: Config, rules: Rules) -> dict[str, float]:
    """The ratio of every environment of the rules: 1 where train.toml says nothing. Empty for one environment.

    ConfigError for an environment that is none of theirs, or that is alone, and for less than LEAST_RATIO.
    """
    names = rules.environment_names
    for path, name in _written(config, RATIO):
        if name not in names or len(names) == 1:
            near = get_close_matches(name, names, 1) if len(names) > 1 else []
            fix = f"Did you mean {near[0]}?" if near else "Delete it; which environments there are rules.toml says."
            raise ConfigError(f"{where(config, path)}: these rules train on {' and '.join(names)}", fix)
        if config.get(path) < LEAST_RATIO:  # shares of what is next to nothing overflow; the most is 1e6
            raise ConfigError(
                f"{where(config, path)}: too small to share by", f"Write {name} = {LEAST_RATIO:g} or more."
            )
    return {name: config.get(f"{RATIO}.{name}") or 1.0 for name in names} if len(names) > 1 else {}


def opponent(config: Config, rules: Rules) -> dict[str, Any]:
    """Who plays the other seat, by leaf; empty where no environment of the rules is a game. ConfigError for a key that
    is written there."""
    if any(environment.is_game for environment in rules.environments):
        return {leaf: config.get(f"{OPPONENT}.{leaf}") for leaf in ("type", "temperature", "interval")}
    for path, _ in _written(config, OPPONENT):
        cause = f"{where(config, path)}: these rules train on {' and '.join(rules.environment_names)}, no game"
        raise ConfigError(cause, "Delete it.")
    return {}


def difficulty_pools(config: Config, rules: Rules) -> dict[str, dict[str, float]]:
    """Threshold and weight of each difficulty pool by its name; empty where examples come in order.

    ConfigError for several environments: their shares would follow from the pools, whatever their ratio.
    """
    table = f"{CURRICULUM}.sampler"
    if config.get(f"{table}.type") != "difficulty_pool":
        return {}
    if len(rules.environments) > 1:
        cause = f"{where(config, f'{table}.type')}: pools go with one environment on this engine"
        raise ConfigError(f"{cause}, these rules train on {' and '.join(rules.environment_names)}", "Delete it.")
    names = [path for path in config.resolved if path.rpartition(".")[0] == f"{table}.pools"]
    pools = {path.rpartition(".")[2]: {leaf: config.get(f"{path}.{leaf}") for leaf in POOL} for path in names}
    return pools or DEFAULT_POOLS


def without(values: dict[str, Any]) -> dict[str, Any]:
    """The values of an engine that knows nothing of all this."""
    return {path: value for path, value in values.items() if not path.startswith((f"{RATIO}.", f"{OPPONENT}."))}


def _written(config: Config, table: str) -> list[tuple[str, str]]:
    """What stands in the file itself, whatever its values were filled up with."""
    split = ((path, path.rpartition(".")) for path in config.values)
    return [(path, leaf) for path, (found, _, leaf) in split if found == table and line_in(config, path) is not None]

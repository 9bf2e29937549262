"""The losses that rules.toml offers: their keys in train.toml, and their form for prime-rl.

train.toml contains the name of a loss and the values of its parameters, but no import path, because agents write it.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from nightshift.config.allowlist import (
    IMPORT_PATH,
    KEYS,
    LOSS,
    PARAMETERS,
    ROWS,
    Key,
    Search,
    Value,
    accept,
    spelled_out,
)
from nightshift.config.checks import Problem
from nightshift.config.rules import LossRules
from nightshift.config.train_toml import Config, line_numbers, refusal
from nightshift.errors import ConfigError

_WIDE = 10.0  # a parameter whose high / low reaches this is searched on a log scale


def keys_with(losses: Sequence[LossRules], selected: Value = None) -> Iterator[Key]:
    """Yield the keys of the allow-list with the names of these losses, and with their parameters, or with those of the
    loss `selected` only."""
    for key in KEYS:
        if key.path == LOSS:
            names = (*key.choices, *(loss.name for loss in losses))
            yield replace(key, choices=names, named=False, search=Search(choices=names))
        elif key.table == PARAMETERS:
            for loss in losses:
                for name, number in loss.parameters.items() if selected in (None, loss.name) else ():
                    low, high = number.low, number.high
                    yield replace(
                        key,
                        path=f"{PARAMETERS}.{name}",
                        meaning=f"parameter of the loss {loss.name}",
                        default=number.default,
                        minimum=low,
                        maximum=high,
                        only_if=(LOSS, (loss.name,)),
                        search=Search("log" if 0 < _WIDE * low <= high else "linear", low, high),
                    )
        else:
            yield key


def loss_problems(values: Mapping[str, Value], losses: Sequence[LossRules]) -> list[Problem]:
    """Return the problems of a config's loss and its parameters: not in rules.toml, or out of range."""
    name, problems = values.get(LOSS, ROWS[LOSS].default), list[Problem]()
    keys = {key.path: key for key in keys_with(losses, name)}
    for path, value in values.items():
        place = tuple(path.split("."))
        if path == LOSS or path.startswith(f"{PARAMETERS}."):
            try:
                accept(keys[path], value)
            except KeyError:
                cause = f"{spelled_out(place, value)} is not a parameter of the loss {name}"
                problems.append(Problem(place, value, cause, "Delete it; uv run run.py --keys lists the parameters"))
            except ConfigError as error:
                problems.append(Problem(place, value, error.cause, error.fix))
    return problems


def in_prime_rl(config: Config, losses: Sequence[LossRules]) -> dict[str, Value]:
    """Return prime-rl's values for the loss of a train.toml, with every parameter; {} for one of prime-rl's own losses.

    ConfigError with all problems: rules.toml does not offer the loss, or a parameter is unknown or out of range.
    """
    if problems := loss_problems(config.values, losses):
        raise refusal("train.toml", problems, line_numbers(config.source.decode()))
    for loss in losses:
        if loss.name == config.get(LOSS):
            defaults = {f"{PARAMETERS}.{name}": parameter.default for name, parameter in loss.parameters.items()}
            values = {path: config.values.get(path, default) for path, default in defaults.items()}
            return {LOSS: "custom", IMPORT_PATH: loss.import_path, **values}
    return {}

"""What prime-rl's own validation refuses, said in terms of train.toml.

Its errors carry the names of union variants (`trainer.optim.adamw.lr`), come several times for a key that
two components share, and stand at a whole component where a rule between keys is broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from nightshift.train_toml.config import Config
from nightshift.train_toml.keys import is_inner, variants
from nightshift.train_toml.locks import SHARED, lock
from nightshift.train_toml.text import line_of
from nightshift.train_toml.values import shorten, value_text

# The variants of unions that the engine fills; those of train.toml are looked up there.
_ENGINE_TAGS = frozenset({"single_node", "filesystem", "zmq", "static", "elastic", "subprocess", "default"})
_CONFIG_FIX = "Change that; uv run run.py --keys lists what is allowed"
_OWN_FIX = "This is not train.toml's fault. Run: uv run nightshift doctor"


class Refusal(msgspec.Struct):
    """One error of the validator: `loc` is the key's path, with variants and positions in it."""

    loc: tuple[str | int, ...]
    message: str
    type: str


class _Verdict(msgspec.Struct):
    errors: tuple[Refusal, ...] = ()


def read_verdict(path: Path) -> tuple[Refusal, ...]:
    """What the validator refuses. OSError or msgspec.DecodeError where it came to no verdict."""
    return msgspec.json.decode(path.read_bytes(), type=_Verdict).errors


def explain(errors: Sequence[Refusal], config: Config | None) -> str:
    """One line for the validator's errors: cause, then fix. `config` puts them into lines of train.toml."""
    blamed = sorted(errors, key=lambda error: (not _is_refusal(error, config), not error.loc))
    causes = list(dict.fromkeys(_cause(error, config) for error in blamed))
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    fix = _CONFIG_FIX if is_config_fault(errors, config) else _OWN_FIX
    return f"{causes[0].rstrip('.')}. {fix}{more}."


def is_config_fault(errors: Sequence[Refusal], config: Config | None) -> bool:
    """True if train.toml can be to blame; False if only what the engine fills in or the installation can be."""
    return any(_is_refusal(error, config) for error in errors)


def _is_refusal(error: Refusal, config: Config | None) -> bool:
    """A value was refused that train.toml may hold, or a part of the config with such values in it."""
    return not _is_machinery(error) and lock(_path(error.loc, config)) is None


def _is_machinery(error: Refusal) -> bool:
    """Another exception than pydantic's, whose types are in lower case, or a server that was started otherwise."""
    return error.type == "mismatch" or error.type[:1].isupper()


def _cause(error: Refusal, config: Config | None) -> str:
    message = "".join(char if char.isprintable() else " " for char in error.message)
    message = shorten(" ".join(message.removeprefix("Value error, ").split()), 300)
    path = _path(error.loc, config)
    name = ".".join(path)
    if _is_machinery(error):
        return f"prime-rl's validation failed: {name or error.type}: {message}"
    if not path:
        return f"train.toml: prime-rl refuses it: {message}"
    line = _line(config, path) if config is not None and lock(path) is None else None
    where = "" if line is None else f"train.toml:{line}: "
    value = f" = {value_text(config.values[name])}" if config is not None and name in config.values else ""
    return f"{where}{name}{value}: prime-rl refuses it: {message}"


def _path(loc: Sequence[str | int], config: Config | None) -> tuple[str, ...]:
    """The key's name in train.toml: no variants, no positions in lists, a shared key in its one spelling."""
    path: tuple[str, ...] = ()
    for segment in loc:
        if isinstance(segment, str) and not _is_tag(segment, path, config):
            path = (*path, segment)
    name = ".".join(path)
    return tuple(SHARED[name].split(".")) if name in SHARED else path


def _is_tag(segment: str, path: tuple[str, ...], config: Config | None) -> bool:
    """True for the name of a union's variant, which stands right behind the union."""
    if path and segment == (config.resolved if config else {}).get(f"{'.'.join(path)}.type"):
        return True
    here = ".".join((*path, segment))
    return bool(path) and segment in _ENGINE_TAGS and not variants(here) and not is_inner(here)


def _line(config: Config, path: tuple[str, ...]) -> int | None:
    """Line of train.toml with the key, or else with the innermost table around it that stands there."""
    text = config.source.decode()
    lines: Iterator[int | None] = (line_of(text, path[:length]) for length in range(len(path), 0, -1))
    return next((line for line in lines if line is not None), None)

"""What prime-rl's own validation refuses, said in terms of train.toml.

Its errors carry the names of union variants (`trainer.optim.adamw.lr`), come several times for a key that
two components share, and stand at a whole component where a rule between keys is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from nightshift.errors import EngineError
from nightshift.files import read_file
from nightshift.text import clean
from nightshift.train_toml.config import Config
from nightshift.train_toml.keys import SHARED, is_inner, lock, variants
from nightshift.train_toml.text import line_of
from nightshift.train_toml.values import value_text

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
    return msgspec.json.decode(read_file(path), type=_Verdict).errors


def explain(errors: Sequence[Refusal], config: Config | None) -> EngineError:
    """The validator's errors as one, that of train.toml first. `config` puts them into its lines.

    It is the config's fault if train.toml can be to blame for one; else only what the engine fills in or the
    installation can be.
    """
    is_ours = [not _is_machinery(error) and lock(_path(error.loc, config)) is None for error in errors]
    blamed = sorted(zip(is_ours, errors, strict=True), key=lambda pair: (not pair[0], not pair[1].loc))
    cause, *others = dict.fromkeys(_cause(error, config) for _, error in blamed)
    more = f" (and {len(others)} more)" if others else ""
    return EngineError(cause, f"{_CONFIG_FIX if any(is_ours) else _OWN_FIX}{more}.", is_config_fault=any(is_ours))


def _is_machinery(error: Refusal) -> bool:
    """Another exception than pydantic's, whose types are in lower case, or a server that was started otherwise."""
    return error.type == "mismatch" or error.type[:1].isupper()


def _cause(error: Refusal, config: Config | None) -> str:
    message = clean(error.message.removeprefix("Value error, "), 300)
    path = _path(error.loc, config)
    name = ".".join(path)
    if _is_machinery(error):
        return f"prime-rl's validation failed: {name or error.type}: {message}"
    if not path:
        return f"train.toml: prime-rl refuses it: {message}"
    where = value = ""
    if config is not None:
        if lock(path) is None:  # the line with the key, or with the innermost table around it that stands there
            text = config.source.decode()
            lines = (line_of(text, path[:length]) for length in range(len(path), 0, -1))
            where = next((f"train.toml:{line}: " for line in lines if line is not None), "")
        if name in config.values:
            value = f" = {value_text(config.values[name])}"
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

"""train.toml: the one file that the agent edits. Read it, check it, refuse it.

Everything is checked here, against the allow-list in keys.py, before any engine sees it: prime-rl's own
validation imports whatever module an id names. Every refusal is one line, with the line number, the
value and the fix.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nightshift.errors import ConfigError
from nightshift.train_toml.checks import Problem, violations
from nightshift.train_toml.keys import ANY, default, is_inner, is_name, nearest, resolve, variants
from nightshift.train_toml.locks import CURRICULUM, SHARED, SOURCE, lock
from nightshift.train_toml.text import decode, document, line_of, read_source, shown_name
from nightshift.train_toml.values import BadValue, Kind, Value, accept, value_text

_MAX_DEPTH = 12  # of the path in a message; prime-rl's deepest open key has 8 segments


@dataclass(frozen=True)
class Config:
    """A checked train.toml.

    `values` holds what the file says, dotted key to canonical value: numbers of float keys are floats,
    "None" is None, a table that switches something on is an (empty) dict, a list is a sorted tuple. `resolved`
    holds every open key that applies, defaults filled in. `hash` is the sha256 of what differs from
    prime-rl's defaults: comments, order, spelling of numbers and keys written with their default value
    do not change it (but difficulty pools spelled out as prime-rl's own three do).
    """

    source: bytes
    values: Mapping[str, Value]
    resolved: Mapping[str, Value] = field(repr=False)
    hash: str

    def get(self, key: str) -> Any:
        """The value of an open key, prime-rl's default where the file is silent, None where it does not apply.

        Raises:
            KeyError: not an open key.
        """
        if key not in self.resolved and not variants(key):
            raise KeyError(key)
        return self.resolved.get(key)


def load(path: Path) -> Config:
    """Read and check train.toml. Raises ConfigError with the first problem."""
    return parse(read_source(path), path.name)


def parse(source: bytes, name: str = "train.toml") -> Config:
    """Check the bytes of a train.toml; `name` is what messages call it. Raises ConfigError."""
    name = shown_name(name)
    text = decode(source, name)
    values: dict[str, Value] = {}
    _refuse(_walk(document(text, name), (), values), text, name)
    resolved = resolve(values)
    _refuse(_inapplicable(values, resolved), text, name)
    _refuse(violations(values, resolved), text, name)
    return Config(source, MappingProxyType(values), MappingProxyType(resolved), _hash(resolved))


def _walk(node: dict[str, Any], path: tuple[str, ...], values: dict[str, Value]) -> Iterator[Problem]:
    """Fill `values` from a parsed document, in file order, and report what it may not hold."""
    for name, value in node.items():
        here = (*path, name)
        dotted = ".".join(here)
        if not is_name(name):  # a dot in quotes is no step down
            yield _closed(here, value)
        elif entries := variants(dotted):
            if isinstance(value, dict) and entries[0].kind is Kind.TABLE:
                values[dotted] = {}
                yield from _walk(value, here, values)
                continue
            try:
                values[dotted] = accept(entries[0], value)
            except BadValue as error:
                yield Problem.at(here, value, error.cause, error.fix)
        elif is_inner(dotted):
            if isinstance(value, dict):
                yield from _walk(value, here, values)
            else:
                yield _not_a_table(here, value)
        else:
            yield _closed(here, value)


def _not_a_table(path: tuple[str, ...], value: Any) -> Problem:
    dotted = ".".join(path)
    if dotted == SOURCE:
        fix = f"The sources belong to the rules; a curriculum for all of them is [{CURRICULUM}]"
        return Problem.at(path, value, "is a list of sources", fix)
    return Problem.at(path, value, "is not a table", f"Write [{dotted}] and its keys below it")


def _closed(path: tuple[str, ...], value: Any) -> Problem:
    while isinstance(value, dict) and value and len(path) < _MAX_DEPTH:  # name the key, not its table
        name, value = next(iter(value.items()))
        path = (*path, name)
    if (shared := SHARED.get(".".join(path))) is not None:
        return Problem.at(path, value, "is locked: one spelling a setting", f"Write {shared} at the top of the file")
    if (found := lock(path)) is not None:
        own = {"rules": "the rules own it", "engine": "the engine owns it"}[found.owner]
        return Problem.at(path, value, f"is locked: {own} ({found.reason})", "Delete it")
    if (meant := nearest(".".join(path))) is None:
        return Problem.at(path, value, "is unknown", "Delete it; uv run run.py --keys lists every key")
    table, _, leaf = meant.rpartition(".")
    leaf = "a name of letters, digits, - and _" if leaf == ANY else leaf
    place = f"under [{table}]" if table else "at the top of the file"
    return Problem.at(path, value, "is unknown", f"Did you mean {meant}? Write {leaf} {place}")


def _inapplicable(values: Mapping[str, Value], resolved: Mapping[str, Value]) -> Iterator[Problem]:
    """Keys of a variant that is not selected."""
    for path, value in values.items():
        if path in resolved:
            continue
        conditions = [entry.only_if for entry in variants(path) if entry.only_if is not None]
        if not conditions:
            continue  # inside a table that is itself inapplicable, which is reported
        selector = conditions[0][0]
        wanted = [choice for _, choices in conditions for choice in choices]
        if wanted == [None]:
            cause, fix = f"cannot stand beside {selector}", "Delete one of the two"
        else:
            cause = f"has no effect with {selector} = {value_text(resolved.get(selector))}"
            leaf = selector.rpartition(".")[2]
            fix = f"Delete it, or write {leaf} = {' or '.join(map(value_text, wanted))}"
        yield Problem.at(tuple(path.split(".")), value, cause, fix)


def _refuse(problems: Iterator[Problem], text: str, name: str) -> None:
    """Raise ConfigError for the first problem, with its line and how many more there are."""
    first = next(problems, None)
    if first is None:
        return
    more = len(list(islice(problems, 10)))
    line = line_of(text, first.path)
    where = f"{name}:{line}" if line is not None else name
    count = f" (and {more}{'+' if more == 10 else ''} more)" if more else ""
    raise ConfigError(f"{where}: {first.cause}", first.fix + count)


def _hash(resolved: Mapping[str, Value]) -> str:
    canonical = {path: value for path, value in resolved.items() if value != default(path, resolved)}
    return hashlib.sha256(json.dumps(canonical, sort_keys=True, allow_nan=False).encode()).hexdigest()

"""train.toml: the one file that the agent edits. Read, refuse, compare, rewrite.

Everything is checked here, against the allow-list in keys.py, before any engine sees it: prime-rl's own
validation imports whatever module an id names. Every refusal is one line, with the line number, the
value and the fix.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nightshift.errors import ConfigError
from nightshift.train_toml import checks, keys
from nightshift.train_toml import text as toml_text
from nightshift.train_toml.checks import Problem
from nightshift.train_toml.values import BadValue, Kind, Value, accept, value_text

__all__ = ["ABSENT", "Config", "diff", "effective", "load", "nested", "parse", "set_values"]

MAX_DEPTH = 12  # prime-rl's deepest open key has 8 segments


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()  # in set_values: take the key out of the file


@dataclass(frozen=True)
class Config:
    """A checked train.toml.

    `values` holds what the file says, dotted key to canonical value: numbers of float keys are floats,
    "None" is None, a table that switches something on is an (empty) dict, a list is a tuple. `resolved`
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
        if key not in self.resolved and not keys.variants(tuple(key.split("."))):
            raise KeyError(key)
        return self.resolved.get(key)


def load(path: Path) -> Config:
    """Read and check train.toml. Raises ConfigError with the first problem."""
    return parse(toml_text.read(path), path.name)


def parse(source: bytes, name: str = "train.toml") -> Config:
    """Check the bytes of a train.toml; `name` is what messages call it. Raises ConfigError."""
    name = toml_text.shown_name(name)
    text = toml_text.decode(source, name)
    document = toml_text.document(text, name)
    values: dict[str, Value] = {}
    problems = _walk(document, (), values)
    _refuse(problems, text, name)
    resolved = keys.resolve(values)
    _refuse(_inapplicable(values, resolved), text, name)
    _refuse(checks.violations(values, resolved), text, name)
    return Config(source, MappingProxyType(values), MappingProxyType(resolved), _hash(resolved))


def _walk(node: dict[str, Any], path: tuple[str, ...], values: dict[str, Value]) -> Iterator[Problem]:
    """Fill `values` from a parsed document, in file order, and report what it may not hold."""
    for name, value in node.items():
        here = (*path, name)
        entries = keys.variants(here)
        if entries:
            if isinstance(value, dict) and entries[0].kind is Kind.TABLE:
                values[".".join(here)] = {}
                yield from _walk(value, here, values)
                continue
            try:
                values[".".join(here)] = accept(entries[0], value)
            except BadValue as error:
                yield Problem.at(here, value, error.cause, error.fix)
        elif keys.is_inner(here) and len(here) < MAX_DEPTH:
            if isinstance(value, dict):
                yield from _walk(value, here, values)
            else:
                yield _not_a_table(here, value)
        else:
            yield _closed(here, value)


def _not_a_table(path: tuple[str, ...], value: Any) -> Problem:
    dotted = ".".join(path)
    if dotted == keys.SOURCE:
        fix = f"The sources belong to the rules; a curriculum for all of them is [{keys.SOURCE}.curriculum]"
        return Problem.at(path, value, "is a list of sources", fix)
    return Problem.at(path, value, "is not a table", f"Write [{dotted}] and its keys below it")


def _closed(path: tuple[str, ...], value: Any) -> Problem:
    while isinstance(value, dict) and value and len(path) < MAX_DEPTH:  # name the key, not its table
        name, value = next(iter(value.items()))
        path = (*path, name)
    shared = keys.SHARED.get(".".join(path))
    if shared is not None:
        return Problem.at(path, value, "is locked: one spelling a setting", f"Write {shared} at the top of the file")
    if (owner := keys.lock(path)) is not None:
        own = {"rules": "the rules own it", "engine": "the engine owns it"}[owner[0]]
        return Problem.at(path, value, f"is locked: {own} ({owner[1]})", "Delete it")
    meant = keys.nearest(path)
    if meant is None:
        return Problem.at(path, value, "is unknown", "Delete it; uv run run.py --keys lists every key")
    table, _, leaf = meant.rpartition(".")
    place = f"under [{table}]" if table else "at the top of the file"
    return Problem.at(path, value, "is unknown", f"Did you mean {meant}? Write {leaf} {place}")


def _inapplicable(values: Mapping[str, Value], resolved: Mapping[str, Value]) -> Iterator[Problem]:
    """Keys of a variant that is not selected."""
    for path, value in values.items():
        if path in resolved:
            continue
        entries = keys.variants(tuple(path.split(".")))
        conditions = [entry.only_if for entry in entries if entry.only_if is not None]
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
    line = toml_text.line_of(text, first.path) if first.path else None
    where = f"{name}:{line}" if line is not None else name
    count = f" (and {more}{'+' if more == 10 else ''} more)" if more else ""
    raise ConfigError(f"{where}: {first.cause}", first.fix + count)


def _hash(resolved: Mapping[str, Value]) -> str:
    canonical = {
        path: sorted(value) if isinstance(value, tuple) else value
        for path, value in resolved.items()
        if not _same(value, keys.default(path, resolved))
    }
    return hashlib.sha256(json.dumps(canonical, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _same(one: Value, other: Value) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return sorted(one) == sorted(other)
    return type(one) is type(other) and one == other


def diff(old: Config | None, new: Config) -> tuple[str, ...]:
    """Key-level changes, one line each, changed before added before removed; empty when both train the same.

    `key old -> new` where both files write the key, `+key value` and `-key value` where one does, with
    prime-rl's default beside it. Without `old`, everything that differs from the defaults.
    """
    lines = []
    old_values, old_resolved = (old.values, old.resolved) if old else ({}, keys.resolve({}))
    for path in dict.fromkeys([*new.values, *old_values]):
        before, after = old_resolved.get(path, ABSENT), new.resolved.get(path, ABSENT)
        if isinstance(before, _Absent) or isinstance(after, _Absent):
            if isinstance(before, _Absent) and isinstance(after, _Absent):
                continue
        elif _same(before, after):
            continue
        if path in new.values and path in old_values:
            lines.append(f"{path} {_plain_value(old_values[path])} -> {_plain_value(new.values[path])}")
        elif path in new.values:
            lines.append(f"+{path} {_plain_value(new.values[path])}{_default_text(path, new.resolved)}")
        else:
            lines.append(f"-{path} {_plain_value(old_values[path])}{_default_text(path, old_resolved)}")
    return tuple(sorted(lines, key=lambda line: "+-".find(line[0])))  # stable: in file order within


def _plain_value(value: Value) -> str:
    if isinstance(value, dict):
        return "on"
    return "None" if value is None else value if isinstance(value, str) else value_text(value, 200)


def _default_text(path: str, resolved: Mapping[str, Value]) -> str:
    standard = keys.default(path, resolved)
    if keys.ANY in keys.variants(tuple(path.split(".")))[0].path:
        return ""  # an entry that the agent named: prime-rl has no default for it
    is_switch = keys.variants(tuple(path.split(".")))[0].kind is Kind.TABLE
    unset = "off" if is_switch else "unset"
    return f" (default {unset if standard is None else _plain_value(standard)})"


def effective(config: Config, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine trains with, dotted: the file's values, explicit variant types, the rules' values.

    Raises:
        ValueError: an override names an open key. Rules never overwrite silently what an agent wrote.
    """
    merged: dict[str, Any] = dict(config.values)
    for path in config.values:  # prime-rl selects a union's class by its type: never leave that to a default
        selector = f"{path.rpartition('.')[0]}.type"
        if selector in config.resolved:
            merged[selector] = config.resolved[selector]
    for path, value in overrides.items():
        if keys.variants(tuple(path.split("."))):
            raise ValueError(f"{path} is open to the agent; lock it in keys.py before the rules set it")
        merged[path] = value
    return merged


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables, for an engine: None is null, tuples are lists.

    In prime-rl `orchestrator.train.source` is a list: where the rules give that list, keys below it (the
    agent's curriculum) go into every entry.
    """
    document: dict[str, Any] = {}
    sources = values.get(keys.SOURCE)
    below = {path: value for path, value in values.items() if path.startswith(f"{keys.SOURCE}.")}
    for path, value in values.items():
        if path == keys.SOURCE or (path in below and sources is not None):
            continue
        _put(document, path.split("."), value)
    if sources is not None:
        entries = []
        for source in sources:
            entry = json.loads(json.dumps(source))
            for path, value in below.items():
                _put(entry, path[len(keys.SOURCE) + 1 :].split("."), value)
            entries.append(entry)
        _put(document, keys.SOURCE.split("."), entries)
    return document


def _put(document: dict[str, Any], segments: list[str], value: Any) -> None:
    node = document
    for segment in segments[:-1]:
        node = node.setdefault(segment, {})
    if value == {}:
        node.setdefault(segments[-1], {})
    else:
        node[segments[-1]] = list(value) if isinstance(value, tuple) else value


def set_values(source: bytes, changes: Mapping[str, Any]) -> bytes:
    """`source` with other values; comments, order and everything else stay as they are.

    A change to ABSENT takes the key (with the comment on its line) out; None writes "None", or takes the
    key out where that is the default; {} switches a table on. The result is a valid train.toml.

    Raises:
        ConfigError: the source or the result is refused.
    """
    import tomlkit  # slow to import, and only proposers write

    config = parse(source)
    document = tomlkit.parse(source.decode())
    fresh: dict[str, Any] = {}
    for path, value in changes.items():
        gone = isinstance(value, _Absent) or (value is None and keys.default(path, config.resolved) is None)
        _set(document, path.split("."), ABSENT if gone else value, fresh)
    text = tomlkit.dumps(document)
    for path, value in fresh.items():
        text = _add(text, path, value)
    return parse(text.encode()).source


def _set(document: Any, segments: list[str], value: Any, fresh: dict[str, Any]) -> None:
    """Change or remove one key in place; one that is not there yet goes to `fresh`."""
    import tomlkit

    node = document
    for segment in segments[:-1]:
        inner = node.get(segment)
        if inner is not None and not hasattr(inner, "items"):
            del node[segment]  # switched off with "None": it comes back as a table
            inner = None
        if inner is None:
            if not isinstance(value, _Absent):
                fresh[".".join(segments)] = value
            return
        node = inner
    leaf, old = segments[-1], node.get(segments[-1])
    if isinstance(value, _Absent):
        if old is not None:
            del node[leaf]
    elif old is None or hasattr(old, "items") or value == {}:
        if hasattr(old, "items") and value == {}:
            return
        if old is not None:
            del node[leaf]
        fresh[".".join(segments)] = value
    else:
        node[leaf] = tomlkit.value(_spell(value))


def _add(text: str, path: str, value: Any) -> str:
    import tomlkit

    table, _, leaf = path.rpartition(".")
    added = toml_text.insert(text, path if value == {} else table, "" if value == {} else f"{leaf} = {_spell(value)}")
    try:
        tomllib.loads(added)
        return added
    except tomllib.TOMLDecodeError:  # the table stands inline or in dotted keys: it cannot have a header
        document = tomlkit.parse(text)
        node: Any = document
        for segment in path.split(".")[:-1]:
            node = node.setdefault(segment, {})
        node[leaf] = {} if value == {} else tomlkit.value(_spell(value))
        return tomlkit.dumps(document)


def _spell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_spell, value))}]"
    return value_text(value, toml_text.MAX_LINE)

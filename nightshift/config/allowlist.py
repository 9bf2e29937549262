"""The keys of train.toml (allowlist.toml), the check of one value, defaults, and the spelling of values in messages.

Paths are dotted names of the pinned prime-rl. In a row, "*" stands for one path segment that the user chooses.
"""

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from nightshift.errors import ConfigError

# TOML has no null: train.toml has "None" for None. A dict is a table that switches a feature on. The dict is empty,
# because the keys of the table are separate values.
Value: TypeAlias = bool | int | float | str | tuple[str, ...] | dict[str, Any] | None

SOURCE = "orchestrator.train.source"  # a list in prime-rl, whose entries the rules fix
CURRICULUM = f"{SOURCE}.curriculum"  # the open part of every entry
OPPONENT = "orchestrator.train.opponent"
RATIO = "orchestrator.train.ratio"
LOSS = "trainer.loss.type"
PARAMETERS = "trainer.loss.kwargs"  # the parameters of a loss that rules.toml offers
IMPORT_PATH = "trainer.loss.import_path"  # locked: the engine writes the path of such a loss
ANY = "*"
MAX_NUMBER = 1e15  # float() fails for huge integers
PRIME_RL = "prime-rl"
OTHER_VERSION = "another version of prime-rl"


class Kind(StrEnum):
    INT = "integer"
    FLOAT = "number"
    BOOL = "boolean"
    CHOICE = "choice"
    LIST = "list"
    TABLE = "table"  # a table that switches a feature on


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values that random and tpe try for a key. A power of two is searched by its exponent."""

    scale: Literal["choice", "log", "linear", "power of two"] = "choice"
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Value, ...] = ()


class Key(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """One row of allowlist.toml. The head of that file explains the fields."""

    meaning: str
    kind: Kind
    engines: tuple[str, ...]
    path: str = ""
    default: Value = None
    default_for: dict[str, Value] = {}
    minimum: int | float | None = None
    maximum: int | float | None = None
    above: int | float | None = None
    below: int | float | None = None
    at_most: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    named: bool = False
    engine_choices: dict[str, tuple[str, ...]] = {}
    nullable: bool = False
    only_if: tuple[str, tuple[str | None, ...]] | None = None
    by_preset: bool = False
    search: Search | None = None
    aliases: tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    others: dict[str, tuple[str, ...]] = {}
    near: tuple[str, ...] = ()

    @property
    def leaf(self) -> str:
        """The last segment of the path."""
        return self.path.rpartition(".")[2]

    @property
    def table(self) -> str:
        """The path without its last segment."""
        return self.path.rpartition(".")[0]

    def choices_of(self, engine: str) -> tuple[str, ...]:
        """Return the choices of an engine; "" for all choices."""
        return self.engine_choices.get(engine, self.choices)

    def allowed(self, engine: str = "") -> str:
        """Return type, range and choices in words, e.g. `number above 0, at most 1 or "None"`."""
        if self.kind is Kind.TABLE:
            return '[table] or "None"' if self.nullable else "[table]"
        if self.kind is Kind.CHOICE:
            return " | ".join([*self.choices_of(engine), *(["NAME of rules.toml"] if self.named else [])])
        if self.kind in (Kind.LIST, Kind.BOOL):
            return f"list of {len(self.choices)} names" if self.kind is Kind.LIST else "true or false"
        bounds = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        words = [f"{word} {number_text(bound)}" for word, bound in bounds.items() if bound is not None]
        if self.minimum is not None and self.maximum is not None:
            words = [f"{number_text(self.minimum)} to {number_text(self.maximum)}"]
        texts = [*self.choices, *(["None"] if self.nullable and self.default is not None else [])]
        return " or ".join([f"{self.kind} {', '.join(words)}".strip(), *map(quoted, texts)])


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys that are not allowed in train.toml: their owner, the reason, and what to do instead."""

    owner: str
    reason: str
    use: str = ""
    paths: tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


class Dialect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another format of configs. `nightshift import` recognizes it by any of `signs`, or by all of `needs`."""

    name: str
    signs: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    defaults: dict[str, Value] = {}
    other_meaning: dict[str, str] = {}
    note: str = ""


# The open key that a word stands for, and who uses the word; "" if its unit or meaning differs.
Renamed: TypeAlias = tuple[Key, str]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: dict[str, Key]
    locks: tuple[Lock, ...]
    dialects: tuple[Dialect, ...]
    carried: dict[str, tuple[str, ...]]


# -- values -------------------------------------------------------------------------------------------


def accept(key: Key, value: Any, path: tuple[str, ...] = ()) -> Value:
    """Return the value in its canonical type, None for "None". ConfigError names `path`, by default key.path."""
    if not is_accepted(key, value):
        cause = f"{spelled_out(path or key.path.split('.'), value)} is not allowed ({key.allowed()})"
        raise ConfigError(cause, written(key, value, path))
    if key.kind is Kind.LIST and value != "None":
        return tuple(sorted(value))  # the order has no meaning
    if key.kind is Kind.FLOAT and not isinstance(value, str):
        value = float(value) + 0.0  # + 0.0 turns -0.0 into 0.0
    return None if value == "None" and key.nullable else value


def is_accepted(key: Key, value: Any) -> bool:
    """Return whether the value has the key's type and is in its range or choices."""
    if value == "None" and key.nullable:
        return True
    match key.kind:
        case Kind.BOOL:
            return isinstance(value, bool)
        case Kind.TABLE:
            return isinstance(value, dict) and not value
        case Kind.LIST:
            is_list = isinstance(value, list | tuple) and all(item in key.choices for item in value)
            return is_list and 0 < len(value) == len(set(value))
    if isinstance(value, str):
        return value in key.choices or (key.named and _OWN_NAME.fullmatch(value) is not None)
    return (
        type(value) in {Kind.FLOAT: (int, float), Kind.INT: (int,)}.get(key.kind, ())  # true is no number
        and -MAX_NUMBER <= value <= MAX_NUMBER  # false for nan
        and (key.minimum is None or value >= key.minimum)
        and (key.maximum is None or value <= key.maximum)
        and (key.above is None or value > key.above)
        and (key.below is None or value < key.below)
    )


def written(key: Key, value: Any, path: Sequence[str] = ()) -> str:
    """Return the fix that writes the value to a key, or an allowed value: the number in a text, else the default."""
    *tables, leaf = path or key.path.replace(ANY, "NAME").split(".")
    table = ".".join(tables)
    if key.kind is Kind.TABLE:
        return f"Write [{table}.{leaf}]"
    if isinstance(value, str):
        with suppress(ValueError):
            value = int(value) if key.kind is Kind.INT else float(value)
    note = ""
    if not is_accepted(key, value):
        value, note = (int(key.minimum or 1), "") if key.default is None else (key.default, "(the default) ")
    text = f"Write {leaf} = {value_text(value, 120)} {note}"
    return text + (f"under [{table}]" if table else "at the top of the file")


def spelled_out(path: Sequence[str], value: Any) -> str:
    """Return `key = value` with hostile names and values escaped and shortened."""
    names = [name if re.fullmatch(r"[A-Za-z0-9_-]+", name, re.ASCII) else quoted(name) for name in path]
    return f"{shorten('.'.join(names), 80)} = {value_text(value)}"


def value_text(value: Any, limit: int = 60) -> str:
    """Return a value as in train.toml: printable ASCII on one line, at most `limit` characters."""
    if isinstance(value, str | None):
        return shorten(quoted("None" if value is None else value[: limit + 1]), limit)
    if isinstance(value, dict):
        return "a table" if value else "{}"
    if isinstance(value, list | tuple):
        items = ("[...]" if isinstance(item, list) else value_text(item, limit) for item in value[:20])
        return shorten(f"[{', '.join(items)}]", limit)
    return shorten(number_text(value), limit)  # of a number, a boolean or a date


def number_text(number: Any) -> str:
    """Return a number as people write it: 3e-6, 0.01, 256."""
    return re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", str(number).lower())


def shorten(text: str, limit: int) -> str:
    """Return at most `limit` characters. A longer text ends with `...`."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(text: str) -> str:
    """Return a string in quotes as printable ASCII, so that control characters and look-alike letters are visible."""
    return json.dumps(text).replace("\x7f", "\\u007f")


# -- allowlist.toml -----------------------------------------------------------------------------------


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name).lower()


def tables_around(path: Sequence[str]) -> list[str]:
    """Return the tables around a path, dotted, longest first."""
    return list(accumulate(path[:-1], "{}.{}".format))[::-1]


_TREE = tomllib.loads(Path(__file__).with_name("allowlist.toml").read_text(encoding="utf-8"))
_FILE = msgspec.json.decode(json.dumps(_TREE).replace('"None"', "null"), type=_File)
ROWS = {path: msgspec.structs.replace(key, path=path) for path, key in _FILE.keys.items()}
KEYS = tuple(ROWS.values())
PRIME_RL_LOSSES = ROWS[LOSS].choices
LOCKS = _FILE.locks
DIALECTS = _FILE.dialects
CARRIED = _FILE.carried  # setting of rules.toml -> its names in other configs, for nightshift import
BY_PRESET = frozenset(key.path for key in KEYS if key.by_preset)
ALIASES = {word: key for key in KEYS for word in key.aliases}
FORMER = ALIASES | {word: key for key in KEYS for word in key.former}
_OTHERS = {word: (key, "") for key in KEYS for word in key.near} | {
    word: (key, origin) for key in KEYS for origin, words in key.others.items() for word in words
}
WORDS = _OTHERS | {word: (key, OTHER_VERSION) for word, key in FORMER.items()}

_OWN_NAME = re.compile(r"(?!custom\Z)[a-z][a-z0-9_]{0,39}")  # name of a loss; prime-rl's "custom" needs an import path
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_NAMED = re.compile(rf"\A({'|'.join(re.escape(key.table) for key in KEYS if key.leaf == ANY)})\.[^.]+")
_TABLES = frozenset(table for key in KEYS for table in tables_around(key.path.split(".")))
_LEAVES = frozenset(_plain(key.leaf) for key in KEYS)
_LOCKED = {path: lock for lock in LOCKS for path in lock.paths}
FOREIGN = {word: lock for lock in LOCKS for word in (*lock.former, *(f"{ANY}.{name}" for name in lock.others))}


def is_name(segment: str) -> bool:
    """Return whether a pool, a gate or an environment can have this name."""
    return _NAME.fullmatch(segment) is not None


@lru_cache(4096)
def _pattern(path: str) -> str:
    """Return the path with "*" for the name of a pool, a gate or an environment."""
    return _NAMED.sub(rf"\1.{ANY}", path)


def find_key(path: str) -> Key | None:
    """Return the open key at a path."""
    return ROWS.get(_pattern(path))


def is_inner(path: str) -> bool:
    """Return whether there are open keys below a path."""
    return _pattern(path) in _TABLES


def lock(path: tuple[str, ...], locks: Mapping[str, Lock] = _LOCKED) -> Lock | None:
    """Return the lock of a path, of a table around it, or of a segment that is locked everywhere; with `locks` =
    FOREIGN, of a path of another version of prime-rl or of another framework."""
    names = (".".join(path), *tables_around(path), *(f"{ANY}.{segment}" for segment in reversed(path)))
    return next(filter(None, map(locks.get, names)), None)


def find_part(path: tuple[str, ...]) -> Renamed | None:
    """Return the only open key that ends with a path of two or more segments, such as `optim.lr`."""
    keys = [key for key in KEYS if len(path) > 1 and key.path.endswith(f".{'.'.join(path)}")]
    return (keys[0], PRIME_RL) if len(keys) == 1 else None


def find_renamed(path: tuple[str, ...]) -> Renamed | None:
    """Return the open key that a former name, or a word of another framework below any table, stands for."""
    words = [".".join(path[start:]) for start in range(len(path))]
    return WORDS.get(words[0]) or find_part(path) or next(filter(None, map(_OTHERS.get, words)), None)


def suggest(path: tuple[str, ...]) -> list[str]:
    """Return the open keys with a similar last segment, which a misspelt path may mean; of many keys the nearest."""
    dotted = ".".join(path)[-200:]
    leaf = _plain(dotted.rpartition(".")[2])
    leaves = [leaf] if leaf in _LEAVES else get_close_matches(leaf, _LEAVES, cutoff=0.75)
    paths = [key.path for key in KEYS if _plain(key.leaf) in leaves]
    return paths if len(paths) <= 3 else get_close_matches(dotted, paths, 1, cutoff=0.9)


# -- the keys that apply, and their defaults ----------------------------------------------------------


def applies(key: Key, path: str, resolved: Mapping[str, Value]) -> bool:
    """Return whether the key's variant is selected and every table around the key is switched on."""
    if key.only_if is not None and resolved.get(key.only_if[0]) not in key.only_if[1]:
        return False
    return None not in map(resolved.get, _switches(path))


@lru_cache(4096)
def _switches(path: str) -> list[str]:
    """Return the tables around a path that are open keys, and so can be off."""
    return [table for table in tables_around(path.split(".")) if find_key(table)]


def default(path: str, resolved: Mapping[str, Value]) -> Value:
    """Return prime-rl's default of a key under `resolved`; None if the key does not apply. KeyError: not an open
    key."""
    key = ROWS[_pattern(path)]
    if not applies(key, path, resolved):
        return None
    return key.default_for.get(str(resolved.get(key.only_if[0])), key.default) if key.only_if else key.default


def resolve(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return every open key that applies under `values`, with prime-rl's default for a key that is not in `values`.

    A key with "*" is included once for each name in `values`.
    """
    resolved: dict[str, Value] = {}
    for key in KEYS:
        stem, star, rest = key.path.partition(ANY)
        names = [path.removeprefix(stem).partition(".")[0] for path in values if star and path.startswith(stem)]
        for path in dict.fromkeys(f"{stem}{name}{rest}" for name in names) if star else (key.path,):
            if applies(key, path, resolved):
                resolved[path] = values[path] if path in values else default(path, resolved)
    return resolved


def describe_keys(unused: Collection[str], engine: str, keys: Iterable[Key]) -> list[str]:
    """Return the lines of --keys: the open keys by table, with the engine's choices, then the locked keys by owner.

    A minus marks the keys in `unused`.
    """
    lines: list[str] = []
    table = None
    for key in keys:
        if key.table != table:
            table = key.table
            lines += ["", f"[{table}]" if table else "at the top of train.toml"]
        head = f"{'-' if key.path in unused else ' '} {key.leaf} = {default_text(key)}"
        lines += [f"{head:<39} {key.allowed(engine)}", f"      {key.meaning}"]
        if key.only_if is not None:
            selector = ".".join(key.only_if[0].split(".")[-2:])
            values = ("unset" if value is None else str(value) for value in key.only_if[1])
            lines.append(f"      only with {selector} = {' or '.join(values)}")
    lines += ["", "locked keys: not allowed in train.toml, nor any key below them (*: in every table)"]
    for entry in LOCKS:
        if entry.paths:
            lines.append(f"  {entry.owner}: {entry.reason}" + (f"; {entry.use}" if entry.use else ""))
            lines.append(f"    {', '.join(entry.paths)}")
    return lines


def default_text(key: Key) -> str:
    """Return the default as --keys shows it."""
    if key.by_preset:
        return "by preset"
    if key.kind in (Kind.TABLE, Kind.LIST):
        return "all" if key.kind is Kind.LIST else "on" if key.default == {} else "unset"
    others = "".join(f" ({value_text(value)} with {name})" for name, value in key.default_for.items())
    return ("unset" if key.default is None else value_text(key.default)) + others

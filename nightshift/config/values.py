"""A key of train.toml, the check of one value, and the spelling of values in messages."""

import json
import re
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import msgspec

from nightshift.errors import ConfigError

# None is written "None" in train.toml, because TOML has no null. A dict is a table that switches something on: it is
# empty, because the keys of the table are values of their own.
Value: TypeAlias = bool | int | float | str | tuple[str, ...] | dict[str, Any] | None

MAX_NUMBER = 1e15  # keeps huge integers out of float()


class Kind(StrEnum):
    INT = "integer"
    FLOAT = "number"
    BOOL = "boolean"
    CHOICE = "choice"
    LIST = "list"
    TABLE = "table"  # its presence switches something on


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where random, tpe and search look for values of a key, a power of two by its exponent."""

    scale: Literal["choice", "log", "linear", "power of two"] = "choice"
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Value, ...] = ()


class Key(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """One row of allowlist.toml, which explains the fields at its head."""

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
        """Return the texts that an engine can train with; "" is any engine."""
        return self.engine_choices.get(engine, self.choices)

    def allowed(self, engine: str = "") -> str:
        """Return type, range and choices in words, e.g. `number above 0, at most 1 or "None"`."""
        if self.kind is Kind.TABLE:
            return "[table]" + (' or "None"' if self.nullable else "")
        if self.kind is Kind.CHOICE:
            return " | ".join(self.choices_of(engine))
        if self.kind in (Kind.LIST, Kind.BOOL):
            return f"list of {len(self.choices)} names" if self.kind is Kind.LIST else "true or false"
        bounds = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        words = [f"{word} {number_text(bound)}" for word, bound in bounds.items() if bound is not None]
        if self.minimum is not None and self.maximum is not None:
            words = [f"{number_text(self.minimum)} to {number_text(self.maximum)}"]
        texts = [*self.choices, *(["None"] if self.nullable and self.default is not None else [])]
        return " or ".join([f"{self.kind} {', '.join(words)}".strip(), *map(quoted, texts)])


def accept(key: Key, value: Any, path: tuple[str, ...] = ()) -> Value:
    """Return the value in its canonical type: None for "None", float for a number, a sorted tuple for a list.

    `path`: the key's name in the file, if the user chose a part of the name. Raises ConfigError for another value.
    """
    if is_accepted(key, value):
        if value == "None" and key.nullable:
            return None
        if key.kind is Kind.LIST:
            return tuple(sorted(value))  # the order has no meaning
        canonical: Value = value
        if key.kind is Kind.FLOAT and not isinstance(value, str):
            canonical = float(value) + 0.0  # + 0.0 turns -0.0 into 0.0
        return canonical
    path = path or tuple(key.path.split("."))
    fix = f"Write {path[-1]} = {value_text(instead(key, value), 120)}"
    if key.kind is Kind.TABLE:
        fix = f"To switch it on, write [{'.'.join(path)}]" + f'; off: write {path[-1]} = "None"' * key.nullable
    raise ConfigError(f"{spelled_out(path, value)} is not allowed ({key.allowed()})", fix)


def is_accepted(key: Key, value: Any) -> bool:
    """True if the value has the key's type and lies in its range or choices."""
    if isinstance(value, str):
        return (value == "None" and key.nullable) or (value in key.choices and key.kind is not Kind.LIST)
    if key.kind is Kind.BOOL:
        return isinstance(value, bool)
    if key.kind is Kind.TABLE:
        return isinstance(value, dict) and not value
    if key.kind is Kind.LIST:
        is_list = isinstance(value, list | tuple) and all(item in key.choices for item in value)
        return is_list and 0 < len(value) == len(set(value))
    is_number = key.kind is Kind.FLOAT or (key.kind is Kind.INT and isinstance(value, int))
    return is_number and _in_range(key, value)


def _in_range(key: Key, value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -MAX_NUMBER <= value <= MAX_NUMBER  # false for nan
        and (key.minimum is None or value >= key.minimum)
        and (key.maximum is None or value <= key.maximum)
        and (key.above is None or value > key.above)
        and (key.below is None or value < key.below)
    )


def instead(key: Key, value: Any) -> Value:
    """Return a value to write instead: the number that the user meant if that is clear, else the default."""
    if key.kind in (Kind.INT, Kind.FLOAT) and isinstance(value, str | float):
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if _in_range(key, number) and (key.kind is Kind.FLOAT or number.is_integer()):
            return int(number) if key.kind is Kind.INT else number
    return int(key.minimum or 1) if key.default is None else key.default


def spelled_out(path: tuple[str, ...], value: Any) -> str:
    """Return `key = value` with hostile names and values escaped and shortened."""
    names = [name if re.fullmatch(r"[A-Za-z0-9_-]+", name, re.ASCII) else quoted(name) for name in path]
    return f"{shorten('.'.join(names), 80)} = {value_text(value)}"


def number_text(number: float) -> str:
    """Return a number as people write it: 3e-6, 0.01, 256."""
    return re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", repr(number))


def value_text(value: Any, limit: int = 60) -> str:
    """Return a value as train.toml spells it: printable ASCII on one line, at most `limit` characters."""
    match value:
        case None:
            text = '"None"'
        case bool():
            text = str(value).lower()
        case dict():
            text = "a table" if value else "{}"
        case list() | tuple():
            items = ("[...]" if isinstance(item, list) else value_text(item, limit) for item in value[:20])
            text = f"[{', '.join(items)}]"
        case str():
            text = quoted(value[: limit + 1])
        case int() | float():
            text = number_text(value)
        case _:
            text = str(value)
    return shorten(text, limit)


def shorten(text: str, limit: int = 60) -> str:
    """Return at most `limit` characters, with `...` at the end of a text that was cut."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(text: str) -> str:
    """Return a string in quotes and printable ASCII: control characters and look-alike letters become visible."""
    return json.dumps(text).replace("\x7f", "\\u007f")

"""One value of train.toml: its type, its range, its spelling."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from nightshift.errors import ConfigError

# None is TOML's missing null, written "None"; a dict is a table that is switched on (its keys are
# entries of their own, so the dict itself stays empty).
Value: TypeAlias = bool | int | float | str | tuple[str, ...] | dict[str, Any] | None

LIMIT = 1e15  # beyond any sane value; keeps huge integers out of float()


class Kind(StrEnum):
    """What may stand right of the equals sign."""

    INT = "integer"
    FLOAT = "number"
    BOOL = "true or false"
    CHOICE = "text"
    LIST = "list"
    TABLE = "table"  # its presence switches something on


@dataclass(frozen=True, slots=True)
class Key:
    """One open key of a TOML table, with prime-rl's default.

    `minimum`/`maximum` are inclusive, `above`/`below` exclusive bounds. `choices` are the texts
    allowed; for a number, in addition to numbers. `refused` are choices that prime-rl has and the
    rules refuse, with the reason. `only_if` names the key that selects a variant and the values under
    which this key exists.
    """

    leaf: str
    kind: Kind
    default: Value
    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    nullable: bool = False
    only_if: tuple[str, tuple[Value, ...]] | None = None
    refused: Mapping[str, str] | None = None
    table: str = ""

    @property
    def path(self) -> str:
        """The dotted path, in prime-rl's names."""
        return f"{self.table}.{self.leaf}" if self.table else self.leaf

    @property
    def bounds(self) -> str:
        """The range in words, e.g. `above 0, at most 1`; empty when there is none."""
        if self.minimum is not None and self.maximum is not None:
            return f"{number_text(self.minimum)} to {number_text(self.maximum)}"
        words = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        return ", ".join(f"{word} {number_text(bound)}" for word, bound in words.items() if bound is not None)

    @property
    def allowed(self) -> str:
        """Type, range and choices in words."""
        if self.kind is Kind.TABLE:
            return "[table]" + (' or "None"' if self.nullable else "")
        if self.kind is Kind.CHOICE:
            return " | ".join(self.choices)
        if self.kind is Kind.LIST:
            return f"list of {len(self.choices)} names"
        texts = [*self.choices, *(["None"] if self.nullable and self.default is not None else [])]
        return " or ".join([f"{self.kind} {self.bounds}".strip(), *map(quoted, texts)])


class BadValue(ConfigError):
    """A value that its key cannot take: `cause` continues `key = value ...`."""


def number_text(number: float) -> str:
    """A number as a person writes it: 3e-6, 0.01, 256."""
    return re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", repr(number))


def value_text(value: Any, limit: int = 60) -> str:
    """A value as train.toml spells it; printable ASCII on one line, at most `limit` characters."""
    if value is None:
        text = quoted("None")
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, dict):
        text = "a table" if value else "{}"
    elif isinstance(value, list | tuple):
        flat = ("[...]" if isinstance(item, list) else value_text(item, limit) for item in value[:20])
        text = f"[{', '.join(flat)}]"
    elif isinstance(value, str):
        text = quoted(value[: limit + 1])
    elif isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**limit):
        text = number_text(value)
    else:
        text = "a huge number" if isinstance(value, int) else str(value)
    return shorten(text, limit)


def shorten(text: str, limit: int = 60) -> str:
    """At most `limit` characters, with `...` where something was cut."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(text: str) -> str:
    """A TOML basic string in printable ASCII, so that look-alike letters and control codes show."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

    def escape(char: str) -> str:
        code = ord(char)
        plain = char if 32 <= code < 127 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
        return escapes.get(char, plain)

    return '"' + "".join(map(escape, text)) + '"'


def accept(key: Key, value: Any) -> Value:
    """The value in its canonical type: None for "None", float for a number key, tuple for a list.

    Raises:
        BadValue: wrong type, or outside the key's range or choices.
    """
    if key.nullable and value == "None":
        return None
    if key.kind is Kind.TABLE:
        return _accept_table(key, value)
    if key.kind is Kind.LIST:
        return _accept_list(key, value)
    if key.kind is Kind.CHOICE or (isinstance(value, str) and value in key.choices):
        return _accept_choice(key, value)
    if key.kind is Kind.BOOL:
        if not isinstance(value, bool):
            raise BadValue(f"is {_type_of(value)}", f"Write true or false: {key.leaf} = {value_text(key.default)}")
        return value
    return _accept_number(key, value)


def _accept_table(key: Key, value: Any) -> Value:
    if value == {}:
        return {}
    off = f'; to switch it off, write {key.leaf} = "None"' if key.nullable else ""
    raise BadValue(f"is {_type_of(value)}, not a table", f"To switch it on, write [{key.path}]{off}")


def _accept_choice(key: Key, value: Any) -> str:
    if isinstance(value, str) and value in key.choices:
        return value
    *others, last = map(quoted, key.choices)
    fix = f"Write {key.leaf} = {' or '.join([', '.join(others), last] if others else [last])}"
    if not isinstance(value, str):
        raise BadValue(f"is {_type_of(value)}", fix)
    if key.refused and value in key.refused:
        raise BadValue(f"is locked: the rules refuse it ({key.refused[value]})", fix)
    raise BadValue("is not a choice", fix)


def _accept_list(key: Key, value: Any) -> tuple[str, ...]:
    names = ", ".join(key.choices)
    if not isinstance(value, list | tuple):
        raise BadValue(f"is {_type_of(value)}", f"Write a list: {key.leaf} = [{quoted(key.choices[0])}]")
    for item in value:
        if not isinstance(item, str) or item not in key.choices:
            raise BadValue(f"holds {value_text(item, 30)}", f"Choose among {names}")
    if not value or len(set(value)) != len(value):
        raise BadValue("repeats an entry" if value else "is empty", f"Name some of {names}, each once")
    return tuple(sorted(value))  # their order means nothing


def _accept_number(key: Key, value: Any) -> int | float:
    whole = key.kind is Kind.INT
    wanted = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        off = f' or {key.leaf} = "None"' if key.nullable else ""
        raise BadValue(f"is {_type_of(value)}", f"Write {wanted}: {key.leaf} = {_example(key, value)}{off}")
    if isinstance(value, float) and (whole or not math.isfinite(value)):
        cause = "is not finite" if not math.isfinite(value) else "is a decimal number"
        raise BadValue(cause, f"Write {wanted}: {key.leaf} = {_example(key, value)}")
    inside = (
        (key.minimum is None or value >= key.minimum)
        and (key.maximum is None or value <= key.maximum)
        and (key.above is None or value > key.above)
        and (key.below is None or value < key.below)
        and abs(value) <= LIMIT
    )
    if not inside:
        bounds = key.bounds or f"{number_text(-LIMIT)} to {number_text(LIMIT)}"
        raise BadValue("is out of range", f"Write {wanted}, {bounds}: {key.leaf} = {_example(key, None)}")
    return int(value) if whole else float(value) + 0.0  # + 0.0 turns -0.0 into 0.0


def _example(key: Key, value: Any) -> str:
    """A value to write instead: what was meant, where that is clear, else the default or a bound."""
    meant = _number_meant(value)
    if meant is not None and (key.kind is Kind.FLOAT or meant.is_integer()):
        try:
            return value_text(accept(key, meant if key.kind is Kind.FLOAT else int(meant)))
        except BadValue:
            pass  # not a number that the key takes
    if isinstance(key.default, int | float):
        return value_text(key.default)
    return value_text(int(key.minimum or 1))


def _number_meant(value: Any) -> float | None:
    if not isinstance(value, str | float) or len(str(value)) > 20:
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _type_of(value: Any) -> str:
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "true/false"),
        (str, "text"),
        (int, "a whole number"),
        (float, "a number"),
        (dict, "a table"),
        ((list, tuple), "a list"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "a date or time")

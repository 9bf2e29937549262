"""One value of train.toml: its type, its range, its spelling."""

import json
import re
from contextlib import suppress
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
    allowed; for a number, in addition to numbers. `only_if` names the key that selects a variant and the
    values under which this key exists.
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
    table: str = ""

    @property
    def path(self) -> str:
        """The dotted path, in prime-rl's names."""
        return f"{self.table}.{self.leaf}" if self.table else self.leaf

    @property
    def allowed(self) -> str:
        """Type, range and choices in words, e.g. `number above 0, at most 1 or "None"`."""
        match self.kind:
            case Kind.TABLE:
                return "[table]" + (' or "None"' if self.nullable else "")
            case Kind.CHOICE:
                return " | ".join(self.choices)
            case Kind.LIST:
                return f"list of {len(self.choices)} names"
        bounds = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        words = [f"{word} {number_text(bound)}" for word, bound in bounds.items() if bound is not None]
        if self.minimum is not None and self.maximum is not None:
            words = [f"{number_text(self.minimum)} to {number_text(self.maximum)}"]
        texts = [*self.choices, *(["None"] if self.nullable and self.default is not None else [])]
        return " or ".join([f"{self.kind} {', '.join(words)}".strip(), *map(quoted, texts)])


class Problem(ConfigError):
    """A reason to refuse the file, with the key to point at; without one, `cause` continues `key = value ...`."""

    def __init__(self, cause: str, fix: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(cause, fix)
        self.path = path


def number_text(number: float) -> str:
    """A number as a person writes it: 3e-6, 0.01, 256."""
    return re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", repr(number))


def value_text(value: Any, limit: int = 60) -> str:
    """A value as train.toml spells it; printable ASCII on one line, at most `limit` characters."""
    match value:
        case None:
            text = quoted("None")
        case bool():
            text = str(value).lower()
        case dict():
            text = "a table" if value else "{}"
        case list() | tuple():
            flat = ("[...]" if isinstance(item, list) else value_text(item, limit) for item in value[:20])
            text = f"[{', '.join(flat)}]"
        case str():
            text = quoted(value[: limit + 1])
        case int() | float():
            text = number_text(value)
        case _:
            text = str(value)
    return shorten(text, limit)


def shorten(text: str, limit: int = 60) -> str:
    """At most `limit` characters, with `...` where something was cut."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(text: str) -> str:
    """A string in quotes and printable ASCII, so that look-alike letters and control codes show."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def accept(key: Key, value: Any) -> Value:
    """The value in its canonical type: None for "None", float for a number key, sorted tuple for a list.

    Raises:
        Problem: wrong type, or outside the key's range or choices.
    """
    with suppress(ValueError):
        return _canonical(key, value)
    fix = f"Write {key.leaf} = {value_text(_instead(key, value), 120)}"
    if key.kind is Kind.TABLE:
        fix = f"To switch it on, write [{key.path}]" + (f'; off: write {key.leaf} = "None"' if key.nullable else "")
    raise Problem(f"is not allowed ({key.allowed})", fix)


def _canonical(key: Key, value: Any) -> Value:
    match key.kind, value:
        case _, "None" if key.nullable:
            return None
        case ((Kind.INT | Kind.FLOAT | Kind.CHOICE), str()) if value in key.choices:
            return value
        case Kind.BOOL, bool():
            return value
        case Kind.TABLE, dict() if not value:
            return {}
        case Kind.LIST, list() | tuple() if value and all(item in key.choices for item in value):
            if len(set(value)) == len(value):
                return tuple(sorted(value))  # their order means nothing
        case ((Kind.INT | Kind.FLOAT), int() | float()) if not isinstance(value, bool) and _is_inside(key, value):
            if key.kind is Kind.FLOAT:
                return float(value) + 0.0  # + 0.0 turns -0.0 into 0.0
            if isinstance(value, int):
                return value
    raise ValueError


def _is_inside(key: Key, value: float) -> bool:
    return (
        -LIMIT <= value <= LIMIT  # and so is no nan
        and (key.minimum is None or value >= key.minimum)
        and (key.maximum is None or value <= key.maximum)
        and (key.above is None or value > key.above)
        and (key.below is None or value < key.below)
    )


def _instead(key: Key, value: Any) -> Value:
    """What to write: the number that was meant, where that is clear, else the default or the least."""
    with suppress(ValueError):
        if isinstance(value, str | float) and key.kind in (Kind.INT, Kind.FLOAT):
            number = float(value)
            return _canonical(key, int(number) if key.kind is Kind.INT and number.is_integer() else number)
    return int(key.minimum or 1) if key.default is None else key.default

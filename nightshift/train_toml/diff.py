"""What two train.toml differ in, key by key: only what trains counts, not order, spelling or comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from nightshift.train_toml.config import Config
from nightshift.train_toml.keys import ANY, default, variants
from nightshift.train_toml.values import Kind, Value, value_text

_MAX_LINE = 1000  # of a recorded line; `Change.line` writes far shorter ones
ChangeKind = Literal["changed", "added", "removed"]
_KINDS: tuple[ChangeKind, ...] = ("changed", "added", "removed")
_FORMS: tuple[tuple[ChangeKind, str], ...] = (
    ("added", r"\+(?P<key>\S+) (?P<new>.*?)(?: \(default (?P<old>.*)\))?"),
    ("removed", r"-(?P<key>\S+) (?P<old>.*?)(?: \(default (?P<new>.*)\))?"),
    ("changed", r"(?P<key>[^\s+-]\S*) (?P<old>.*?) -> (?P<new>.*)"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One key that trains otherwise: `changed` where both files write it, else `added` or `removed`.

    Where a file is silent, `old` or `new` is prime-rl's default; None where it has none.
    """

    key: str
    kind: ChangeKind
    old: str | None
    new: str | None

    @property
    def line(self) -> str:
        """As records hold it: `key old -> new`, `+key new (default old)` or `-key old (default new)`."""
        if self.kind == "changed":
            return f"{self.key} {self.old} -> {self.new}"
        sign, value, standard = ("+", self.new, self.old) if self.kind == "added" else ("-", self.old, self.new)
        return f"{sign}{self.key} {value}" + ("" if standard is None else f" (default {standard})")


def changes_of(lines: Iterable[str]) -> tuple[Change, ...]:
    """The changes that a record holds as lines; a line of another form is left out."""
    found = []
    for line in lines:
        for kind, form in _FORMS:
            if match := re.fullmatch(form, line[:_MAX_LINE]):
                found.append(Change(match["key"], kind, match["old"], match["new"]))
                break
    return tuple(found)


def changed_keys(old: Config, new: Config) -> list[str]:
    """The keys that either file writes and that train otherwise, in the order of the files, the new one first."""
    missing = object()
    return [
        path
        for path in dict.fromkeys([*new.values, *old.values])
        if old.resolved.get(path, missing) != new.resolved.get(path, missing)
    ]


def diff(old: Config, new: Config) -> tuple[Change, ...]:
    """Key-level changes, changed before added before removed; empty when both train the same."""
    found = []
    for path in changed_keys(old, new):
        was_written, is_written = path in old.values, path in new.values
        before = spelled(old.values[path]) if was_written else _default(path, new.resolved)
        after = spelled(new.values[path]) if is_written else _default(path, old.resolved)
        kind: ChangeKind = "removed" if not is_written else "changed" if was_written else "added"
        found.append(Change(path, kind, before, after))
    return tuple(sorted(found, key=lambda change: _KINDS.index(change.kind)))  # stable: in file order within


def spelled(value: Value) -> str:
    """A value in a difference: as in train.toml, but texts without quotes and a table as `on`."""
    if isinstance(value, dict):
        return "on"
    return "None" if value is None else value if isinstance(value, str) else value_text(value, 200)


def _default(path: str, resolved: Mapping[str, Value]) -> str | None:
    """prime-rl's default in words; None for an entry that the agent named."""
    entry = variants(path)[0]
    if ANY in entry.path:
        return None
    value = default(path, resolved)
    if value is None:
        return "off" if entry.kind is Kind.TABLE else "unset"
    return spelled(value)

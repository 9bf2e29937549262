"""Load train.toml, the one file that the agent edits, and compare two of them.

The whole file is checked before an engine sees it, because prime-rl's own validation imports the modules that a config
names.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from nightshift.config.allowlist import ANY, BY_PRESET, default, find_key, resolve
from nightshift.config.checks import MAX_PROBLEMS, Problem, read_values, rule_problems
from nightshift.config.toml_text import MAX_LINE, document, line_numbers, read_source
from nightshift.config.values import Value, value_text
from nightshift.errors import ConfigError

MAX_SHOWN = 50  # problems that a message names
UNSET = "unset"  # a key without a value, whatever train.toml or prime-rl call that: None, off, no such key


class TrainTomlError(ConfigError):
    """train.toml is refused. `problems`: every reason, in the order of the lines.

    The text of one problem is one line. The text of several problems is a heading and a line for each.
    """

    def __init__(self, name: str, problems: Sequence[Problem], lines: Mapping[tuple[str, ...], int]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: lines.get(problem.path, 0)))
        places = [f"{name}:{lines[p.path]}" if p.path in lines else name for p in self.problems]
        super().__init__(f"{places[0]}: {self.problems[0].cause}", self.problems[0].fix)
        texts = [f"{place}: {p.cause}. {p.fix}" for place, p in zip(places, self.problems, strict=True)]
        is_cut = len(problems) > MAX_PROBLEMS
        if len(texts) > MAX_SHOWN:
            texts[MAX_SHOWN:] = [f"{name}: {'at least ' if is_cut else ''}{len(texts) - MAX_SHOWN} more"]
        if len(texts) > 1:
            number = f"more than {MAX_PROBLEMS}" if is_cut else len(texts)
            self.args = ("\n".join([f"{name} has {number} problems:", *texts]),)


@dataclass(frozen=True)
class Config:
    """A checked train.toml.

    `values`: dotted path to canonical value, of the keys in the file. `resolved`: every open key that applies, with
    defaults. `hash`: sha256 of the values that differ from prime-rl's defaults, and of the keys of BY_PRESET in the
    file. Comments, order and the spelling of numbers do not change the hash.
    """

    source: bytes
    values: Mapping[str, Value]
    resolved: Mapping[str, Value] = field(repr=False)
    hash: str

    def get(self, path: str) -> Any:
        """Return the value of an open key: its default if the file has none, None if the key does not apply."""
        if path not in self.resolved and find_key(path) is None:
            raise KeyError(path)
        return self.resolved.get(path)

    def shown(self, path: str) -> bool | int | float | str:
        """Return the value of a key as every view shows it: `unset` for none, `by preset` if the memory of the GPUs
        decides it."""
        if path in BY_PRESET and path not in self.values:
            return "by preset"
        value = self.resolved.get(path)
        return UNSET if value is None else value if isinstance(value, bool | int | float) else spelled(value)


def load(path: Path) -> Config:
    """Read a train.toml, and return its config. Raises ConfigError."""
    return parse(read_source(path), path.name)


def parse(source: bytes, name: str = "train.toml") -> Config:
    """Return the config of a train.toml; `name` is its name in messages.

    Raises ConfigError if it is no TOML, and TrainTomlError with every problem if keys or values are refused.
    """
    text, tree = document(source, name)
    values, problems = read_values(tree, MAX_PROBLEMS + 1)
    resolved = resolve(values)
    problems += rule_problems(values, resolved, problems)
    if problems:
        raise TrainTomlError(name, problems, line_numbers(text))
    canonical = {
        path: value
        for path, value in resolved.items()
        if (path in values if path in BY_PRESET else value != default(path, resolved))
    }
    digest = hashlib.sha256(json.dumps(canonical, sort_keys=True, allow_nan=False).encode()).hexdigest()
    return Config(source, MappingProxyType(values), MappingProxyType(resolved), digest)


# -- differences --------------------------------------------------------------------------------------

ChangeKind = Literal["changed", "added", "removed"]
_FORMS: dict[ChangeKind, str] = {  # in the order in which they are shown
    "changed": r"(?P<key>[^\s+-]\S*) (?P<old>.*?) -> (?P<new>.*)",
    "added": r"\+(?P<key>\S+) (?P<new>.*?)(?: \(default (?P<old>.*)\))?",
    "removed": r"-(?P<key>\S+) (?P<old>.*?)(?: \(default (?P<new>.*)\))?",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs: `changed` if both files write it, else `added` or `removed`.

    `old` or `new` is prime-rl's default for a file that does not write the key; None if there is no default.
    """

    key: str
    kind: ChangeKind
    old: str | None
    new: str | None

    @property
    def line(self) -> str:
        """The line in records: `key old -> new`, `+key new (default old)` or `-key old (default new)`."""
        if self.kind == "changed":
            return f"{self.key} {self.old} -> {self.new}"
        sign, value, other = ("+", self.new, self.old) if self.kind == "added" else ("-", self.old, self.new)
        return f"{sign}{self.key} {value}" + ("" if other is None else f" (default {other})")


def changes_of(lines: Iterable[str]) -> tuple[Change, ...]:
    """Return the changes in the lines of a record, without lines of another form."""
    return tuple(
        Change(match["key"], kind, match["old"], match["new"])
        for line in lines
        for kind, form in _FORMS.items()  # a line matches one form
        if (match := re.fullmatch(form, line[:MAX_LINE]))
    )


def changed_keys(old: Config, new: Config) -> list[str]:
    """Return the keys that either file writes and whose effect differs, in the order of the new file, then the old."""
    keys = []
    for path in dict.fromkeys([*new.values, *old.values]):
        before, after = ((file.values if path in BY_PRESET else file.resolved) for file in (old, new))
        if (path in before, before.get(path)) != (path in after, after.get(path)):
            keys.append(path)
    return keys


def diff(old: Config, new: Config) -> tuple[Change, ...]:
    """Return the changes: changed, then added, then removed keys. Empty if both files train the same."""
    changes = []
    for path in changed_keys(old, new):
        before = _text(old.values[path]) if path in old.values else _default_text(path, new.resolved)
        after = _text(new.values[path]) if path in new.values else _default_text(path, old.resolved)
        kind: ChangeKind = "removed" if path not in new.values else "changed" if path in old.values else "added"
        changes.append(Change(path, kind, before, after))
    return tuple(sorted(changes, key=lambda change: list(_FORMS).index(change.kind)))


def spelled(value: Value) -> str:
    """Return a value of a difference: as in train.toml, but text without quotes and a table as `on`."""
    if isinstance(value, dict):
        return "on"
    return "None" if value is None else value if isinstance(value, str) else value_text(value, 200)


def _text(value: Value | None) -> str:
    return UNSET if value is None else spelled(value)


def _default_text(path: str, resolved: Mapping[str, Value]) -> str | None:
    """Return prime-rl's default in words; None for an entry that the user named."""
    if path in BY_PRESET:
        return "by preset"
    key, value = find_key(path), default(path, resolved)
    if key is None or ANY in key.path:
        return None
    return _text(value)

"""Read, check, compare and edit train.toml, the only file that the agent edits.

The whole file is checked before an engine reads it, because prime-rl's own validation imports the modules of a config.
tomllib reports no positions, so a small scanner of strings, comments and brackets splits valid TOML into statements.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nightshift.config.allowlist import ANY, BY_PRESET, Value, default, find_key, quoted, resolve, shorten, value_text
from nightshift.config.checks import MAX_DEPTH, MAX_PROBLEMS, KeyPath, Problem, read_values, rule_problems
from nightshift.errors import ConfigError
from nightshift.files import parse_toml, read_file

UNSET = "unset"  # a key without a value: "None" in train.toml, or a key that is not there
MAX_BYTES = 64 * 1024
MAX_LINE = 1000  # tomllib needs quadratic time for the dots of a key: 19 s for one line of 64 KiB
ABSENT = object()  # for set_values: remove the key from the file

_TOKEN = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"{3,5}'  # the text of a multi-line string may end in quotes
    r"|'''[\s\S]*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{}\n]"
)


@dataclass(frozen=True)
class Config:
    """A checked train.toml.

    `values`: the canonical values of the keys in the file, by dotted path. `resolved`: every open key that applies,
    with defaults. `hash`: sha256 of the values that differ from prime-rl's defaults, and of the keys of BY_PRESET in
    the file. Comments, order and the spelling of numbers do not change the hash.
    """

    source: bytes
    values: Mapping[str, Value]
    resolved: Mapping[str, Value]
    hash: str

    def get(self, path: str) -> Any:
        """Return the value of an open key, by default prime-rl's; None if the key does not apply."""
        return self.resolved.get(path)

    def shown(self, path: str) -> bool | int | float | str:
        """Return the value of a key for views: `unset` for None, `by preset` if the memory preset sets the key."""
        if path in BY_PRESET and path not in self.values:
            return "by preset"
        value = self.resolved.get(path)
        return value if isinstance(value, int | float) else _text(value)


def load(path: Path) -> Config:
    """Return the config in a train.toml. ConfigError as in `parse`."""
    return parse(read_source(path), path.name)


def parse(source: bytes, name: str = "train.toml") -> Config:
    """Return the config in the bytes of a train.toml. `name`: the name of the file in messages.

    ConfigError: the file is not TOML, or has problems. Each problem is one line; several have a heading.
    """
    text, tree = document(source, name)
    values, problems = read_values(tree, MAX_PROBLEMS + 1)
    resolved = resolve(values)
    problems += rule_problems(values, resolved, problems)
    if problems:
        raise refusal(name, problems, line_numbers(text))
    canonical = {
        path: value
        for path, value in resolved.items()
        if (path in values if path in BY_PRESET else value != default(path, resolved))
    }
    digest = hashlib.sha256(json.dumps(canonical, sort_keys=True, allow_nan=False).encode()).hexdigest()
    return Config(source, values, resolved, digest)


def refusal(name: str, problems: list[Problem], lines: Mapping[KeyPath, int]) -> ConfigError:
    """Return all problems of a train.toml as one error. `lines`: the line of each key (line_numbers)."""
    problems = sorted(problems, key=lambda problem: lines.get(problem.path, 0))
    places = [f"{name}:{lines[p.path]}" if p.path in lines else name for p in problems]
    error = ConfigError(f"{places[0]}: {problems[0].cause}", problems[0].fix)
    texts = [f"{place}: {p.cause}. {p.fix}" for place, p in zip(places, problems, strict=True)]
    if len(texts) > 1:
        number = len(texts) if len(texts) <= MAX_PROBLEMS else f"more than {MAX_PROBLEMS}"
        error.args = ("\n".join([f"{name} has {number} problems:", *texts[:MAX_PROBLEMS]]),)
    return error


# -- differences --------------------------------------------------------------------------------------

_FORMS = (  # the lines of changed, added and removed keys
    r"(?P<key>[^\s+-]\S*) (?P<old>.*?) -> (?P<new>.*)",
    r"\+(?P<key>\S+) (?P<new>.*?)(?: \(default (?P<old>.*)\))?",
    r"-(?P<key>\S+) (?P<old>.*?)(?: \(default (?P<new>.*)\))?",
)


@dataclass(frozen=True)
class Change:
    """A key that differs between two files. For a file without the key, `old` or `new` is prime-rl's default; None if
    there is no default. `line`: in records, `key old -> new`, `+key new (default old)` or `-key old (default new)`."""

    key: str
    old: str | None
    new: str | None
    line: str


def changes_of(lines: Iterable[str]) -> tuple[Change, ...]:
    """Return the changes in the lines of a record. Other lines are ignored."""
    return tuple(
        Change(match["key"], match["old"], match["new"], match[0])
        for line in lines
        for form in _FORMS  # a line matches at most one form
        if (match := re.fullmatch(form, line[:MAX_LINE]))
    )


def changed_keys(old: Config, new: Config) -> list[str]:
    """Return the keys of either file whose effect differs, in the order of the new file, then of the old file."""

    def effect(config: Config, path: str) -> Any:
        return (config.values if path in BY_PRESET else config.resolved).get(path, ABSENT)

    return [path for path in dict.fromkeys([*new.values, *old.values]) if effect(old, path) != effect(new, path)]


def diff(old: Config, new: Config) -> tuple[Change, ...]:
    """Return the changed, then the added, then the removed keys; () if both files have the same effect."""
    changes = []
    for path in changed_keys(old, new):
        before, after = (
            _text(config.values[path]) if path in config.values else _default_text(path, new.resolved)
            for config in (old, new)
        )
        sign, value, other = ("-", before, after) if path in old.values else ("+", after, before)
        line = f"{sign}{path} {value}" + ("" if other is None else f" (default {other})")
        if path in old.values and path in new.values:
            line = f"{path} {before} -> {after}"
        changes.append(Change(path, before, after, line))
    return tuple(sorted(changes, key=lambda change: "+-".find(change.line[0])))


def spelled(value: Value) -> str:
    """Return a value for a list of changes: as in train.toml, but text without quotes and a table as `on`."""
    if isinstance(value, dict):
        return "on"
    return "None" if value is None else value if isinstance(value, str) else value_text(value, 200)


def _text(value: Value) -> str:
    return UNSET if value is None else spelled(value)


def _default_text(path: str, resolved: Mapping[str, Value]) -> str | None:
    """Return prime-rl's default in words; None for a key below a name of the user's choice."""
    if path in BY_PRESET:
        return "by preset"
    key, value = find_key(path), default(path, resolved)
    if key is None or ANY in key.path:
        return None
    return _text(value)


# -- text ---------------------------------------------------------------------------------------------


def read_source(path: Path) -> bytes:
    """Return the bytes of a regular file. It is read only once, so that the checked bytes are the bytes that train."""
    try:
        return read_file(path, MAX_BYTES)
    except OSError as error:
        cause = f"{path.name} cannot be read: {error.strerror or error}"
        raise ConfigError(cause, f"Restore it: git checkout {path.name}") from None


def document(source: bytes, name: str, restore: str = "") -> tuple[str, dict[str, Any]]:
    """Return text and tables of a TOML file. ConfigError: it is not valid. `restore`: the fix for a damaged file."""
    fix = restore or f"Restore it: git checkout {name}"
    if len(source) > MAX_BYTES:
        raise ConfigError(f"{name} has {len(source):,} bytes, more than {MAX_BYTES:,}", fix)
    try:
        lines = source.decode().split("\n")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_LINE:
                cause = f"{name}:{number}: {len(line):,} characters on one line"
                raise ConfigError(cause, f"Keep lines below {MAX_LINE:,}.")
        return "\n".join(lines), parse_toml(source)
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).rpartition(" (at ")
        match = re.match(r"line (\d+)", place)
        number = int(match[1]) if match else len(lines)
        cause = f"{name}:{number}: {value_text(lines[number - 1].strip())} is not TOML: "
        cause += shorten(quoted(reason)[1:-1].replace('\\"', '"'), 80)
        fix = "Correct the line: text in double quotes, true and false in lower case, every key and table once."
    except ValueError as error:
        cause = f"{name}: {error}"
    raise ConfigError(cause, fix)


def statements(text: str) -> Iterator[tuple[int, int, KeyPath, list[KeyPath]]]:
    """Yield each table header and each `key = value` of a valid TOML text: its start and end, as whole lines; the path
    of its table; and the paths of the tables and keys in it, down to MAX_DEPTH segments."""
    ends, depth, header = [0], 0, KeyPath()
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if token[0] == "\n" and depth == 0:
            ends.append(token.end())
    for start, end in pairwise([*ends, len(text)]):
        line = text[start:end].strip()
        if line and line[0] != "#":
            paths = [*_paths_in(tomllib.loads(text[start:end]), () if line[0] == "[" else header)]
            header = paths[-1] if line[0] == "[" else header  # the last path is the deepest
            yield start, end, header, paths


def _paths_in(node: Any, path: KeyPath) -> Iterator[KeyPath]:
    for table in node if isinstance(node, list) else [node]:
        for name, value in table.items() if isinstance(table, dict) and len(path) < MAX_DEPTH else ():
            yield (*path, name)
            yield from _paths_in(value, (*path, name))


def line_numbers(text: str) -> dict[KeyPath, int]:
    """Return the first line of each key and each table of a valid TOML text."""
    lines: dict[KeyPath, int] = {}
    for start, _, _, paths in statements(text):
        for path in paths:
            lines.setdefault(path, text.count("\n", 0, start) + 1)
    return lines


# -- edits -------------------------------------------------------------------------------------------


def set_values(source: bytes, changes: Mapping[str, Any]) -> bytes:
    """Return a train.toml with other values, the same comments and order. ConfigError: source or result is refused.

    An empty line separates an added key from the key above, so that `git revert` can undo one of the two changes.
    ABSENT removes a key with the comment on its line. None writes "None", or removes a key whose default is None
    (KeyError: the key is not open). {} switches a table on.
    """
    import tomlkit  # slow to import, and only proposers need it

    resolved, text = parse(source).resolved, source.decode()
    for path, value in changes.items():
        if value is None and default(path, resolved) is None:
            value = ABSENT
        document, before = tomlkit.parse(text), text
        is_set = _set(document, path, value)
        text = tomlkit.dumps(document)
        if value is ABSENT:
            text = _without_gap(before, text)
        elif not is_set:
            text = _add(text, path, value)
    return parse(text.encode()).source


def _set(document: Any, path: str, value: Any) -> bool:
    """Change or remove a key in place. Return False if the key has to be added, because it is absent or a table."""
    import tomlkit

    *tables, leaf = path.split(".")
    node = document
    for table in tables:
        if not hasattr(node.get(table), "items"):
            if value is not ABSENT:
                node.pop(table, None)  # the table was switched off with "None"
            return False
        node = node[table]
    is_table = hasattr(node.get(leaf), "items")
    if is_table and value == {}:
        return True
    if is_table or leaf not in node or value is ABSENT or value == {}:
        node.pop(leaf, None)
        return False
    node[leaf] = tomlkit.value(value_text(value, MAX_LINE))
    return True


def _without_gap(before: str, after: str) -> str:
    """Return `after`, which is `before` without one statement, also without the empty line above if no key is below."""
    end = next((place for place, old in enumerate(before) if after[place : place + 1] != old), len(after))
    is_last = after[end : end + 1] in "\n" and after[end:].lstrip()[:1] in "[#"
    has_gap = before != after and after[:end].endswith("\n\n")
    return after[: end - 1] + after[end:] if is_last and has_gap else after


def _add(text: str, path: str, value: Any) -> str:
    """Return a text with a new key as the last statement of its table, above comments on the next, or at the end."""
    import tomlkit

    table, _, leaf = path.rpartition(".")
    text += "" if not text or text.endswith("\n") else "\n"
    # by table: the end of its last statement, and the gap below that statement
    ends = {".".join(header): (end, "\n" * (paths[-1] != header)) for _, end, header, paths in statements(text)}
    place, gap = ends.get(table, (0, ""))
    added = f"{text[:place]}{gap}{leaf} = {value_text(value, MAX_LINE)}\n{text[place:]}"
    if value == {}:
        added = f"{text}\n[{path}]\n"
    elif table and table not in ends:
        added = f"{text}\n[{table}]\n{leaf} = {value_text(value, MAX_LINE)}\n"
    try:
        tomllib.loads(added)
        return added
    except tomllib.TOMLDecodeError:  # an inline table, or a table of dotted keys, cannot have a header
        document: Any = tomlkit.parse(text)
        node = document
        for segment in table.split("."):
            node = node.setdefault(segment, {})
        node[leaf] = {} if value == {} else tomlkit.value(value_text(value, MAX_LINE))
        return tomlkit.dumps(document)

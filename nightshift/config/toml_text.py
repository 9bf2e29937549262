"""Read and parse train.toml, and find the line of a key.

tomllib reports no positions. All text here is valid TOML, so a small scanner of strings, comments and brackets is
enough to cut the text into statements.
"""

import re
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from nightshift.config.values import quoted, shorten, value_text
from nightshift.errors import ConfigError
from nightshift.files import parse_toml, read_file

MAX_BYTES = 64 * 1024
MAX_LINE = 1000  # tomllib takes quadratic time in the dots of a key: 19 s for one line of 64 KiB
MAX_DEPTH = 12  # segments of a path that has a line number; the deepest open key has 8

_TOKEN = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"{3,5}'  # a multi-line string may end in quotes of its own
    r"|'''[\s\S]*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{}\n]"
)


def read_source(path: Path) -> bytes:
    """Return the bytes of a regular file, read through one descriptor: the checked bytes are the bytes that train."""
    try:
        return read_file(path, MAX_BYTES)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path.name} cannot be read: {reason}", f"Restore it: git checkout {path.name}") from None


def document(source: bytes, name: str, restore: str = "") -> tuple[str, dict[str, Any]]:
    """Return the text and the tables of a TOML file. ConfigError: the file is too large, binary, or no TOML.

    `restore`: what to do with a file that is no text.
    """
    restore = restore or f"Restore it: git checkout {name}"
    if len(source) > MAX_BYTES:
        raise ConfigError(f"{name} has {len(source):,} bytes, more than {MAX_BYTES:,}", restore)
    try:
        text = source.decode()
    except UnicodeDecodeError as error:
        number = source.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{number}: byte 0x{source[error.start]:02x} is not UTF-8 text", restore) from None
    if text.startswith("\ufeff"):
        raise ConfigError(f"{name}:1: the file begins with a byte order mark (BOM)", "Save it as UTF-8 without BOM.")
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE:
            cause = f"{name}:{number}: {len(line):,} characters on one line"
            raise ConfigError(cause, f"Keep lines below {MAX_LINE:,}.")
    try:
        return text, parse_toml(source)
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).rpartition(" (at ")
        match = re.match(r"line (\d+)", place)
        number = int(match[1]) if match else 1 + text.rstrip().count("\n")
        reason = shorten(quoted(message)[1:-1].replace('\\"', '"'), 80)
        raise ConfigError(
            f"{name}:{number}: {value_text(lines[number - 1].strip())} is not TOML: {reason}",
            "Correct the line: text in double quotes, true and false in lower case, every key and table once.",
        ) from None
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", "Write plain [table] headers and keys.") from None


def statements(text: str) -> list[tuple[int, int]]:
    """Return the span (start, end) of each `key = value` and each table header in a valid TOML text, as whole lines."""
    ends, depth = [], 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if token[0] == "\n" and depth == 0:
            ends.append(token.end())
    spans = pairwise([0, *ends, len(text)])
    return [(start, end) for start, end in spans if text[start:end].strip() and text[start:end].lstrip()[0] != "#"]


def line_numbers(text: str) -> dict[tuple[str, ...], int]:
    """Return the first line of each key and each table of a valid TOML text, down to MAX_DEPTH segments.

    For a key in a list of tables it is the line in the first table.
    """
    lines: dict[tuple[str, ...], int] = {}
    header: tuple[str, ...] = ()
    number, position = 1, 0
    for start, end in statements(text):
        number += text.count("\n", position, start)
        position = start
        tree = tomllib.loads(text[start:end])
        is_header = text[start:end].lstrip()[0] == "["
        header = header_path(tree) if is_header else header
        for path in _paths_in(tree, () if is_header else header):
            lines.setdefault(path, number)
    return lines


def _paths_in(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key below `path` in a tree of tables, down to MAX_DEPTH segments."""
    for table in node if isinstance(node, list) else [node]:
        for name, value in table.items() if isinstance(table, dict) and len(path) < MAX_DEPTH else ():
            yield (*path, name)
            yield from _paths_in(value, (*path, name))


def header_path(tree: dict[str, Any]) -> tuple[str, ...]:
    """Return the path that a table header names, from the header's tree; it may have hundreds of segments."""
    path: list[str] = []
    node: Any = tree
    while node and node != [{}]:
        [(name, node)] = node.items()
        path.append(name)
    return tuple(path)


def line_of(text: str, path: tuple[str, ...]) -> int | None:
    """Return the first line of the key or table at `path` in a valid TOML text; None if it is not there."""
    return line_numbers(text).get(path)

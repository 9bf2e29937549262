"""train.toml as bytes and text: read it safely, parse it, find the line of a key.

tomllib reports no positions of values. Positions are only asked of text that tomllib has parsed, so a
small scanner that tells strings, comments and brackets apart is enough to cut it into statements.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift.errors import ConfigError
from nightshift.train_toml.values import quoted, shorten, value_text

MAX_BYTES = 64 * 1024
# tomllib takes time in the square of the number of dots in a key: 19 s for a line of 64 KiB.
MAX_LINE = 1000

_TOKEN = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"{3,5}'  # multi-line strings may end in quotes of their own
    r"|'''[\s\S]*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{}\n]"
)


def shown_name(name: str) -> str:
    """A file name fit for a message: printable, short."""
    return shorten(quoted(name)[1:-1], 40)


def read_source(path: Path) -> bytes:
    """The bytes of a regular file, read through one descriptor: what is checked is what is trained."""
    name = shown_name(path.name)
    restore = f"Restore it: git checkout {name}"
    descriptor = -1
    try:
        if path.is_symlink():
            raise ConfigError(f"{name} is a symbolic link", "Put the file itself in its place.")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{name} is not a regular file", restore)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            source = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist", restore) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read ({getattr(error, 'strerror', None) or error})", restore) from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if len(source) > MAX_BYTES:
        size = max(status.st_size, len(source))
        raise ConfigError(f"{name} has {size:,} bytes, more than {MAX_BYTES:,}", restore)
    return source


def decode(source: bytes, name: str) -> str:
    """The text of a train.toml. Raises ConfigError: too large, empty, binary, or a line that is too long."""
    restore = f"Restore it: git checkout {name}"
    if len(source) > MAX_BYTES:
        raise ConfigError(f"{name} has {len(source):,} bytes, more than {MAX_BYTES:,}", restore)
    if not source.strip():
        raise ConfigError(f"{name} is empty", restore)
    try:
        text = source.decode("utf-8")
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: byte 0x{source[error.start]:02x} is not UTF-8 text", restore) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ConfigError(f"{name}:{line}: a zero byte, so this is no text file", restore)
    if text.startswith("\ufeff"):
        raise ConfigError(f"{name}:1: a byte order mark", "Save the file as UTF-8 without one.")
    for number, line_text in enumerate(text.split("\n"), 1):
        if len(line_text) > MAX_LINE:
            raise ConfigError(
                f"{name}:{number}: {len(line_text):,} characters on one line", f"Keep lines below {MAX_LINE:,}."
            )
    return text


def document(text: str, name: str) -> dict[str, Any]:
    """The parsed text. Raises ConfigError with the line and what tomllib says."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply", "Write plain [table] headers and keys.") from None
    except ValueError as error:  # TOMLDecodeError, or an integer or date that Python refuses
        found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
        message = str(error)[: found.start()] if found else "a number or date that cannot be read"
        lines = text.split("\n")
        last = max((number for number, line in enumerate(lines, 1) if line.strip()), default=1)
        number = int(found[1]) if found and found[1] else last
        where = f"{name}:{number}: {value_text(lines[number - 1].strip())}" if found else name
        raise ConfigError(f"{where} is not TOML: {_plain(message)}", _syntax_fix(message, lines[number - 1])) from None


def _plain(message: str) -> str:
    return shorten(quoted(message)[1:-1].replace('\\"', '"'), 80)


def _syntax_fix(message: str, line: str) -> str:
    if message.startswith(("Cannot overwrite", "Cannot declare", "Cannot mutate")):
        return "This key or table is written twice: keep one."
    if word := re.search(r"=\s*([A-Za-z_][\w.-]*)", line):
        lowered = word[1].lower()
        if lowered in ("true", "false"):
            return f"Write {lowered} in lower case."
        return f"Put text in double quotes: {shorten(quoted(word[1]), 40)}"
    return "Correct the line."


@dataclass(frozen=True, slots=True)
class Statement:
    """A key with its value, or a table header: `line` counts from 1, `text[start:end]` ends in its newline."""

    line: int
    start: int
    end: int
    is_header: bool


def statements(text: str) -> list[Statement]:
    """The statements of a valid TOML text, in order; blank lines and comments belong to none."""
    found: list[Statement] = []
    start, line, depth = 0, 1, 0
    newlines = 0

    def close(end: int) -> None:
        first = text[start:end].lstrip(" \t")[:1]
        if first not in ("", "#", "\n", "\r"):
            found.append(Statement(line, start, end, first == "["))

    for token in _TOKEN.finditer(text):
        symbol = token[0]
        if symbol in ("[", "{"):
            depth += 1
        elif symbol in ("]", "}"):
            depth -= 1
        newlines += symbol.count("\n")
        if symbol == "\n" and depth == 0:
            close(token.end())
            start, line = token.end(), 1 + newlines
    close(len(text))
    return found


def line_of(text: str, path: tuple[str, ...]) -> int | None:
    """The line of a valid TOML text on which the key or table at `path` begins; None if it is not there.

    A prefix of whole statements is valid TOML too, and once a key has appeared it stays: bisect over
    prefixes for the first that has it.
    """
    pieces = statements(text)
    low, high = 0, len(pieces)
    while low < high:
        middle = (low + high) // 2
        if _has(tomllib.loads(text[: pieces[middle].end]), path):
            high = middle
        else:
            low = middle + 1
    return pieces[low].line if low < len(pieces) else None


def _has(document: dict[str, Any], path: tuple[str, ...]) -> bool:
    node: Any = document
    for segment in path:
        if not isinstance(node, dict) or segment not in node:
            return False
        node = node[segment]
    return True

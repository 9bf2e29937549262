"""train.toml as bytes and text: read it safely, parse it, find the line of a key.

tomllib reports no positions of values. Positions are only asked of text that tomllib has parsed, so a
small scanner that tells strings, comments and brackets apart is enough to cut it into statements.
"""

import re
import tomllib
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Any

from nightshift.config.values import quoted, shorten, value_text
from nightshift.errors import ConfigError
from nightshift.files import read_file

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


def read_source(path: Path) -> bytes:
    """The bytes of a regular file, read through one descriptor: what is checked is what is trained."""
    try:
        return read_file(path, MAX_BYTES)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path.name} cannot be read: {reason}", f"Restore it: git checkout {path.name}") from None


def document(source: bytes, name: str) -> tuple[str, dict[str, Any]]:
    """The text of a train.toml, and what it says. ConfigError for what is too large, binary or no TOML."""
    restore = f"Restore it: git checkout {name}"
    if len(source) > MAX_BYTES:
        raise ConfigError(f"{name} has {len(source):,} bytes, more than {MAX_BYTES:,}", restore)
    try:
        text = source.decode()
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: byte 0x{source[error.start]:02x} is not UTF-8 text", restore) from None
    lines = text.split("\n")
    for number, line_text in enumerate(lines, 1):
        if len(line_text) > MAX_LINE:
            cause = f"{name}:{number}: {len(line_text):,} characters on one line"
            raise ConfigError(cause, f"Keep lines below {MAX_LINE:,}.")
    try:
        return text, tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply", "Write plain [table] headers and keys.") from None
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).rpartition(" (at ")
        found = re.match(r"line (\d+)", place)
        number = int(found[1]) if found else 1 + text.rstrip().count("\n")
        said = shorten(quoted(message)[1:-1].replace('\\"', '"'), 80)
        raise ConfigError(
            f"{name}:{number}: {value_text(lines[number - 1].strip())} is not TOML: {said}",
            "Correct the line: text in double quotes, true and false in lower case, every key and table once.",
        ) from None


def statements(text: str) -> list[tuple[int, int]]:
    """Where each key with its value, and each table header, of a valid TOML text stands.

    As (start, end), in order: whole lines, and `end` is behind the newline. Blank lines and comments belong to none.
    """
    ends, depth = [], 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if token[0] == "\n" and depth == 0:
            ends.append(token.end())
    spans = pairwise([0, *ends, len(text)])
    return [(start, end) for start, end in spans if text[start:end].strip() and text[start:end].lstrip()[0] != "#"]


def line_of(text: str, path: tuple[str, ...]) -> int | None:
    """The line of a valid TOML text on which the key or table at `path` begins; None if it is not there.

    A prefix of whole statements is valid TOML too, and once a key has appeared it stays: bisect over
    prefixes for the first that has it.
    """
    spans = statements(text)
    index = bisect_left(spans, True, key=lambda span: _has(tomllib.loads(text[: span[1]]), path))
    return text.count("\n", 0, spans[index][0]) + 1 if index < len(spans) else None


def _has(node: Any, path: tuple[str, ...]) -> bool:
    for segment in path:
        if not isinstance(node, dict) or segment not in node:
            return False
        node = node[segment]
    return True

"""The user's direction of a night: the text that every agent must stay within."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from nightshift.errors import UsageError
from nightshift.files import read_file
from nightshift.text import clean

MAX_CHARACTERS = 1_500
PROGRAM_NAME = "program.md"
OPTION = "--direction"
_HEADING = "## Direction"
_MAX_BYTES = 64 * 1024  # of a file: program.md has about 8 KiB


@dataclass(frozen=True, slots=True)
class Direction:
    """A direction of at most MAX_CHARACTERS; empty if the user gave none. `source`: the file, or OPTION for a text."""

    text: str = ""
    source: str = PROGRAM_NAME

    @property
    def sha256(self) -> str:
        """Hash of the text; empty without a direction."""
        return hashlib.sha256(self.text.encode()).hexdigest() if self.text else ""


def read_direction(root: Path, given: str | None) -> Direction:
    """Read the direction that holds now: a night reads it again before each proposal.

    Args:
        given: the argument of OPTION, a file (relative to `root`) or the text itself. None: the section `## Direction`
            of program.md.

    Raises:
        UsageError: the direction is too long, or its file cannot be read. A night that is under way keeps its last one.
    """
    if given is None:
        path = root / PROGRAM_NAME
        text = _section(_read(path)) if os.path.lexists(path) else ""
        return _direction(text, PROGRAM_NAME)
    if not given.strip():
        return Direction("", OPTION)  # no direction, whatever program.md says
    path = root / given
    if os.path.lexists(path):
        return _direction(_read(path), given)
    is_word = given.isascii() and len(given.split()) == 1
    if is_word or given.lower().endswith((".md", ".txt")):  # a mistyped name, or a file removed during the night
        fix = 'Name a file, or write a sentence: --direction "only trainer.scheduler".'
        raise UsageError(f"{OPTION} {given}: no such file, and a file name or one word is no direction", fix)
    return _direction(given, OPTION)


def _read(path: Path) -> str:
    try:
        return read_file(path.resolve(), _MAX_BYTES).decode()
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    raise UsageError(f"the direction in {path.name} cannot be read: {reason}", "Write a plain text file.")


def _section(text: str) -> str:
    """The lines between the heading `## Direction` and the next heading of its level or above."""
    lines = _without_comments(text).splitlines()
    start = next((number for number, line in enumerate(lines, 1) if line.strip() == _HEADING), len(lines))
    end = next((n for n, line in enumerate(lines[start:], start) if line.startswith(("# ", "## "))), len(lines))
    return "\n".join(lines[start:end])


def _without_comments(text: str) -> str:
    """The text without HTML comments; a comment without an end reaches to the end of the text."""
    first, *rest = text.split("<!--")
    return first + "".join(piece.partition("-->")[2] for piece in rest)


def _direction(text: str, source: str) -> Direction:
    """The cleaned text: no control characters, no empty lines. UsageError for one that is too long."""
    lines = [clean(line, len(line)) for line in _without_comments(text).splitlines()]
    cleaned = "\n".join(line for line in lines if line)
    if len(cleaned) > MAX_CHARACTERS:
        cause = f"the direction of {source} has {len(cleaned):,} characters, more than {MAX_CHARACTERS:,}"
        raise UsageError(cause, "Shorten it.")
    return Direction(cleaned, source)

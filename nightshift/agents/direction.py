"""The user's direction of a night: the text that every agent must stay within."""

import os
from pathlib import Path

from nightshift.errors import UsageError
from nightshift.files import read_file
from nightshift.text import clean

MAX_CHARACTERS = 1_500
PROGRAM_NAME = "program.md"
OPTION = "--direction"
_HEADING = "## Direction"
_MAX_BYTES = 64 * 1024  # of a file: program.md has about 8 KiB


def read_direction(root: Path, given: str | None) -> str:
    """Read the direction that holds now: a night reads it again before each proposal.

    Args:
        given: the argument of OPTION, a file (relative to `root`) or the text itself. None: the section `## Direction`
            of program.md.

    Returns:
        The text without control characters, comments and empty lines; "" if the user gives no direction.

    Raises:
        UsageError: the direction is too long, or its file cannot be read. A night that is under way keeps its last one.
    """
    source = PROGRAM_NAME if given is None else given
    if os.path.lexists(root / source) and source.strip():
        text = _read(root / source)
        text = _section(text) if given is None else text
    elif given is None or not given.strip():
        return ""
    else:
        is_word = given.isascii() and len(given.split()) == 1
        if is_word or given.lower().endswith((".md", ".txt")):  # a mistyped name, or a file removed during the night
            fix = 'Name a file, or write a sentence: --direction "only trainer.scheduler".'
            raise UsageError(f"{OPTION} {given}: no such file, and a file name or one word is no direction", fix)
        text, source = given, OPTION
    lines = [clean(line, len(line)) for line in _without_comments(text).splitlines()]
    direction = "\n".join(line for line in lines if line)
    if len(direction) > MAX_CHARACTERS:
        cause = f"the direction of {source} has {len(direction):,} characters, more than {MAX_CHARACTERS:,}"
        raise UsageError(cause, "Shorten it.")
    return direction


def _read(path: Path) -> str:
    try:
        return read_file(path.resolve(), _MAX_BYTES).decode()
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    raise UsageError(f"the direction in {path.name} cannot be read: {reason}", "Write a plain text file.")


def _section(text: str) -> str:
    """Return the lines between the heading `## Direction` and the next heading of its level or above."""
    lines = _without_comments(text).splitlines()
    start = next((number for number, line in enumerate(lines, 1) if line.strip() == _HEADING), len(lines))
    end = next((n for n, line in enumerate(lines[start:], start) if line.startswith(("# ", "## "))), len(lines))
    return "\n".join(lines[start:end])


def _without_comments(text: str) -> str:
    """Return the text without HTML comments; a comment without an end reaches to the end of the text."""
    first, *rest = text.split("<!--")
    return first + "".join(piece.partition("-->")[2] for piece in rest)

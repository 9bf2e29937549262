"""The user's direction for a night: a text that every agent must follow."""

import os
import re
from pathlib import Path

from nightshift.config.scope import LABEL, require_valid, scope_of
from nightshift.errors import UsageError
from nightshift.files import read_file
from nightshift.text import clean

MAX_CHARACTERS = 1_500
HEADING = "## Direction"
_COMMENT = re.compile(r"<!--.*?(-->|\Z)", re.DOTALL)  # a comment without an end reaches to the end of the text
_SECTION = re.compile(rf"^[^\S\n]*{HEADING}[^\S\n]*$(.*?)(?=^##? |\Z)", re.DOTALL | re.MULTILINE)
_MAX_BYTES = 64 * 1024  # of a file: program.md has about 8 KiB


def read_direction(root: Path, given: str | None = None, only: str | None = None) -> str:
    """Return the current direction, cleaned, or "". A night reads the direction again before each proposal.

    `given`: the argument of --direction: a file (relative to `root`) or the text itself; None: the section
    `## Direction` of program.md. `only`: the argument of --only, which becomes the first line. Raises UsageError for a
    direction that is too long, cannot be read, or names a key that is not open.
    """
    source, text = _source(root, given)
    lines = (clean(line, len(line)) for line in text.splitlines())
    direction = "\n".join(filter(None, lines))
    if only is not None:
        if scope_of(direction):
            raise UsageError(f"--only and the direction of {source} both name keys", f"Remove the line {LABEL}: ...")
        direction = f"{LABEL}: {clean(only, len(only))}\n{direction}".rstrip()
        if not scope_of(direction):
            raise UsageError("--only names no key", "Write keys or tables: --only trainer.scheduler,trainer.optim.lr")
    if len(direction) > MAX_CHARACTERS:
        cause = f"the direction of {source} has {len(direction):,} characters, more than {MAX_CHARACTERS:,}"
        raise UsageError(cause, "Shorten it.")
    require_valid(direction)
    return direction


def _source(root: Path, given: str | None) -> tuple[str, str]:
    """Return the name and the raw text of the direction."""
    name = "program.md" if given is None else given
    if name.strip() and os.path.lexists(root / name):
        try:
            text = _COMMENT.sub("", read_file(os.path.realpath(root / name), _MAX_BYTES).decode())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the direction in {name} cannot be read: {error}", "Write a plain text file.") from None
        if given is None:
            section = _SECTION.search("\n".join(text.splitlines()))
            text = section[1] if section else ""
        return name, text
    if name.lower().endswith((".md", ".txt")) and given is not None:  # a typo, or the file was removed in the night
        raise UsageError(f"--direction {name}: no such file", 'Name a file, or write a sentence: --direction "TEXT".')
    return "--direction", given or ""

"""Foreign text (of agents, programs, policies, file names, old records), made one plain line where it comes in."""

from __future__ import annotations

import re
from datetime import datetime

MAX_TEXT = 1000  # characters of one foreign text in a record: git shows a subject of that length, too
# Escape sequences: CSI (colours, cursor), OSC (titles, links) up to BEL or ST, and the two-character ones.
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """At most `limit` characters on one line, without escape sequences, and without control, format (direction, zero
    width) and surrogate characters; white space is one blank."""
    if len(text) <= limit and text.isprintable() and "  " not in text and text == text.strip():
        return text  # nearly all texts, and every record that is read has some
    blanks = " ".join(ANSI.sub("", text).split())
    line = " ".join("".join(character for character in blanks if character.isprintable()).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def local(moment: datetime) -> str:
    """A moment on this machine's clock, with its zone."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M %Z")

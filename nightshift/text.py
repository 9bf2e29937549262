"""Foreign text (of agents, programs, policies, file names, old records), made one plain line where it comes in."""

import re
from datetime import datetime

MAX_TEXT = 1000  # characters of one foreign text in a record: git shows a subject of that length, too
# Escape sequences: CSI (colours, cursor), OSC (titles, links) up to BEL or ST, and the two-character ones.
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")

# What a spreadsheet computes at the start of a cell (CWE-1236), in half and full width; also after a ;, which ends a
# cell in half of Europe. A + only before a call, a DDE link or another sheet: many descriptions are `+key value`.
_FORMULA = re.compile(r"(?:^|(?<=;))(?=[\s\"]*(?:[=\-@\uff1d\uff0d\uff20]|[+\uff0b].*(?:\w\(|[|!])))")


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """At most `limit` characters on one line, without escape sequences, and without control, format (direction, zero
    width) and surrogate characters; white space is one blank."""
    if len(text) <= limit and text.isprintable() and "  " not in text and text == text.strip():
        return text  # nearly all texts, and every record that is read has some
    blanks = " ".join(ANSI.sub("", text).split())
    line = " ".join("".join(character for character in blanks if character.isprintable()).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def escape_formula(text: str) -> str:
    """The text of a cell with an apostrophe before what a spreadsheet would compute. Numbers need none."""
    return _FORMULA.sub("'", text)


def counted(count: int, noun: str = "experiment") -> str:
    """Return `1 experiment`, `2 experiments`."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def local(moment: datetime) -> str:
    """A moment on this machine's clock, with its zone."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M %Z")

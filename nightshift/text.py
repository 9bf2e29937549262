"""Clean text from agents, programs, policies, file names and old records to one plain line."""

import re
from datetime import datetime

MAX_TEXT = 1000  # characters of one such text in a record; git shows a subject of this length
# Escape sequences: CSI (colours, cursor), OSC (titles, links) up to BEL or ST, and two-character sequences.
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
# A formula at the start of a spreadsheet cell (CWE-1236), in half and full width, or after a separator `;`. A + counts
# only before a call, a DDE link or another sheet: many descriptions are `+key value`.
_FORMULA = re.compile(r"(?:^|(?<=;))(?=[\s\"]*(?:[=\-@\uff1d\uff0d\uff20]|[+\uff0b].*(?:\w\(|[|!])))")


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Return at most `limit` characters on one line, without escape sequences, control, format (direction, zero width)
    and surrogate characters. White space becomes one blank."""
    if len(text) <= limit and text.isprintable() and "  " not in text and text == text.strip():
        return text  # fast: nearly all texts
    blanks = " ".join(ANSI.sub("", text).split())
    line = " ".join("".join(character for character in blanks if character.isprintable()).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def escape_formula(text: str) -> str:
    """Return the text of a cell with an apostrophe before a formula."""
    return _FORMULA.sub("'", text)


def counted(count: int, noun: str = "experiment") -> str:
    """Return `1 experiment`, `2 experiments`."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def local(moment: datetime) -> str:
    """Return a time in this machine's time zone, with the name of the zone."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M %Z")

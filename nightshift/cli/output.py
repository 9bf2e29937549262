"""The only module that prints: results on stdout, everything else on stderr.

rich draws tables and the live display, on terminals only. Every other line is plain text, also on a terminal, so that
a copied command stays whole. Foreign text loses its escape sequences here and is never read as rich's markup.
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nightshift.campaign.records import Record
from nightshift.campaign.results import row
from nightshift.errors import NightshiftError
from nightshift.report.fields import PROPOSAL, fields
from nightshift.text import ANSI

_NEXT = 'edit train.toml, then: uv run run.py -m "<hypothesis>: <prediction>"; or: uv run nightshift night --agent NAME'
_BAR_COLUMNS = 12
Line = tuple[str, float | None]  # a line of the live display, and the share that is done, which a bar shows

_live: Live | None = None
_drawn: Sequence[Line] = ()


def summary(record: Record) -> str:
    """The block that agents grep: `key: value` lines. What was not measured has no line."""
    lines = [field for field in fields(record, row(record, {})) if field[0] not in PROPOSAL]
    if record.is_keep and record.parent is None:
        lines.append(("next", _NEXT))
    return "\n".join(["---", *(printable(f"{name + ': ':18}{text}") for name, text in lines)])


def print_text(*lines: str) -> None:
    """Print on stdout: results."""
    draw()
    _write("stdout", "\n".join(map(printable, "\n".join(lines).split("\n"))))


def print_tables(text: str) -> None:
    """Print on stdout; on a terminal the lines with ` | ` in columns that fit its width."""
    for is_table, group in groupby(text.split("\n"), lambda line: " | " in line and is_terminal("stdout")):
        lines, table = list(group), Table.grid(padding=(0, 2, 0, 0))
        if not is_table:
            print_text(*lines)
            continue
        for line in lines:
            table.add_row(*map(Text, printable(line).split(" | ", lines[0].count(" | "))))
        Console().print(table)


def print_error(error: NightshiftError | str) -> None:
    """Print on stderr: an error, progress, or the output of another process."""
    draw()
    _write("stderr", "\n".join(map(printable, str(error).split("\n"))))


def print_found(document: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print what a command found: with --json `document` (see `plain`) as one line of ASCII, else lines for people."""
    print_text(*([json.dumps(plain(document))] if as_json else lines))


def plain(document: Any) -> Any:
    """Return a Struct or mapping as JSON has it: null replaces what is no finite number."""

    def convert(value: Any) -> Any:
        return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else str(value)

    return json.loads(json.dumps(msgspec.to_builtins(document, enc_hook=convert)), parse_constant=lambda name: None)


def draw(lines: Sequence[Line] = ()) -> None:
    """Show these lines as the live display, each with its bar; none: end it. Call on a terminal only (`is_terminal`).

    No thread refreshes it: the loops that wait do, by waiting.look.
    """
    global _live, _drawn
    if lines == _drawn:
        return
    rows, _drawn = list[RenderableType](), lines  # a signal may cut in
    for text, share in lines:
        words, grid = Text(printable(text), no_wrap=True, overflow="ellipsis"), Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(1.0, share or 0.0, width=_BAR_COLUMNS), words)
        rows.append(words if share is None else grid)
    try:
        if not lines and _live is not None:
            live, _live = _live, None
            live.stop()
        elif lines and _live is None:
            options: dict[str, Any] = dict.fromkeys(("auto_refresh", "redirect_stdout", "redirect_stderr"), False)
            _live = Live(console=Console(stderr=True), transient=True, **options)
            _live.start()
            _live.console.show_cursor()  # a kill would leave the terminal without a cursor
        if _live is not None:
            _live.update(Group(*rows), refresh=True)
            print(end="\r", file=sys.stderr, flush=True)  # the echo of Ctrl-C lands on the line itself
    except OSError:  # a terminal that went away must not end a night
        _live = None


def is_terminal(name: str = "stderr") -> bool:
    """Whether stdout or stderr is a terminal that can move its cursor and show a bar."""
    stream = getattr(sys, name)
    is_dumb = os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not is_dumb and "utf" in stream.encoding.lower()


def _write(name: str, text: str) -> None:
    """Write to stdout or stderr, unless the stream is closed."""
    if (stream := getattr(sys, name)) is None:
        return
    try:
        stream.reconfigure(errors="backslashreplace")  # of an encoding that lacks a character
        print(text, file=stream, flush=True)
    except OSError:
        if name == "stdout":
            raise  # a terminal that went away must not end a night, which prints its progress to stderr


def printable(text: str) -> str:
    """Hostile text cannot move the cursor, forge lines, turn round what follows or end the block."""
    plain = text if text.isprintable() else ANSI.sub(" ", text)  # an escape sequence whole, not what follows its ESC
    return "".join(character if character.isprintable() else " " for character in plain).rstrip()

"""The only module that prints: results to stdout, everything else to stderr.

rich draws tables and the live display, on terminals only. All other lines are plain text, so that a copied command
stays in one piece. Escape sequences in foreign text are removed here, and rich never parses the text as markup.
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

NEXT = (
    'edit train.toml, then: uv run run.py -m "<hypothesis>: expect <prediction>"; '
    "or: uv run nightshift night --agent NAME"
)
_BAR_COLUMNS = 12
Line = tuple[str, float | None]  # a line of the live display, and the finished share that its bar shows

_live: Live | None = None
_drawn: Sequence[Line] = ()


def summary(record: Record) -> str:
    """Return the block that agents grep: `key: value` lines. A value that was not measured has no line."""
    lines = [field for field in fields(record, row(record, {})) if field[0] not in PROPOSAL]
    if record.is_keep:
        lines.append(("next", NEXT))
    if record.is_keep and record.run.new:
        lines.append(("to undo", f"uv run nightshift revert {record.run.new.name}"))
    return "\n".join(["---", *(printable(f"{name + ': ':18}{text}") for name, text in lines)])


def print_text(*lines: str) -> None:
    """Print results to stdout."""
    draw()
    _write("stdout", "\n".join(map(printable, "\n".join(lines).split("\n"))))


def print_tables(text: str) -> None:
    """Print to stdout; on a terminal, lines with ` | ` become a table that fits its width."""
    for is_table, group in groupby(text.split("\n"), lambda line: " | " in line and is_terminal("stdout")):
        lines, table = list(group), Table.grid(padding=(0, 2, 0, 0))
        if not is_table:
            print_text(*lines)
            continue
        for line in lines:
            table.add_row(*map(Text, printable(line).split(" | ", lines[0].count(" | "))))
        Console().print(table)


def print_error(error: NightshiftError | str) -> None:
    """Print an error, progress, or the output of another process to stderr."""
    draw()
    _write("stderr", "\n".join(map(printable, str(error).split("\n"))))


def print_result(document: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print the result of a command: with --json `document` as one line of ASCII, else `lines`."""
    print_text(*([json.dumps(plain(document))] if as_json else lines))


def plain(document: Any) -> Any:
    """Return a Struct or mapping as plain JSON values, with null for numbers that are not finite."""

    def convert(value: Any) -> Any:
        return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else str(value)

    return json.loads(json.dumps(msgspec.to_builtins(document, enc_hook=convert)), parse_constant=lambda name: None)


def draw(lines: Sequence[Line] = ()) -> None:
    """Show these lines as the live display, each with its bar; without lines, end the display. For terminals only
    (`is_terminal`). No thread refreshes the display: loops that wait call waiting.look."""
    global _live, _drawn
    if lines == _drawn:
        return
    rows, _drawn = list[RenderableType](), lines  # set first: a signal may interrupt the rest
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
            _live.console.show_cursor()  # else a kill leaves the terminal without a cursor
        if _live is not None:
            _live.update(Group(*rows), refresh=True)
            print(end="\r", file=sys.stderr, flush=True)  # so that ^C is echoed on the same line
    except OSError:  # a closed terminal must not end a night
        _live = None


def is_terminal(name: str = "stderr") -> bool:
    """Return True if stdout or stderr is a terminal that can move its cursor and show a bar."""
    stream = getattr(sys, name)
    is_dumb = os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not is_dumb and "utf" in stream.encoding.lower()


def _write(name: str, text: str) -> None:
    """Write to stdout or stderr, unless the stream is closed."""
    if (stream := getattr(sys, name)) is None:
        return
    try:
        stream.reconfigure(errors="backslashreplace")  # for characters that the encoding lacks
        print(text, file=stream, flush=True)
    except OSError:
        if name == "stdout":
            raise  # of stderr, ignored: a closed terminal must not end a night, which prints its progress there


def printable(text: str) -> str:
    """Return text that cannot move the cursor, forge lines or reverse the text behind it."""
    plain = text if text.isprintable() else ANSI.sub(" ", text)  # whole escape sequences, not only their ESC
    return "".join(character if character.isprintable() else " " for character in plain).rstrip()

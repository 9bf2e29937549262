"""`runs/journal.jsonl`: an append-only log of what happened in a checkout, one JSON object a line. A line names a file
below runs/ and none of its content."""

import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from nightshift.files import disk_error, open_regular, parse_json, read_file

JOURNAL_NAME = "journal.jsonl"

Event = Literal["begun", "submitted", "access", "decided", "committed", "direction"]


class Access(msgspec.Struct, frozen=True):
    """The permission of one job to read the test split. All jobs of one certificate have one `number`."""

    number: Annotated[int, msgspec.Meta(ge=1, le=10**6)]
    branch: str
    rules_hash: str
    configs: dict[str, str]
    token: str


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `event`: an `Event`; `file`: a path below runs/; `commits`: the ids that git gave, by decision."""

    time: str  # ISO 8601, UTC
    event: str
    file: str
    access: Access | None = None  # of the event `access`
    commits: dict[str, str] = {}  # of the event `committed`


class Journal:
    """The journal of one runs/ folder. Only the controller adds lines."""

    def __init__(self, runs_dir: Path) -> None:
        self.path = runs_dir / JOURNAL_NAME

    def lines(self) -> list[Line]:
        """Return the lines that can be read. OSError if the file cannot be read."""
        lines = list[Line]()
        with suppress(FileNotFoundError, NotADirectoryError):
            for text in read_file(self.path).split(b"\n")[:-1]:  # not the last line, which a kill may have cut
                with suppress(ValueError):
                    lines.append(parse_json(text, Line))
        return lines

    def add(self, event: Event, file: str, **facts: Any) -> None:
        """Add a line and sync it to the disk. EngineError if the disk refuses. `facts`: other fields of Line."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        append(self.path, Line(time=time, event=event, file=file, **facts))

    def accesses(self) -> list[Access]:
        """Return the uses of the test split in order, one for each job."""
        return [line.access for line in self.lines() if line.access]


def append(path: Path, value: msgspec.Struct) -> None:
    """Add a line to a file of JSON lines, and sync it to the disk. EngineError if the disk refuses."""
    try:
        with open_regular(path, "a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # without a line that a kill cut
            file.write(msgspec.json.encode(value) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path) from None

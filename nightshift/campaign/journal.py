"""`runs/journal.jsonl`: an append-only log of what happened in a checkout, one JSON object a line.

The controller adds a line for each experiment and certificate that began, each submitted job, each use of the test
split, each decision, each commit, and the user's direction. A line names a file below runs/ and none of its content.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from nightshift.files import disk_error, open_regular, parse_json, read_file

JOURNAL_NAME = "journal.jsonl"

Event = Literal["begun", "submitted", "access", "decided", "committed", "direction"]


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The permission of one job to read the test split. All jobs of one certificate have the same `number`. `configs`:
    hashes of the two configs, by side; `token`: of the job."""

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

    def lines(self) -> tuple[list[Line], int]:
        """Return the lines that can be read, and the number of the others. A last line that a kill cut is neither."""
        lines, num_damaged = list[Line](), 0
        try:
            texts = read_file(self.path).split(b"\n")[:-1]
        except (FileNotFoundError, NotADirectoryError):
            return [], 0
        for text in texts:
            try:
                lines.append(parse_json(text, Line))
            except ValueError:
                num_damaged += 1
        return lines, num_damaged

    def add(self, event: Event, file: str, **facts: Any) -> None:
        """Add a line and sync it to the disk. EngineError if the disk refuses. `facts`: other fields of Line."""
        line = Line(time=datetime.now(UTC).isoformat(timespec="seconds"), event=event, file=file, **facts)
        try:
            with open_regular(self.path, "a+b") as journal:
                journal.seek(0)
                journal.truncate(journal.read().rfind(b"\n") + 1)  # without a line that a kill cut
                journal.write(msgspec.json.encode(line) + b"\n")
                journal.flush()
                os.fsync(journal.fileno())
        except OSError as error:
            raise disk_error(error, self.path) from None

    def accesses(self) -> list[Access]:
        """Return the uses of the test split in order, one for each job."""
        return [line.access for line in self.lines()[0] if line.access]

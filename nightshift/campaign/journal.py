"""`runs/journal.jsonl`: one line for each thing that is begun, submitted, measured, decided, certified, or read of the
test split. Each line holds the sha256 of the line before and of its file.

The head is the hash of the last line. A process that can write a record can write a whole journal, so summaries,
certificates and commits hold a copy of the head. verify.py compares.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from nightshift.errors import EngineError, UsageError
from nightshift.files import disk_error, read_file

JOURNAL_NAME = "journal.jsonl"
ASIDE = "journal.damaged"  # the start of the name of a damaged journal that was set aside
HEAD_DIGITS = 12  # of a printed head

Event = Literal["begun", "submitted", "access", "measured", "decided", "certified", "direction"]


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The permission of one job to read the test split. All jobs of one certificate have the same `number`. `configs`:
    hashes of the two configs, by side; `token`: of the job."""

    number: Annotated[int, msgspec.Meta(ge=1, le=10**6)]
    branch: str
    rules_hash: str
    configs: dict[str, str]
    token: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `file` is a path below runs/, `sha256` the hash of its bytes, or the `record_sha256` of a record.json.
    `recovered`: written by the start after a kill, not by the process that wrote the file."""

    number: int  # counts from 1
    time: str  # ISO 8601, UTC
    event: Event
    file: str
    sha256: str
    before: str  # sha256 of the line before, without its end; "" for the first
    access: Access | None = None  # of the event `access`
    recovered: bool = False


class Journal:
    """The journal of one runs/ folder. Only the controller adds lines."""

    def __init__(self, runs_dir: Path) -> None:
        self.path = runs_dir / JOURNAL_NAME

    def lines(self) -> list[bytes]:
        """Return the whole lines, without a last line that a kill cut. OSError if the path is not a regular file."""
        try:
            return read_file(self.path).split(b"\n")[:-1]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_cut(self) -> bool:
        """Return True if the last line has no end. OSError as `lines`."""
        return self.path.exists() and read_file(self.path)[-1:] not in (b"", b"\n")

    @property
    def head(self) -> str:
        """The first digits of the last line's hash; "" if no line can be read."""
        try:
            return "".join(sha256(line)[:HEAD_DIGITS] for line in self.lines()[-1:])
        except OSError:
            return ""

    def last(self, file: str) -> Line | None:
        """Return the last line about a file; None if none can be read."""
        try:
            return _last(self.lines(), file)
        except (OSError, ValueError):
            return None

    def num_lines(self, file: str) -> int:
        """Return the number of lines about a file. OSError if the journal cannot be read."""
        return sum(_of(file) in line for line in self.lines())

    def add(
        self, event: Event, file: str, digest: str, *, access: Access | None = None, recovered: bool = False
    ) -> bool:
        """Add a line and sync it to the disk, unless the last line about the file holds the same hash.

        Returns: True if a line was added.

        Raises:
            EngineError: the disk refuses, or the last line is damaged.
        """
        try:
            lines = self.lines()
            known = _last(lines, file)
            if known is not None and known.sha256 == digest:
                return False
            last = lines[-1] if lines else b""
            line = Line(
                number=line_of(last).number + 1 if last else 1,
                time=datetime.now(UTC).isoformat(timespec="seconds"),
                event=event,
                file=file,
                sha256=digest,
                before=sha256(last) if last else "",
                access=access,
                recovered=recovered,
            )
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            with os.fdopen(os.open(self.path, flags, 0o644), "ab") as journal:
                journal.truncate(sum(len(line) + 1 for line in lines))  # without a line that a kill cut
                journal.write(msgspec.json.encode(line) + b"\n")
                journal.flush()
                os.fsync(journal.fileno())
        except OSError as error:
            raise disk_error(error, self.path) from None
        except ValueError as error:
            raise EngineError(f"{self.path} is damaged: {error}", "The next uv run run.py sets it aside.") from None
        return True

    def accesses(self) -> list[Access]:
        """Return all accesses to the test split in order, one for each job, and first those in journals that were set
        aside, if they can be read. UsageError if the journal itself is damaged: no access may be forgotten."""
        aside, current = list[Access | None](), list[Access | None]()
        for path in sorted(self.path.parent.glob(f"{ASIDE}-*")):
            with suppress(OSError):
                for line in read_file(path).split(b"\n")[:-1]:
                    with suppress(ValueError):
                        aside.append(line_of(line).access)
        try:
            for line in self.lines():
                current.append(line_of(line).access)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"line {len(current) + 1}: {error}"
            fix = "Every access to the test split counts: repair it, or set it aside"
            fix = f"{fix}: mv {self.path} {self.path.parent / ASIDE}-1"
            raise UsageError(f"{self.path} is damaged: {reason}", fix) from None
        return [access for access in (*aside, *current) if access]


def line_of(data: bytes) -> Line:
    """Return a line from its JSON. ValueError if the JSON is no line."""
    try:
        return msgspec.json.decode(data, type=Line)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record_sha256(data: bytes) -> str:
    """Return the hash of a record.json: of its JSON with sorted keys, without what is written after the decision
    (`git_action`, `commits`, the proposal's `reported_outcome` and `lesson`). ValueError if it is no record."""
    try:
        fields = msgspec.json.decode(data, type=dict)
        proposal = msgspec.convert(fields.get("proposal"), dict)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    fields["proposal"] = {name: proposal[name] for name in proposal if name not in ("reported_outcome", "lesson")}
    decided = {name: fields[name] for name in fields if name not in ("git_action", "commits")}
    return sha256(msgspec.json.encode(decided, order="sorted"))


def _of(file: str) -> bytes:
    return f'"file":"{file}",'.encode()


def _last(lines: Sequence[bytes], file: str) -> Line | None:
    name = _of(file)
    return next((line_of(line) for line in reversed(lines) if name in line), None)

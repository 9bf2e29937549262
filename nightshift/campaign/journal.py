"""`runs/chain.jsonl`: what was begun, decided, settled and certified here, each line with the hash of the one before.

A line enters files by name with a sha256: `0042/train.toml` when an experiment begins, `0042` when it is decided,
`0042 late` when its settlement or lesson is written, and looks, certificates and what a worker was given by their paths
in runs/. Of a record not its bytes are hashed but its JSON with sorted keys, without what comes late.
The head, the hash of the last line, stands for all of them. It proves nothing without a copy elsewhere (summaries,
certificates and commits have one): who can write a record can write a whole chain. verify.py compares.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nightshift.errors import EngineError
from nightshift.files import disk_error, read_file

CHAIN_NAME = "chain.jsonl"
HEAD_DIGITS = 12  # of a head where it is printed
_LATE = ("settled", "kept_commit")  # of a record: what a later start may still fill in
_LATE_OF_PROPOSAL = ("reported_outcome", "lesson")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. `before` is the sha256 of the line before, without its end; "" for the first. `index` counts from 1.

    `files`: sha256 by name. `witnessed`: entered by the process that wrote them, as it did.
    """

    index: int
    before: str
    files: dict[str, str]
    witnessed: bool = True


class Journal:
    """The chain of one ledger. Whoever enters something holds the ledger's lock."""

    def __init__(self, runs_dir: Path) -> None:
        self.path = runs_dir / CHAIN_NAME

    def lines(self) -> list[bytes]:
        """The whole lines; a last one without its end is what a kill left. OSError where no regular file lies there."""
        try:
            return read_file(self.path).split(b"\n")[:-1]
        except (FileNotFoundError, NotADirectoryError):
            return []

    @property
    def head(self) -> str:
        """The first digits of the last line's hash; "" where there is no chain, or none that can be read."""
        try:
            return "".join(sha256(line)[:HEAD_DIGITS] for line in self.lines()[-1:])
        except OSError:
            return ""

    def holds(self, name: str, digest: str) -> bool:
        """True if that is what the name was entered with last."""
        try:
            return _last(b"\n".join(self.lines()), name) == digest
        except OSError:
            return False

    def enter(self, files: Mapping[str, str], *, witnessed: bool = True) -> bool:
        """Add a line for those `files` that are not entered as they are; True if there were any.

        The line is on the disk when this returns. EngineError when the disk refuses, or the last line is no entry.
        """
        try:
            data = b"".join(line + b"\n" for line in self.lines())
            new = {name: digest for name, digest in files.items() if _last(data, name) != digest}
            if not new:
                return False
            last = data[:-1].rpartition(b"\n")[2]
            index, before = (entry_of(last).index + 1, sha256(last)) if last else (1, "")
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            with os.fdopen(os.open(self.path, flags, 0o644), "ab") as file:
                file.truncate(len(data))
                file.write(msgspec.json.encode(Entry(index, before, new, witnessed)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise disk_error(error, self.path) from None
        except ValueError as error:
            raise EngineError(f"{self.path} is damaged: {error}", "The next start sets it aside.") from None
        return True


def entry_of(line: bytes) -> Entry:
    """One line as an entry. ValueError where it is none."""
    try:
        return msgspec.json.decode(line, type=Entry)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def sha256(data: bytes) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def digests(number: int, record: bytes) -> dict[str, str]:
    """What is entered of a decided record, from the bytes of its record.json. ValueError where they are none."""
    try:
        fields = msgspec.json.decode(record, type=dict)
        late = {name: fields.pop(name, None) for name in _LATE}
        proposal = msgspec.convert(fields.pop("proposal", None), dict)
        late |= {name: proposal.pop(name, None) for name in _LATE_OF_PROPOSAL}
        parts = {f"{number:04d}": {**fields, "proposal": proposal}, f"{number:04d} late": late}
        return {name: sha256(msgspec.json.encode(part, order="sorted")) for name, part in parts.items()}
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _last(data: bytes, name: str) -> str:
    """The sha256 that a name was entered with last; "" if it never was."""
    _, found, after = data.rpartition(f'"{name}":"'.encode())
    return after[:64].decode(errors="replace") if found else ""

"""`runs/NNNN/` and results.tsv: all that is known of every experiment. A record is whole or absent."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from nightshift.campaign.controller import ControllerLock
from nightshift.campaign.git import CONFIG_NAME, Head
from nightshift.campaign.journal import Access, Event, Journal, record_sha256, sha256
from nightshift.campaign.metrics import PROGRESS_NAME
from nightshift.campaign.records import JOB_NAME, Progress, Record
from nightshift.campaign.results import columns, row
from nightshift.config.train_toml import Config, parse
from nightshift.errors import ConfigError, EngineError, UsageError
from nightshift.files import (
    disk_error,
    read_file,
    read_json,
    remove_tree,
    sweep_folder,
    sync_folder,
    write_atomically,
    write_json,
)

STARTED = "started"
RECORD_NAME, EFFECTIVE_NAME = "record.json", "config.json"
PLAN_NAME, RUN_NAME, COMPARISON_NAME = "plan.json", "run.json", "comparison.json"  # of a certificate
DIRECTION_NAME = "direction.txt"  # the user's direction of the last night
EVENTS: Mapping[str, Event] = {  # in the journal, by the name of the file that the line speaks of
    CONFIG_NAME: "begun",
    PLAN_NAME: "begun",
    JOB_NAME: "submitted",
    RUN_NAME: "measured",
    RECORD_NAME: "decided",
    COMPARISON_NAME: "certified",
    DIRECTION_NAME: "direction",
}
_RESERVING = ".reserving"  # a folder on its way to its number
_NUMBER = re.compile(r"[0-9]{4}|[1-9][0-9]{4,8}")
MAX_NUMBER = 999_999_999


class Ledger:
    """The records of one checkout. Takes paths; never reads the clock or git. Only the controller writes."""

    def __init__(self, root: Path, runs_dir: Path | None = None) -> None:
        """`root` is the checkout, `runs_dir` its records if they lie elsewhere; nothing is created but by a write."""
        self.runs_dir = runs_dir or root / "runs"
        self.tsv_path = root / "results.tsv"
        self.journal = Journal(self.runs_dir)
        self._controller = ControllerLock(self.runs_dir)
        # What campaign.fold has folded so far, by branch and rules hash: Campaign, which this module cannot import.
        self.folded: dict[tuple[str, str], Any] = {}
        # Reserved here, or closed and read once: what a process decides by does not change under it.
        self._known: dict[int, Record] = {}

    def run_dir(self, number: int) -> Path:
        return self.runs_dir / f"{number:04d}"

    def files_dir(self, record: Record) -> Path:
        """Folder with the files of a record's run: of another experiment if the record took over its result."""
        return self.run_dir(record.baseline or record.number)

    def controller(self) -> AbstractContextManager[None]:
        """Be the controller of this checkout. UsageError while another process is."""
        return self._controller.held()

    def is_running(self) -> bool:
        """Whether a controller works in this checkout. Writes nothing."""
        return self._controller.is_held()

    def require_in_place(self) -> None:
        """Raise UsageError if this process is the controller and somebody moved runs/ away."""
        self._controller.require_in_place()

    def numbers(self) -> list[int]:
        """Numbers of all experiments, in order. Links, and names that are not as `run_dir` writes them, are none."""
        return sorted(int(e.name) for e in self._numbered() if e.is_dir(follow_symlinks=False))

    def next_number(self) -> int:
        """The number that the next experiment gets: one that nothing in runs/ has."""
        last = max((int(entry.name) for entry in self._numbered()), default=0)
        if last >= MAX_NUMBER:
            raise UsageError(f"{self.run_dir(last)} leaves no number for another experiment", "Move it out of runs/.")
        return last + 1

    def num_decided(self) -> int:
        """The place of the last verdict in the order of decisions; 0 before the first."""
        return max((record.decided or 0 for record in self.records()), default=0)

    def _numbered(self) -> list[os.DirEntry[str]]:
        if not self.runs_dir.is_dir():
            return []
        with os.scandir(self.runs_dir) as entries:  # a path each is what takes time, and every reserve asks
            return [entry for entry in entries if _NUMBER.fullmatch(entry.name)]

    def reserve(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Give a `started` record the next number and a folder with `files`, which appears whole or not at all."""
        self.require_in_place()
        if self.tsv_path.is_dir():  # it would be found out when all is done
            raise disk_error(IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)), self.tsv_path)
        record = replace(record, number=self.next_number(), status=STARTED)
        if (new := record.run.new) is not None and not new.experiment:
            new = replace(new, experiment=record.number)
            record = replace(record, run=replace(record.run, new=new))
        self._known.pop(record.number, None)  # one of this number was moved out of runs/
        folder, partial = self.run_dir(record.number), self.runs_dir / _RESERVING
        try:
            remove_tree(partial)  # left by a kill
            partial.mkdir(parents=True)
            for name, data in files.items():
                write_atomically(partial / name, data)
            write_json(partial / RECORD_NAME, record)
            partial.rename(folder)
            sync_folder(self.runs_dir)
        except OSError as error:
            raise disk_error(error, folder) from None
        self.journal.add("begun", f"{folder.name}/{CONFIG_NAME}", sha256(files[CONFIG_NAME]))
        self._known[record.number] = record
        return record

    def write(self, record: Record) -> None:
        """Write record.json; then, if it is decided, its line of the journal. EngineError when the disk refuses."""
        self.require_in_place()
        data = write_json(self.run_dir(record.number) / RECORD_NAME, record)
        self._known.pop(record.number, None)
        if record.status != STARTED:
            self.journal.add("decided", f"{record.number:04d}/{RECORD_NAME}", record_sha256(data))

    def enter(self, path: Path, access: Access | None = None) -> None:
        """Add the line of a file in runs/ to the journal, as an access to the test split if one is given.

        OSError if the file cannot be read; EngineError when the disk refuses.
        """
        self.require_in_place()
        event: Event = "access" if access else EVENTS[path.name]
        self.journal.add(event, path.relative_to(self.runs_dir).as_posix(), sha256(read_file(path)), access=access)

    def holds(self, path: Path) -> bool:
        """True if the journal's last line about a file in runs/ has its hash; False if the file cannot be read."""
        line = self.journal.last(path.relative_to(self.runs_dir).as_posix())
        with suppress(OSError):
            return line is not None and line.sha256 == sha256(read_file(path))
        return False

    def close(self, record: Record) -> None:
        """Write the final record and its row, when no run of it is left. Raises EngineError when the disk refuses."""
        self.write(record)
        sweep_folder(self.run_dir(record.number), is_only_mine=True)
        self.sync_tsv()

    def records(self) -> list[Record]:
        """All records in order; a folder without one (power cut) is passed over. UsageError for a damaged one."""
        return [record for number in self.numbers() if (record := self.read(number)) is not None]

    def readable(self) -> tuple[list[Record], list[str]]:
        """As `records` for who only looks: all that can be read, and a line for each that is damaged."""
        records, damaged = [], []
        for number in self.numbers():
            try:
                records += [record] if (record := self.read(number)) else []
            except EarlierVersionError:
                raise
            except UsageError as error:
                damaged.append(error.cause)
        return records, damaged

    def record(self, number: int) -> Record:
        if not self.run_dir(number).is_symlink() and (record := self.read(number)) is not None:
            return record
        self.require_in_place()
        last = max(self.numbers(), default=0)
        raise EngineError(f"there is no record of experiment {number:04d}", f"The last one is {last:04d}.")

    def read(self, number: int) -> Record | None:
        """One record; None when it was never written. UsageError for a damaged one, or one of an earlier version."""
        if (known := self._known.get(number)) is not None:
            return known
        path = f"{self.runs_dir}/{number:04d}/{RECORD_NAME}"  # a Path would take as long as the reading
        try:
            record = _record(read_file(path), number)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            fix = f"Move {self.run_dir(number)} out of runs/ to go on without it."
            raise UsageError(f"{path} is damaged: {reason}", fix) from None
        if record.git_action is not None:  # decided and no more is not closed: another process's head settles it yet
            self._known[number] = record
        return record

    def sweep(self, in_flight: Collection[int] = ()) -> None:
        """Delete the temporary files of writers that were killed, but for those `in_flight`. Call as the controller."""
        self.require_in_place()
        sweep_folder(self.tsv_path.parent, (self.tsv_path.name, CONFIG_NAME))  # beside files of the person's
        sweep_folder(self.runs_dir)
        for number in [number for number in self.numbers() if number not in in_flight][-1:]:
            sweep_folder(self.run_dir(number), is_only_mine=True)

    def source(self, number: int) -> bytes:
        """The train.toml that experiment `number` submitted, byte for byte. UsageError if somebody took it away."""
        path = self.run_dir(number) / CONFIG_NAME
        try:
            return read_file(path)
        except OSError as error:
            fix = f"Put it back, or move {path.parent} out of runs/ to go on without it."
            raise UsageError(f"{path} cannot be read: {error.strerror}", fix) from None

    def stored_config(self, record: Record) -> Config:
        """The config that an experiment ran, from runs/. UsageError if what lies there is something else by now."""
        name = f"runs/{record.number:04d}/{CONFIG_NAME}"
        with suppress(ConfigError):  # its own fixes are for the train.toml that is edited
            config = parse(self.source(record.number), name)
            if config.hash == record.config_hash or not Head(record.branch, record.commit).is_campaign:
                return config
        commit = (record.kept_commit or record.commit or "HEAD")[:7]
        fix = f"Put it back: git show {commit}:{CONFIG_NAME} > {name}"
        raise UsageError(f"{name} is not what experiment {record.number:04d} ran", fix)

    def sync_tsv(self) -> None:
        """Make results.tsv say what runs/ says. A link in its place is replaced: nothing is written through it."""
        decided = [record for record in self.records() if record.status != STARTED]
        header = columns(decided)
        lines = ["\t".join(header), *(row(record, header) for record in decided)]
        try:
            write_atomically(self.tsv_path, ("\n".join(lines) + "\n").encode())
        except OSError as error:
            raise disk_error(error, self.tsv_path) from None


class EarlierVersionError(UsageError):
    """runs/ was written by an earlier version of Nightshift."""


class _Version(msgspec.Struct):
    version: Literal[1, 2]


_DECODER = msgspec.json.Decoder(Record)


def read_progress(run_dir: Path) -> Progress | None:
    try:
        return read_json(run_dir / PROGRESS_NAME, Progress, "")
    except UsageError:
        return None


def _record(text: bytes, number: int) -> Record:
    try:
        record = _DECODER.decode(text)
    except msgspec.ValidationError:
        with suppress(msgspec.ValidationError):
            release = f"0.{msgspec.json.decode(text, type=_Version).version}"
            cause = f"runs/ was written by Nightshift {release} (runs/{number:04d}/{RECORD_NAME})"
            raise EarlierVersionError(cause, f"Move it: mv runs runs-{release}") from None
        raise
    if record.number != number:
        raise ValueError(f"it is a copy of the record of experiment {record.number:04d}")
    started = datetime.fromisoformat(record.started)
    if started.tzinfo is None or not 2000 <= started.year < 9000:
        raise ValueError(f"it started at {record.started!r}, in no time zone, or not in our time")
    return record

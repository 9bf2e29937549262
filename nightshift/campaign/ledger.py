"""The ledger of a checkout: the folder runs/ and results.tsv. Only the controller writes, with the lock `runs/.lock`,
which the kernel releases when the controller dies; `runs/.controller` describes the controller.

`runs/NNNN/`: an experiment. `runs/journal.jsonl`: an append-only log of events. `runs/proposals.jsonl`: the cost of
each proposal that a night asked for, refused or not; a cost that was not reported is None, not 0."""

import fcntl
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout
from msgspec.structs import replace

from nightshift.campaign.git import CONFIG_NAME
from nightshift.campaign.metrics import PROGRESS_NAME
from nightshift.campaign.records import (
    CERTIFY_NAME,
    COMPARISON_NAME,
    NOTHING,
    PLAN_NAME,
    Comparison,
    Cost,
    Plan,
    Progress,
    Record,
)
from nightshift.campaign.results import results_tsv
from nightshift.config.train_toml import Config, parse
from nightshift.errors import ConfigError, EngineError, UsageError
from nightshift.files import (
    disk_error,
    open_regular,
    read_file,
    read_json,
    read_rows,
    sweep_folder,
    sync_folder,
    whole_folder,
    write_atomically,
    write_json,
)
from nightshift.text import clean, local

STARTED = "started"
RECORD_NAME = "record.json"
HOLDER_NAME, LOCK_NAME, JOURNAL_NAME = ".controller", ".lock", "journal.jsonl"
PROPOSALS_NAME = "proposals.jsonl"
_NUMBER = re.compile(r"[0-9]{4}|[1-9][0-9]{4,8}")
_PATIENCE_SECONDS = 1.0  # `is_running` locks the file for an instant, for example in `nightshift status`

_locked: dict[Path, os.stat_result] = {}  # the lock files that this process has locked


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the journal: a job that starts. `number`, `branch`, `rules_hash`: the comparison of an access."""

    time: str  # ISO 8601, UTC
    event: str  # submitted or access
    file: str  # a path below runs/
    number: int = 0
    branch: str = ""
    rules_hash: str = ""


class Ledger:
    """The records of one checkout. Never reads git."""

    def __init__(self, root: Path) -> None:
        """`root`: the checkout. Nothing is created before a write."""
        self.root, self.runs_dir, self.tsv_path = root, root / "runs", root / "results.tsv"
        self._closed: dict[int, Record] = {}  # no other process changes them

    def run_dir(self, number: int) -> Path:
        return self.runs_dir / f"{number:04d}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make this process the controller of the checkout. UsageError if there is another controller."""
        path, holder_path = self.runs_dir.absolute() / LOCK_NAME, self.runs_dir / HOLDER_NAME
        lock = FileLock(path, timeout=_PATIENCE_SECONDS, fallback_to_soft=False)
        try:
            self.runs_dir.mkdir(exist_ok=True)
            hold = lock.acquire()
            _locked[path] = path.stat()
        except Timeout:
            holder = self.holder
            cause = f"another command is running in this checkout{f': {holder}' if holder else ''}"
            fix = "Wait for it (uv run nightshift wait), or use another clone of the repository."
            stop = "To stop a night, create the file STOP here, then run: uv run nightshift wait --night."
            raise UsageError(cause, f"{fix} {stop}") from None
        except OSError as error:
            raise disk_error(error, path) from None
        with hold:
            try:
                command = clean(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), 200)
                since = local(datetime.now(UTC))
                write_json(holder_path, f"process {os.getpid()} on {socket.gethostname()} ({command}), since {since}")
                yield
            finally:
                del _locked[path]
                holder_path.unlink(missing_ok=True)  # the command may contain secrets, for example in --notify

    @property
    def holder(self) -> str:
        """The controller, or the last controller if it was killed, in words; empty if this is not known."""
        with suppress(UsageError):
            return read_json(self.runs_dir / HOLDER_NAME, str, "Delete it.") or ""
        return ""

    def is_running(self) -> bool:
        """Return whether a controller works in this checkout. Writes nothing."""
        try:
            with open_regular(self.runs_dir / LOCK_NAME) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def require_in_place(self) -> None:
        """Raise UsageError if this process is the controller and runs/ was moved away."""
        path = self.runs_dir.absolute() / LOCK_NAME
        with suppress(OSError):
            if path not in _locked or os.path.samestat(_locked[path], path.stat()):
                return
        cause = f"{path.parent} or its {path.name} was moved away or replaced while this process worked in it"
        raise UsageError(cause, "Put the folder back, then repeat the command.")

    def numbers(self) -> list[int]:
        """Return the numbers of all experiments in order. Links are ignored."""
        if not self.runs_dir.is_dir():
            return []
        with os.scandir(self.runs_dir) as entries:  # much faster than a Path for each entry
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name))

    def next_number(self, last_committed: int = 0) -> int:
        """Return the next experiment's number: above every number in runs/, and above `last_committed`."""
        names = [path.name for path in self.runs_dir.glob("*")]  # with links
        return 1 + max([last_committed, *(int(name) for name in names if _NUMBER.fullmatch(name))])

    def num_decided(self) -> int:
        """Return the position of the last verdict in the order of decisions; 0 before the first."""
        return max((record.place for record in self.records()), default=0)

    def reserve(self, record: Record, source: bytes, last_committed: int = 0) -> Record:
        """Give a record the next number, above `last_committed`, and atomically create its folder. `source`: the
        content of its train.toml."""
        self.require_in_place()
        record = replace(record, number=self.next_number(last_committed))
        if (new := record.run.new) and not new.experiment:
            record = replace(record, run=replace(record.run, new=replace(new, experiment=record.number)))
        with whole_folder(self.run_dir(record.number)) as partial:
            write_atomically(partial / CONFIG_NAME, source)
            write_json(partial / RECORD_NAME, record)
        sync_folder(self.runs_dir)
        return record

    def write(self, record: Record) -> None:
        """Write record.json. EngineError if the disk refuses."""
        self.require_in_place()
        write_json(self.run_dir(record.number) / RECORD_NAME, record)
        self._closed.pop(record.number, None)

    def log(self, path: Path, **access: Any) -> None:
        """Add the start of a job to the journal. `access`: the comparison, if the job reads the test split. EngineError
        if the disk refuses."""
        self.require_in_place()
        event, time = "access" if access else "submitted", datetime.now(UTC).isoformat(timespec="seconds")
        file = path.relative_to(self.runs_dir).as_posix()
        append(self.runs_dir / JOURNAL_NAME, Line(time=time, event=event, file=file, **access))

    def journal(self) -> list[Line]:
        """Return the lines of the journal that can be read."""
        return read_rows(self.runs_dir / JOURNAL_NAME, Line)

    def accesses(self) -> list[Line]:
        """Return the uses of the test split in order, one for each job."""
        return [line for line in self.journal() if line.event == "access"]

    def close(self, record: Record) -> None:
        """Write the final record and results.tsv after the run has ended. EngineError if the disk refuses."""
        self.write(record)
        sweep_folder(self.run_dir(record.number), is_only_mine=True)
        self.sync_tsv()

    def records(self) -> list[Record]:
        """Return all records in order. UsageError for a damaged record. A folder without a record is skipped."""
        return [*filter(None, map(self.read, self.numbers()))]

    def readable(self) -> tuple[list[Record], list[str]]:
        """Return the records that can be read, and a line for each damaged record. For read-only commands."""
        records, damaged = list[Record](), list[str]()
        for number in self.numbers():
            try:
                records += filter(None, [self.read(number)])
            except UsageError as error:
                damaged.append(error.cause)
        return records, damaged

    def record(self, number: int) -> Record:
        """Return the record of an experiment. EngineError if there is no record."""
        if (record := self.read(number)) is None:
            last = max(self.numbers(), default=0)
            raise EngineError(f"there is no record of experiment {number:04d}", f"The last one is {last:04d}.")
        return record

    def read(self, number: int) -> Record | None:
        """Return a record; None if there is no record. UsageError if it is damaged, EngineError for another version."""
        if number in self._closed:
            return self._closed[number]
        folder = f"{self.runs_dir}/{number:04d}"  # creating a Path would cost as much time as reading the file
        path, fix = f"{folder}/{RECORD_NAME}", f"Move {folder} out of runs/ to continue without this experiment."
        try:
            record = read_json(path, Record, fix)
        except UsageError as error:
            if error.cause.endswith("`$.version`"):
                cause = f"runs/{number:04d}/{RECORD_NAME} is of another version of Nightshift"
                raise EngineError(cause, "Move the folder: mv runs runs-old") from None
            raise
        if record is not None and record.git_action is not None:
            self._closed[number] = record
        return record

    def sweep(self) -> None:
        """Delete temporary files of killed processes. Needs the lock."""
        self.require_in_place()
        sweep_folder(self.root, (self.tsv_path.name, CONFIG_NAME))  # the checkout also contains the user's files
        sweep_folder(self.runs_dir)

    def source(self, number: int) -> bytes:
        """Return the train.toml that experiment `number` submitted. UsageError if the file cannot be read."""
        path = self.run_dir(number) / CONFIG_NAME
        try:
            return read_file(path)
        except OSError as error:
            fix = f"Restore the file, or move {path.parent} out of runs/ to continue without this experiment."
            raise UsageError(f"{path} cannot be read: {error.strerror}", fix) from None

    def stored_config(self, record: Record) -> Config:
        """Return the config that an experiment ran, from runs/. UsageError if the file was changed."""
        name = f"runs/{record.number:04d}/{CONFIG_NAME}"
        with suppress(ConfigError):  # the remedies in this error are for the train.toml at the top
            config = parse(self.source(record.number), name)
            if config.hash == record.config_hash:
                return config
        fix = f"Restore it: git show {record.kept_commit or record.commit}:{CONFIG_NAME} > {name}"
        raise UsageError(f"{name} is not the config that experiment {record.number:04d} ran", fix)

    def comparisons(self) -> list[Comparison]:
        """Return the finished comparisons of `nightshift certify`, by number. UsageError for a damaged file."""
        return self._certificates(COMPARISON_NAME, Comparison)

    def plans(self) -> list[Plan]:
        """Return the plans of all comparisons, by number. UsageError for a damaged file."""
        return self._certificates(PLAN_NAME, Plan)

    def _certificates(self, name: str, kind: Any) -> list[Any]:
        paths = sorted(self.runs_dir.glob(f"{CERTIFY_NAME}/*/{name}"))
        return [*filter(None, (read_json(path, kind, f"Delete it: rm -r {path.parent}") for path in paths))]

    def sync_tsv(self) -> None:
        """Write results.tsv from runs/. A link in its place is replaced, not followed."""
        try:
            mode = self.runs_dir.stat().st_mode & 0o666  # the permissions of runs/
            write_atomically(self.tsv_path, results_tsv(self.records()).encode(), mode=mode)
        except OSError as error:
            raise disk_error(error, self.tsv_path) from None


def append(path: Path, value: msgspec.Struct) -> None:
    """Add a line to a file of JSON lines, and sync it to the disk. EngineError if the disk refuses."""
    try:
        with open_regular(path, "a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # remove a line that a kill cut
            file.write(msgspec.json.encode(value) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path) from None


def read_progress(run_dir: Path) -> Progress | None:
    """Return the progress of a run; None if it reported none."""
    with suppress(UsageError):
        return read_json(run_dir / PROGRESS_NAME, Progress, "")
    return None


def baseline_of(records: Sequence[Record], branch: str) -> Record | None:
    """Return the first kept experiment of a branch, which determines the campaign's engine, rules and hardware."""
    return next((r for r in records if r.branch == branch and r.is_keep), None)


class ProposalCost(msgspec.Struct, frozen=True):
    """A line of proposals.jsonl."""

    branch: str
    rules_hash: str
    night: str  # when the night started
    cost: Cost


def proposals_cost(runs_dir: Path, branch: str, rules_hash: str, night: str | None = None) -> Cost:
    """Return the cost of the proposals of one campaign, or of one of its nights. Damaged lines are ignored."""
    lines = read_rows(runs_dir / PROPOSALS_NAME, ProposalCost)
    ours = [line for line in lines if (line.branch, line.rules_hash) == (branch, rules_hash)]
    return sum((line.cost for line in ours if night in (None, line.night)), NOTHING)


def runs_cost(records: Iterable[Record]) -> Cost:
    """Return the cost of the runs that these experiments made."""
    runs = [(record.result.total_seconds, gpus_of(record.hardware)) for record in records if record.result]
    costs = (Cost(num_proposals=0, run_seconds=s, gpu_seconds=None if gpus is None else s * gpus) for s, gpus in runs)
    return sum(costs, NOTHING)


def campaign_cost(runs_dir: Path, records: Sequence[Record]) -> Cost:
    """Return the cost of these experiments and of all proposals of their campaigns."""
    campaigns = {record.campaign for record in records}
    return sum((proposals_cost(runs_dir, *campaign) for campaign in campaigns), runs_cost(records))


def gpus_of(hardware: str) -> int | None:
    """Return the number of GPUs in a hardware text: 2 for `2 x NVIDIA H100 80GB HBM3, ...` or `A + B`; else None."""
    if match := re.match(r"(\d{1,3}) x ", hardware):
        return int(match[1])
    return hardware.count(" + ") + 1 if " + " in hardware else None

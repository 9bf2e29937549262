"""`runs/NNNN/` and results.tsv: all that is known of every experiment, and the only memory there is.

Records are written to a temporary file, synced and renamed, so a record is whole or absent.
results.tsv is a view: rebuilt from the records whenever the two disagree.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nightshift.campaign.lineage import incumbent_number
from nightshift.campaign.results import COLUMNS, row
from nightshift.errors import EngineError, NightshiftError, UsageError
from nightshift.files import sweep_folder, sync_folder, write_atomically
from nightshift.records import Evaluation, Failure, Judgement, Outcome, Record, Run, Side, Training, Verdict, Weights

RECORD_VERSION = 1
STARTED = "started"
RECORD_NAME = "record.json"
WEIGHTS_NAME, MODEL_NAME = "weights", "model"  # of a run, as its engine left them; of a kept experiment
_RESERVING = ".reserving"  # a folder on its way to its number
MODELS_GB = 20.0  # in 1e9 bytes: about twenty models of 0.5B parameters


class Ledger:
    """The records of one checkout. Takes paths; never reads the clock or git."""

    def __init__(self, root: Path) -> None:
        """`root` is the checkout; nothing is created before something is written."""
        self.runs_dir = root / "runs"
        self.tsv_path = root / "results.tsv"
        self._known: dict[int, tuple[tuple[int, int, int], Record]] = {}  # what was read of which file

    @classmethod
    def recorded(cls, runs_dir: Path) -> Ledger:
        """The ledger of a folder of records that lies in no checkout, whatever its name: to read from."""
        ledger = cls(runs_dir.parent)
        ledger.runs_dir = runs_dir
        return ledger

    def run_dir(self, number: int) -> Path:
        """Folder of one experiment."""
        return self.runs_dir / f"{number:04d}"

    @contextlib.contextmanager
    def lock(self, timeout_seconds: float = 1.0) -> Iterator[None]:
        """One experiment at a time in a checkout. Raises UsageError while another holds it.

        The kernel drops the lock when its holder dies, however it dies. The second of patience
        outlasts `is_locked` of a `nightshift status` beside it.
        """
        try:
            self.runs_dir.mkdir(exist_ok=True)
        except OSError as error:
            raise _disk_error(error, self.runs_dir) from None
        path = self.runs_dir / ".lock"
        lock = FileLock(path, timeout=timeout_seconds)
        try:
            lock.acquire()
        except Timeout:
            raise UsageError(
                "another experiment is running in this checkout",
                "Wait for it (uv run nightshift wait), or use one clone each.",
            ) from None
        except OSError as error:
            raise _disk_error(error, path) from None
        try:
            yield
        finally:
            lock.release()

    def is_locked(self) -> bool:
        """True while an experiment runs in this checkout."""
        if not self.runs_dir.is_dir():
            return False
        try:
            with self.lock(timeout_seconds=0):
                return False
        except UsageError:
            return True

    def numbers(self) -> list[int]:
        """Numbers of all experiments, in order."""
        return sorted(int(entry.name) for entry in self._numbered() if entry.is_dir())

    def next_number(self) -> int:
        """The number that the next experiment gets: one that nothing in runs/ has."""
        return max((int(entry.name) for entry in self._numbered()), default=0) + 1

    def _numbered(self) -> list[os.DirEntry[str]]:
        if not self.runs_dir.is_dir():
            return []
        return [entry for entry in os.scandir(self.runs_dir) if re.fullmatch(r"\d{4,}", entry.name)]

    def reserve(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Give the record the next number and its folder, with status `started`, and store `files` beside it.

        The folder appears with all of them or not at all.
        """
        record = replace(record, number=self.next_number(), status=STARTED)
        folder, partial = self.run_dir(record.number), self.runs_dir / _RESERVING
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by a kill
            partial.mkdir(parents=True)
            for name, data in {**files, RECORD_NAME: _text(record)}.items():
                write_atomically(partial / name, data)
            partial.rename(folder)
            sync_folder(self.runs_dir)
        except OSError as error:
            raise _disk_error(error, folder) from None
        return record

    def write(self, record: Record) -> None:
        """Write record.json: whole or not at all. Raises EngineError when the disk refuses."""
        path = self.run_dir(record.number) / RECORD_NAME
        try:
            write_atomically(path, _text(record))
        except OSError as error:
            raise _disk_error(error, path) from None

    def close(self, record: Record) -> None:
        """Write the final record and its row. Raises EngineError when the disk refuses."""
        self.write(record)
        self.sync_tsv(record)

    def keep_model(self, record: Record, max_gb: float = MODELS_GB) -> None:
        """Leave of a kept experiment one model folder, `runs/NNNN/model`, and of any other no weights at all.

        A model is a gigabyte on a GPU. Beyond `max_gb` (1e9 bytes) of models in runs/, the oldest are deleted,
        but never the baseline's, the incumbent's, or this one. Raises EngineError when the disk refuses.

        Comes before `close`: what a kill leaves undone is done again only for a record that is not closed.
        """
        try:
            self._keep_model(record, max_gb)
        except OSError as error:
            raise _disk_error(error, self.run_dir(record.number)) from None

    def _keep_model(self, record: Record, max_gb: float) -> None:
        folder = self.run_dir(record.number)
        evaluated = [run for run in record.runs if run.evaluation is not None and run.side is Side.CANDIDATE]
        if record.status == Verdict.KEEP and evaluated:
            weights = folder / f"run-{evaluated[0].index}" / WEIGHTS_NAME
            with contextlib.suppress(FileNotFoundError):  # moved already: this is the second try after a power cut
                weights.rename(folder / MODEL_NAME)
        for name in (WEIGHTS_NAME, f"{WEIGHTS_NAME}.partial", f".{WEIGHTS_NAME}.partial"):  # a kill leaves partial ones
            for path in folder.glob(f"run-*/{name}"):
                _remove(path)
        models = sorted(path for path in self.runs_dir.glob(f"*/{MODEL_NAME}") if path.is_dir())
        sizes = {model: sum(file.stat().st_size for file in model.iterdir()) for model in models}
        if sum(sizes.values()) <= max_gb * 1e9:
            return
        mine = (record.branch, record.rules_hash)
        ours = [r for r in self.records() if (r.branch, r.rules_hash) == mine and r.number != record.number]
        incumbent = self.run_dir(incumbent_number([*ours, record]) or record.number)
        for model in models[1:-1]:
            if sum(sizes.values()) <= max_gb * 1e9:
                break
            if model.parent == incumbent:
                continue
            shutil.rmtree(model, ignore_errors=True)
            del sizes[model]

    def records(self) -> list[Record]:
        """All readable records in order. A folder without one (power cut in `reserve`) is passed over."""
        return [record for number in self.numbers() if (record := self.read(number)) is not None]

    def read(self, number: int) -> Record | None:
        """One record; None when it was never written. Raises UsageError when its text is damaged."""
        path = self.run_dir(number) / RECORD_NAME
        try:
            status = path.stat()
            version = status.st_ino, status.st_mtime_ns, status.st_size
            known = self._known.get(number)
            if known is None or known[0] != version:  # every start asks several times for all of them
                known = self._known[number] = version, _record(json.loads(path.read_bytes()))
            return known[1]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} is damaged: {error}", f"Move {path.parent} out of runs/ to go on without it."
            ) from None

    def close_interrupted(self) -> list[Record]:
        """Close records whose process is gone (call with the lock held): crash, interrupted."""
        closed = []
        for record in self.records():
            if record.status == STARTED:
                judgement = Judgement(Verdict.CRASH, "interrupted: the process ended before its verdict")
                record = replace(record, status="crash", failure=Failure.INTERRUPTED, judgement=judgement)
                self.keep_model(record)
                self.close(record)
                closed.append(record)
        return closed

    def sweep(self) -> None:
        """Delete the temporary files of writers that were killed (call with the lock held)."""
        sweep_folder(self.tsv_path.parent, (self.tsv_path.name, "train.toml"))  # beside files of the person's
        for folder in (self.runs_dir, *(self.run_dir(number) for number in self.numbers()[-1:])):
            sweep_folder(folder)

    def source(self, number: int) -> bytes:
        """The train.toml that experiment `number` submitted, byte for byte. UsageError if somebody took it away."""
        path = self.run_dir(number) / "train.toml"
        try:
            return path.read_bytes()
        except OSError as error:
            raise UsageError(
                f"{path} cannot be read: {error.strerror}",
                f"Put it back, or move {path.parent} out of runs/ to go on without it.",
            ) from None

    def sync_tsv(self, last: Record | None = None) -> bool:
        """Make results.tsv say what runs/ says: append `last` if that is all it lacks, else rebuild it.

        A link in its place is replaced: nothing is written through it. Returns whether anything was written.
        """
        try:
            status = self.tsv_path.lstat() if os.path.lexists(self.tsv_path) else None
            is_own = status is not None and stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if last is not None and is_own and self._tsv_runs() == [n for n in self.numbers() if n != last.number]:
                with self.tsv_path.open("ab") as file:
                    file.write((row(last) + "\n").encode())
                    file.flush()
                    os.fsync(file.fileno())
                return True
            lines = ["\t".join(COLUMNS), *(row(record) for record in self.records() if record.status != STARTED)]
            data = ("\n".join(lines) + "\n").encode()
            if is_own and self.tsv_path.read_bytes() == data:
                return False
            write_atomically(self.tsv_path, data)
        except OSError as error:
            raise _disk_error(error, self.tsv_path) from None
        return True

    def _tsv_runs(self) -> list[int] | None:
        """Experiment numbers in results.tsv; None when it is absent, torn or of another format."""
        try:
            lines = self.tsv_path.read_text(encoding="utf-8").split("\n")
            column = COLUMNS.index("run")
            if lines[0] != "\t".join(COLUMNS) or lines[-1] != "":
                return None
            return [int(line.split("\t")[column]) for line in lines[1:-1]]
        except (OSError, ValueError, IndexError):
            return None


def read_progress(run_dir: Path) -> str | None:
    """The last live line of an experiment in flight; None before the first."""
    try:
        return str(json.loads((run_dir / "progress.json").read_bytes())["line"])
    except (OSError, ValueError, KeyError):
        return None


def duration_seconds(started: str, now: datetime) -> float:
    """Seconds from a record's `started` to `now` (aware)."""
    return (now - datetime.fromisoformat(started)).total_seconds()


def _remove(path: Path) -> None:
    """A folder, or whatever lies in its place: rmtree refuses links."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _disk_error(error: OSError, path: Path) -> NightshiftError:
    return EngineError(f"cannot write {path}: {error.strerror or error}", "Free disk space or fix its permissions.")


def _text(record: Record) -> bytes:
    return json.dumps({"version": RECORD_VERSION, **asdict(record)}, allow_nan=False).encode() + b"\n"


def _record(data: dict[str, Any]) -> Record:
    version = data.pop("version")
    if version != RECORD_VERSION:
        raise ValueError(f"record version {version}, this Nightshift reads {RECORD_VERSION}")
    judgement = data.pop("judgement")
    return Record(
        **{
            **data,
            "diff": tuple(data["diff"]),
            "unused_keys": tuple(data["unused_keys"]),
            "notes": tuple(data.get("notes", ())),
            "failure": data["failure"] and Failure(data["failure"]),
            "runs": tuple(_run(run) for run in data["runs"]),
            "judgement": judgement and Judgement(**{**judgement, "verdict": Verdict(judgement["verdict"])}),
        }
    )


def _run(data: dict[str, Any]) -> Run:
    training = dict(data["training"])
    training["outcome"] = Outcome(training["outcome"])
    training["failure"] = training["failure"] and Failure(training["failure"])
    evaluation = data["evaluation"]
    if evaluation is not None:
        evaluation = Evaluation(
            **{**evaluation, "scores": tuple(evaluation["scores"]), "weights": Weights(**evaluation["weights"])}
        )
    return Run(**{**data, "side": Side(data["side"]), "training": Training(**training), "evaluation": evaluation})

"""`runs/NNNN/` and results.tsv: all that is known of every experiment, and the only memory there is.

Records are written to a temporary file, synced and renamed, so a record is whole or absent.
results.tsv is a view of them: written anew whenever one is closed, and by every start.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from nightshift.campaign.version_1 import from_version_1
from nightshift.errors import ConfigError, EngineError, UsageError
from nightshift.files import disk_error, read_file, read_json, sweep_folder, sync_folder, write_atomically, write_json
from nightshift.git.repo import CONFIG_NAME, Head
from nightshift.metrics import PROGRESS_NAME
from nightshift.records import ATTEMPT, Progress, Record, Result
from nightshift.train_toml.config import Config, parse

STARTED = "started"
RECORD_NAME = "record.json"
_RESERVING = ".reserving"  # a folder on its way to its number
_WRITE_SECONDS = 30.0  # writers hold the lock for milliseconds

# The first five are those that readers of the format know; then ours.
COLUMNS = (
    *("commit", "eval_score", "memory_gb", "status", "description"),
    *("run", "parent", "eval_stderr", "delta", "p_better", "num_runs", "num_steps", "reward_mean"),
    *("training_seconds", "total_seconds", "engine", "rules", "started"),
)


class Ledger:
    """The records of one checkout. Takes paths; never reads the clock or git."""

    def __init__(self, root: Path, runs_dir: Path | None = None) -> None:
        """`root` is the checkout, `runs_dir` its records if they lie elsewhere; nothing is created but by a write."""
        self.runs_dir = runs_dir or root / "runs"
        self.tsv_path = root / "results.tsv"
        self._known: dict[int, tuple[tuple[int, int, int], Record]] = {}  # what was read of which file

    def run_dir(self, number: int, index: int | None = None) -> Path:
        """Folder of one experiment, or of its `index`-th run, from 1."""
        folder = self.runs_dir / f"{number:04d}"
        return folder if index is None else folder / f"run-{index}"

    def attempt_dir(self, number: int, index: int, result: Result) -> Path:
        """Where the files of a run lie: metrics, answers, weights, logs."""
        folder = self.run_dir(number, index)
        return folder if result.attempt is None else folder / f"attempt-{result.attempt}"

    def head(self) -> AbstractContextManager[None]:
        """Be the one process of this checkout that works, for as long as it does. UsageError while another is.

        The kernel drops the lock when its holder dies, however it dies. The second of patience outlasts
        `is_running` of a `nightshift status` beside it.
        """
        fix = "Wait for it (uv run nightshift wait), or use one clone each."
        return self._locked(".head", 1.0, "another experiment is running in this checkout", fix)

    def is_running(self) -> bool:
        """True while an experiment, a night or a certificate is at work in this checkout."""
        if not self.runs_dir.is_dir():
            return False
        try:
            with self._locked(".head", 0, "", ""):
                return False
        except UsageError:
            return True

    def lock(self) -> AbstractContextManager[None]:
        """Write to runs/ and results.tsv, and to nothing else meanwhile: held for milliseconds."""
        cause = f"{self.runs_dir / '.lock'} is held by a process that hangs"
        return self._locked(".lock", _WRITE_SECONDS, cause, "End it, then repeat.")

    @contextmanager
    def _locked(self, name: str, timeout_seconds: float, cause: str, fix: str) -> Iterator[None]:
        path = self.runs_dir / name
        lock = FileLock(path, timeout=timeout_seconds)
        try:
            self.runs_dir.mkdir(exist_ok=True)
            lock.acquire()
        except Timeout:
            raise UsageError(cause, fix) from None
        except OSError as error:
            raise disk_error(error, path) from None
        try:
            yield
        finally:
            lock.release()

    def numbers(self) -> list[int]:
        """Numbers of all experiments, in order."""
        return sorted(int(name) for name in self._numbered() if (self.runs_dir / name).is_dir())

    def next_number(self) -> int:
        """The number that the next experiment gets: one that nothing in runs/ has."""
        return max(map(int, self._numbered()), default=0) + 1

    def next_decided(self) -> int:
        """The place of the next verdict in the order of decisions."""
        return max((record.decided or 0 for record in self.records()), default=0) + 1

    def _numbered(self) -> list[str]:
        if not self.runs_dir.is_dir():
            return []
        with os.scandir(self.runs_dir) as entries:  # a path each is what takes time, and every reserve asks
            return [entry.name for entry in entries if re.fullmatch(r"[0-9]{4,}", entry.name)]

    def reserve(self, record: Record, files: Mapping[str, bytes]) -> Record:
        """Give the record the next number and its folder, with status `started`, and store `files` beside it.

        The folder appears with all of them or not at all.
        """
        record = replace(record, number=self.next_number(), status=STARTED)
        folder, partial = self.run_dir(record.number), self.runs_dir / _RESERVING
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by a kill
            partial.mkdir(parents=True)
            for name, data in files.items():
                write_atomically(partial / name, data)
            write_json(partial / RECORD_NAME, record)
            partial.rename(folder)
            sync_folder(self.runs_dir)
        except OSError as error:
            raise disk_error(error, folder) from None
        return record

    def write(self, record: Record) -> None:
        """Write record.json: whole or not at all. Raises EngineError when the disk refuses."""
        write_json(self.run_dir(record.number) / RECORD_NAME, record)

    def close(self, record: Record) -> None:
        """Write the final record and its row. Raises EngineError when the disk refuses."""
        self.write(record)
        self.sync_tsv()

    def records(self) -> list[Record]:
        """All readable records in order. A folder without one (power cut in `reserve`) is passed over."""
        return [record for number in self.numbers() if (record := self.read(number)) is not None]

    def record(self, number: int) -> Record:
        """One record. EngineError when there is none."""
        record = self.read(number)
        if record is None:
            last = max(self.numbers(), default=0)
            raise EngineError(f"there is no record of experiment {number:04d}", f"The last one is {last:04d}.")
        return record

    def read(self, number: int) -> Record | None:
        """One record; None when it was never written. Raises UsageError when its text is damaged."""
        path = self.run_dir(number) / RECORD_NAME
        try:
            status = path.lstat()
            version = status.st_ino, status.st_mtime_ns, status.st_size
            known = self._known.get(number)
            if known is None or known[0] != version:  # every start asks several times for all of them
                known = version, _record(read_file(path))
                if known[1].number != number:
                    raise ValueError(f"it is a copy of the record of experiment {known[1].number:04d}")
                self._known[number] = known
            return known[1]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            fix = f"Move {path.parent} out of runs/ to go on without it."
            raise UsageError(f"{path} is damaged: {reason}", fix) from None

    def sweep(self) -> None:
        """Delete the temporary files of writers that were killed (call as the head)."""
        sweep_folder(self.tsv_path.parent, (self.tsv_path.name, CONFIG_NAME))  # beside files of the person's
        sweep_folder(self.runs_dir)
        for number in self.numbers()[-1:]:
            for folder in self.run_dir(number).glob("**/"):  # its own, and those of its runs and their attempts
                sweep_folder(folder, is_only_mine=True)

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
        try:
            config = parse(self.source(record.number), name)
            is_it = config.hash == record.config_hash or not Head(record.branch, record.commit).is_campaign
        except ConfigError:  # its own fixes are for the train.toml that is edited
            is_it = False
        if not is_it:
            commit = (record.kept_commit or record.commit or "HEAD")[:7]
            fix = f"Put it back: git show {commit}:{CONFIG_NAME} > {name}"
            raise UsageError(f"{name} is not what experiment {record.number:04d} ran", fix)
        return config

    def sync_tsv(self) -> None:
        """Make results.tsv say what runs/ says. A link in its place is replaced: nothing is written through it."""
        lines = ["\t".join(COLUMNS), *(row(record) for record in self.records() if record.status != STARTED)]
        try:
            write_atomically(self.tsv_path, ("\n".join(lines) + "\n").encode())
        except OSError as error:
            raise disk_error(error, self.tsv_path) from None


def read_progress(run_dir: Path) -> Progress | None:
    """The last reading of a run; None before the first."""
    try:
        return read_json(run_dir / ATTEMPT / PROGRESS_NAME, Progress, "")
    except UsageError:
        return None


def _record(text: bytes) -> Record:
    data = msgspec.json.decode(text)
    return msgspec.convert(from_version_1(data) if data["version"] == 1 else data, Record)


def figures(record: Record) -> dict[str, Any]:
    """What one experiment came to, by the names of results.tsv and of the summary; None is "not measured".

    Scores, steps and rewards are means over the runs of a baseline; seconds and memory cover all of them. The
    standard error treats runs as independent given the examples: sqrt(mean of squares / runs).
    """
    judgement, squares = record.judgement, [e.eval_stderr**2 for e in record.evaluations]
    return {
        "commit": record.kept_commit and record.kept_commit[:7],
        "eval_score": record.score,
        "memory_gb": _of_known(max, (r.training.peak_memory_gb for r in record.runs)),
        "status": record.status,
        "description": record.description,
        "run": f"{record.number:04d}",
        "parent": f"{record.parent:04d}" if record.parent is not None else None,
        "eval_stderr": math.sqrt(fmean(squares) / len(squares)) if squares else None,
        "incumbent_score": judgement.incumbent_score if judgement else None,
        "delta": judgement.delta if judgement else None,
        "p_better": judgement.p_better if judgement else None,
        "why": judgement.why if judgement else None,
        "num_runs": len(record.runs),
        "num_steps": _of_known(fmean, (r.training.num_steps for r in record.runs)),
        "reward_mean": _of_known(fmean, (r.training.reward_mean for r in record.runs)),
        "training_seconds": _of_known(sum, (r.training.training_seconds for r in record.runs)),
        "total_seconds": record.total_seconds,
        "engine": record.engine,
        "rules": record.rules_hash,
        "started": record.started,
    }


def row(record: Record) -> str:
    """One line of results.tsv; an empty cell is "not measured"."""
    cells = figures(record)
    return "\t".join(_cell(cells[column]) for column in COLUMNS)


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _of_known(combine: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return combine(known) if known else None

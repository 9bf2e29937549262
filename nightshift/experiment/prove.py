"""proof.json: what was shown to work on this machine's GPUs, and `prepare.py --prove`, which shows what is missing.

prepare.py, its smoke run and ordinary runs write their rows. A row has the measured figure or the line that failed, and
holds for one engine, hardware, driver and code. The file has no path, user name, host name or secret.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path

import psutil
from msgspec import Struct

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger, baseline_of
from nightshift.campaign.records import Record
from nightshift.config.rules import RULES_NAME, covered_files
from nightshift.config.train_toml import load, set_values
from nightshift.engines.base import ENGINES, NO_GPU, Engine, Note, PrepareFlags
from nightshift.errors import EngineError, ExitCode, Failure, NightshiftError, UsageError
from nightshift.executors.gpus import gpu_problems
from nightshift.executors.process import Child, ProcessGroup, tail
from nightshift.executors.watchdog import describe, is_alive
from nightshift.experiment.checkout import continued
from nightshift.files import Document, read_json, write_atomically, write_json
from nightshift.waiting import look, markers, waiting

PROOF_NAME, LOG_NAME = "proof.json", "prove.log"
# What decides whether an engine works on a machine: its bytes, and the pins.
_CODE = ("pyproject.toml", "nightshift/engines/", "nightshift/evaluation/", "nightshift/executors/")
_BASELINE_SECONDS = 600.0
_RELEASE_SECONDS = 10.0  # in which a killed run has to leave the GPUs; not measured
_GRACE_SECONDS = 60.0  # run.py closes its record on SIGTERM
_POLL_SECONDS = 0.5
_RATE = "trainer.optim.lr"
# Words that stay private, and what stands for them.
_PRIVATE = (
    (r"[a-z][a-z0-9+.-]*://\S+|\S+@\S+|\b\d{1,3}(?:\.\d{1,3}){3}\b", "<address>"),
    (r"(?<![\w<])(?:~|\.{1,2})?(?:/[^\s/:;,'\"()<>|]+)+/?", "<path>"),
    (r"\b(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{24,}", "<secret>"),
)


class Step(Struct, frozen=True):
    """How a row is measured: `command` is program and flags, the others are for people."""

    command: str
    takes: str
    downloads: str = "nothing"
    engines: tuple[str, ...] = ENGINES


_SMOKE, _RUN = "prepare.py --smoke", "10 min of training, at most 20 min in all"
# Cheap ones first. The names are those of `mark` in the engines.
STEPS = {
    "driver and memory": Step("nightshift doctor", "a second"),
    "install": Step(_SMOKE, "not measured", "what fills up to 20 GB of disk (estimated)", ("prime-rl",)),
    "server up": Step(_SMOKE, "at most 20 min: compile caches are cold"),
    "ten training steps": Step(_SMOKE, "2 min"),
    "memory peak": Step(_SMOKE, "nothing more"),
    "weights updated in place": Step(_SMOKE, "seconds"),
    "served = file": Step(_SMOKE, "about a minute on the CPU", engines=("prime-rl",)),
    "kill and nothing left": Step("prepare.py --smoke 600", f"a start, and {_RELEASE_SECONDS:g} s after the kill"),
    "model and data": Step("prepare.py", "the downloads", "1 GB of model, 5 MB of data (estimated)"),
    "compile caches": Step("prepare.py", "at most 20 min to start, 5 min of training", engines=("prime-rl",)),
    "10-minute baseline": Step("run.py", _RUN),
    "the same baseline again": Step("run.py --baseline", _RUN),
    "one experiment": Step("run.py --again", _RUN),
}
_KILL, _UP = "kill and nothing left", "server up"


class Row(Struct, frozen=True):
    """`figure`: what was measured, or the line that failed. `time`: ISO 8601, UTC."""

    is_shown: bool
    figure: str
    seconds: float | None
    time: str


class ProofFile(Document, frozen=True, kw_only=True, tag="proof"):
    """proof.json. `machines`: the rows by name, for each engine, hardware, driver and code. `versions`: of the engine
    that wrote last; `commit`: HEAD at that moment."""

    commit: str | None
    versions: dict[str, str]
    machines: dict[str, dict[str, Row]]


def public(text: str) -> str:
    """Return a line without paths, addresses, names of user and machine, and what may be a secret."""
    secrets = {value for name, value in os.environ.items() if re.search("KEY|TOKEN|SECRET|PASSWORD", name)}
    host, user = socket.gethostname(), {os.environ.get("USER"), os.environ.get("LOGNAME"), Path.home().name}
    patterns = [(re.escape(value), "<secret>") for value in secrets if len(value) > 3]
    names = {*user, host, host.partition(".")[0]} - {"root", "", None}
    patterns += [*_PRIVATE, *((rf"\b{re.escape(str(name))}\b", "<name>") for name in names)]
    for pattern, word in patterns:
        text = re.sub(pattern, word, text)
    return text


class MachineProof:
    """The rows of an engine on this machine; where its rules use no GPU none is written."""

    def __init__(self, root: Path, engine: Engine) -> None:
        self.root, self.engine = root, engine
        self._began: dict[str, float] = {}  # of rows that have not ended, in their order

    @cached_property
    def machine(self) -> str:
        """`prime-rl on 2 x NVIDIA A100, driver 580.95, code 1f2e3d4c5b6a`: hex digits over the code that ran."""
        digest = hashlib.sha256()
        for path in covered_files(self.root, _CODE):
            digest.update(path.encode() + b"\0" + (self.root / path).read_bytes())
        driver = next((gpu.driver for gpu in self.engine.gpus_here()), "unknown")
        return f"{self.engine.name} on {self.engine.hardware()}, driver {driver}, code {digest.hexdigest()[:12]}"

    @property
    def rows(self) -> dict[str, Row]:
        """The rows that hold for this machine, by their names."""
        return self._machines().get(self.machine, {})

    def missing(self, command: str = "") -> list[str]:
        """Return the rows of a command, or of all, that are not shown."""
        shown = {name for name, row in self.rows.items() if row.is_shown}
        steps = {name: step for name, step in STEPS.items() if self.engine.name in step.engines and name not in shown}
        return [name for name, step in steps.items() if command in ("", step.command)]

    def mark(self, name: str, figure: str = "", is_shown: bool = True) -> None:
        """Begin a row, or with a figure write it: `waiting.mark`."""
        now = time.monotonic()
        began = self._began.setdefault(name, now)
        if figure:
            del self._began[name]
            self._write({name: _row(is_shown, figure, now - began or None)})

    def fail(self, error: NightshiftError) -> None:
        """Write the line of an error into the row that began first of those that have not ended."""
        for name in list(self._began)[:1]:
            self.mark(name, error.cause, is_shown=False)

    def add_runs(self, records: Sequence[Record], rules_hash: str) -> None:
        """Write what runs under these rules show, or the causes of their crashes, into rows that are not shown yet."""
        records = [
            record
            for record in records
            if (record.rules_hash, record.hardware) == (rules_hash, self.engine.hardware())
            and (record.budget_seconds or 0.0) >= _BASELINE_SECONDS
            and record.failure != Failure.INTERRUPTED
        ]
        baselines = [record for record in records if record.run.is_baseline]
        others = [record for record in records if not record.run.is_baseline]
        first = next((at + 1 for at, record in enumerate(baselines) if record.score is not None), len(baselines))
        runs = dict(zip(list(STEPS)[-3:], (baselines[:first], baselines[first:], others), strict=True))
        missing = self.missing() if records else []
        best = {name: max(some, key=lambda r: r.score is not None) for name, some in runs.items() if some}
        self._write({name: _row_of(record) for name, record in best.items() if name in missing})

    def _machines(self) -> dict[str, dict[str, Row]]:
        with suppress(UsageError):  # a file of another version, or a damaged one, begins anew
            if (proof := read_json(self.root / PROOF_NAME, ProofFile, "")) is not None:
                return proof.machines
        return {}

    def _write(self, rows: Mapping[str, Row]) -> None:
        """Write rows, and drop those of another code or driver. EngineError if the disk refuses."""
        engine, commit = self.engine, None
        if not rows or not engine.rules.num_gpus or engine.hardware() == NO_GPU:
            return
        mine, same = {**self.rows, **rows}, self.machine.partition(", driver ")[0]
        machines = {name: rows for name, rows in self._machines().items() if name.partition(", driver ")[0] != same}
        machines[self.machine] = {name: mine[name] for name in STEPS if name in mine}
        versions = {"nightshift": metadata.version("nightshift"), **engine.versions()}
        versions["machine.toml"] = public(engine.machine.text)
        with suppress(EngineError, UsageError):
            commit = Repo(self.root).head().commit
        write_json(self.root / PROOF_NAME, ProofFile(commit=commit, versions=versions, machines=machines))


def _row(is_shown: bool, figure: str, seconds: float | None) -> Row:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return Row(is_shown, public(figure), seconds and round(seconds, 1), now)


def _row_of(record: Record) -> Row:
    figure, result = record.why, record.result
    if record.score is not None and result is not None:
        peak_gb, lines = result.training.peak_memory_gb, (record.health or "").splitlines()
        parts = [f"{record.status}, score {record.score:.4f}, {result.training.num_steps} steps"]
        parts += [] if peak_gb is None else [f"{peak_gb:.1f} GB"]
        parts += [f"ready after {result.startup_seconds or 0.0:.0f} s"]
        figure = ", ".join(parts + [line for line in lines if line.startswith("served = file")])
    return _row(record.score is not None, figure, record.total_seconds)


@contextmanager
def proving(root: Path, engine: Engine) -> Iterator[MachineProof]:
    """Write the rows that are marked inside, and the line of an error that leaves."""
    proof = MachineProof(root, engine)
    markers[:] = [proof.mark]
    try:
        yield proof
    except (EngineError, UsageError) as error:
        proof.fail(error)
        raise
    finally:
        markers.clear()


def prove(proof: MachineProof, flags: PrepareFlags, note: Note) -> int:
    """Measure the rows that are missing by the commands that write them. Return the exit code: of the command that
    failed, or CRASH if a row is not shown."""
    engine, ledger = proof.engine, Ledger(proof.root)
    if not engine.free_gpus():
        fix = f"Leave out --gpus none, or write environments = [] in {RULES_NAME}."
        raise UsageError(f"--prove needs a GPU, and {engine.rules.name} uses none here", fix)
    proof.add_runs(ledger.records(), engine.rules.hash(proof.root))
    ledger.runs_dir.mkdir(exist_ok=True)
    log = ledger.runs_dir / LOG_NAME
    log.unlink(missing_ok=True)
    for command in dict.fromkeys(step.command for step in STEPS.values()):
        if not (missing := proof.missing(command)):
            continue
        for name in missing:
            note(f"{name}: uv run {command}; takes {STEPS[name].takes}; downloads {STEPS[name].downloads}")
        before = proof.rows
        code = _run(proof, missing[0], _words(proof, command, flags), log)
        if code == ExitCode.INTERRUPTED:
            return code
        if code and proof.rows == before:
            proof.mark(missing[0], " | ".join(tail(log, 1)) or f"exit code {code}", is_shown=False)
        for name, row in proof.rows.items():
            if row != before.get(name) and not row.is_shown:
                note(f"{name}: {row.figure} (all of it: {log})")
        if code:
            return max(code, ExitCode.CRASH)
    left = proof.missing()
    note(f"not shown: {', '.join(left)}" if left else f"all {len(proof.rows)} rows are shown")
    note(f"for a bug report: {proof.root / PROOF_NAME}")
    return ExitCode.CRASH if left else ExitCode.MEASURED


def _words(proof: MachineProof, command: str, flags: PrepareFlags) -> list[str | Path]:
    """Return the words of a command for this machine. Before the experiment double the learning rate in train.toml if
    the file has no change."""
    program, *words = command.split()
    words += ["--engine", proof.engine.name, *([] if flags.gpus is None else ["--gpus", flags.gpus])]
    if command == _SMOKE and flags.smoke:
        words.append(f"--smoke={flags.smoke:g}")
    elif command == "prepare.py":
        words += [f"--{name}={folder}" for name, folder in flags.sources.items()]
    repo, records, config = Repo(proof.root), Ledger(proof.root).records(), load(proof.root / CONFIG_NAME)
    branches = repo.head().branch, continued(repo, records, None)
    if command == "run.py" and any(baseline_of(records, branch) for branch in branches):
        words.append("--baseline")
    elif "--again" in words and repo.config_at("HEAD") == config.source:
        write_atomically(proof.root / CONFIG_NAME, set_values(config.source, {_RATE: 2 * config.get(_RATE)}))
    return [sys.executable, proof.root / program, *words]


def _run(proof: MachineProof, name: str, words: Sequence[str | Path], log: Path) -> int:
    """Run a command to its end, or for the row `_KILL` until its run trains. Return its exit code."""
    group, before = ProcessGroup("prove", _GRACE_SECONDS), proof.rows.get(_UP)
    try:
        child = group.start(name, words, log_path=log, env=os.environ, cwd=proof.root)
        with waiting(lambda: f"{name}: {' '.join(child.tail(1))}"):
            while child.poll() is None:
                group.check()
                look()
                if name == _KILL and proof.rows.get(_UP) != before:
                    return _kill(proof, child)
                time.sleep(_POLL_SECONDS)
    finally:
        group.stop()
    return child.returncode


def _kill(proof: MachineProof, child: Child) -> int:
    """Kill a run that trains, and mark whether its processes and what they held of the GPUs are gone in time."""
    began, processes = time.monotonic(), psutil.Process(child.pid).children(recursive=True)
    child.kill()
    while left := [*map(describe, filter(is_alive, processes)), *map(str, gpu_problems(proof.engine.gpus()))]:
        if time.monotonic() - began >= _RELEASE_SECONDS:
            proof.mark(_KILL, f"left after {_RELEASE_SECONDS:g} s: {'; '.join(left)}", is_shown=False)
            return ExitCode.CRASH
        time.sleep(_POLL_SECONDS / 5)
    proof.mark(_KILL, f"{len(processes)} processes and their GPU memory gone after {time.monotonic() - began:.1f} s")
    return ExitCode.MEASURED

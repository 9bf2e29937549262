"""proof.json lists what works on this machine's GPUs. `prepare.py --prove` measures the rows that are missing.

prepare.py and its smoke run write rows. A row has a measured figure or the line of an error, and applies
to one engine, hardware, driver and code. The file contains no path, user name, host name or secret.
"""

import hashlib
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path

import psutil
from msgspec import Struct

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.config.rules import covered_files
from nightshift.config.train_toml import load, set_values
from nightshift.engines.base import ENGINES, NO_GPU, Engine, Note, PrepareFlags
from nightshift.errors import EngineError, ExitCode, UsageError
from nightshift.executors.gpus import gpu_problems
from nightshift.executors.process import Child, ProcessGroup, describe, is_alive, tail
from nightshift.files import Document, read_json, write_atomically, write_json
from nightshift.waiting import look, markers, waiting

PROOF_NAME = "proof.json"
# The code, and the pinned versions, that determine whether an engine works on a machine.
_CODE = ("pyproject.toml", "nightshift/engines/", "nightshift/evaluation/", "nightshift/executors/")
_RELEASE_SECONDS = 10.0  # after which a killed run must not use a GPU any more; not measured
_GRACE_SECONDS = 60.0  # for run.py to close its record after SIGTERM
_POLL_SECONDS = 0.5
_RATE = "trainer.optim.lr"
# Patterns of addresses, paths and secrets.
_PRIVATE = (
    r"[a-z][a-z0-9+.-]*://\S+|\S+@\S+|\b\d{1,3}(?:\.\d{1,3}){3}\b",
    r"(?<![\w<])(?:~|\.{1,2})?(?:/[^\s/:;,'\"()<>|]+)+/?",
    r"\b(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{24,}",
)


class Step(Struct, frozen=True):
    """How a row is measured. `time` and `download` are shown."""

    command: str  # program and flags
    time: str
    download: str = "none"
    engines: tuple[str, ...] = ENGINES


_SMOKE, _RUN = "prepare.py --smoke", "10 min of training, at most 20 min in total"
# Cheap rows first. Engines call `mark` with these names.
STEPS = {
    "driver and memory": Step("nightshift doctor", "a second"),
    "install": Step(_SMOKE, "not measured", "not measured; fills up to 20 GB of disk (estimated)", ("prime-rl",)),
    "server up": Step(_SMOKE, "at most 20 min: compile caches are cold"),
    "ten training steps": Step(_SMOKE, "2 min"),
    "memory peak": Step(_SMOKE, "none"),
    "weights updated in place": Step(_SMOKE, "seconds"),
    "served = file": Step(_SMOKE, "not measured on a GPU", engines=("prime-rl",)),
    "kill and nothing left": Step("prepare.py --smoke 600", f"a start, and {_RELEASE_SECONDS:g} s after the kill"),
    "model and data": Step("prepare.py", "the downloads", "1 GB of model, 5 MB of data (estimated)"),
    "compile caches": Step("prepare.py", "at most 20 min to start, 5 min of training", engines=("prime-rl",)),
    "10-minute baseline": Step("run.py", _RUN),
    "the same baseline again": Step("run.py --baseline", _RUN),
    "one experiment": Step("run.py --again", _RUN),
}
_KILL, _UP = "kill and nothing left", "server up"


class Row(Struct, frozen=True):
    """A row of proof.json."""

    is_shown: bool  # True if the measurement succeeded
    figure: str  # the measured figure, or the line of the error
    seconds: float | None
    time: str  # ISO 8601, UTC


class ProofFile(Document, frozen=True, kw_only=True, tag="proof"):
    """proof.json."""

    commit: str | None  # HEAD when the last row was written
    versions: dict[str, str]  # of the engine that wrote the last row
    machines: dict[str, dict[str, Row]]  # rows by name, for each engine, hardware, driver and code


def public(text: str) -> str:
    """Return a line without paths, addresses, names of user and machine, and possible secrets."""
    secrets = [
        value
        for name, value in os.environ.items()
        if len(value) > 3 and re.search("(KEY|TOKEN|SECRET|PASSWORD)$", name)
    ]
    host = socket.gethostname()
    names = {os.environ.get("USER", ""), Path.home().name, host.partition(".")[0]} - {"root", ""}
    words = [re.escape(word) for word in (*secrets, host)]
    for pattern in (*words, *_PRIVATE, *(rf"\b{re.escape(name)}\b" for name in names)):
        text = re.sub(pattern, "<private>", text)
    return text


class MachineProof:
    """The rows of an engine on this machine. No row is written if the engine uses no GPU."""

    def __init__(self, root: Path, engine: Engine) -> None:
        self.root, self.engine = root, engine
        self.began: dict[str, float] = {}  # start times of unfinished rows, in order

    @cached_property
    def machine(self) -> str:
        """`prime-rl on 2 x NVIDIA A100, driver 580.95, code 1f2e3d4c5b6a`. The last part is a hash of _CODE."""
        digest = hashlib.sha256()
        for path in covered_files(self.root, _CODE):
            digest.update(path.encode() + b"\0" + (self.root / path).read_bytes())
        driver = next((gpu.driver for gpu in self.engine.gpus_here()), "unknown")
        return f"{self.engine.name} on {self.engine.hardware()}, driver {driver}, code {digest.hexdigest()[:12]}"

    @property
    def rows(self) -> dict[str, Row]:
        """The rows that apply to this machine, by name."""
        return self._machines().get(self.machine, {})

    def missing(self, command: str = "") -> list[str]:
        """Return the names of the rows, of one command or of all, that are not shown to work."""
        shown = {name for name, row in self.rows.items() if row.is_shown}
        steps = {name: step for name, step in STEPS.items() if self.engine.name in step.engines and name not in shown}
        return [name for name, step in steps.items() if command in ("", step.command)]

    def mark(self, name: str, figure: str = "", is_shown: bool = True) -> None:
        """Begin a row, or write the row with its figure. A failure does not replace a success. See `waiting.mark`."""
        now = time.monotonic()
        began = self.began.setdefault(name, now)
        if figure:
            del self.began[name]
        if figure and (is_shown or name in self.missing()):
            self.write(name, is_shown, figure, now - began or None)

    def _machines(self) -> dict[str, dict[str, Row]]:
        proof = read_json(self.root / PROOF_NAME, ProofFile, "Delete it, then run: uv run prepare.py --prove")
        return proof.machines if proof else {}

    def write(self, name: str, is_shown: bool, figure: str, seconds: float | None) -> None:
        """Write a row. EngineError if the disk refuses."""
        engine = self.engine
        if not engine.rules.num_gpus or engine.hardware() == NO_GPU:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")  # two equal measurements make different rows
        rows = {**self.rows, name: Row(is_shown, public(figure), seconds and round(seconds, 1), now)}
        machines = {**self._machines(), self.machine: rows}
        versions = {"nightshift": metadata.version("nightshift"), "machine.toml": public(engine.machine.text)}
        proof = ProofFile(
            commit=Repo(self.root).head().commit, versions=versions | engine.versions(), machines=machines
        )
        write_json(self.root / PROOF_NAME, proof)


@contextmanager
def proving(root: Path, engine: Engine) -> Iterator[MachineProof]:
    """Write the rows that are marked inside the context. An error is the figure of the first unfinished row."""
    proof = MachineProof(root, engine)
    markers[:] = [proof.mark]
    try:
        yield proof
    except (EngineError, UsageError) as error:
        if proof.began:
            proof.write(next(iter(proof.began)), False, error.cause, None)
        raise
    finally:
        markers.clear()


def prove(proof: MachineProof, flags: PrepareFlags, note: Note) -> int:
    """Run the commands of the missing rows. Return a failed command's exit code, or CRASH if rows are missing."""
    engine, ledger, rules_hash = proof.engine, Ledger(proof.root), proof.engine.rules.hash(proof.root)
    if not engine.free_gpus():
        raise UsageError(f"--prove needs a GPU, and {engine.rules.name} uses none here", "Leave out --gpus none.")
    ledger.runs_dir.mkdir(exist_ok=True)
    log = ledger.runs_dir / "prove.log"
    log.unlink(missing_ok=True)
    for command in dict.fromkeys(step.command for step in STEPS.values()):
        if not (missing := proof.missing(command)):
            continue
        for name in missing:
            note(f"{name}: uv run {command} (time: {STEPS[name].time}; download: {STEPS[name].download})")
        before, words = proof.rows, [*command.split(), "--engine", engine.name]
        words += [] if flags.gpus is None else ["--gpus", flags.gpus]
        if command == _SMOKE and flags.smoke:
            words.append(f"--smoke={flags.smoke:g}")
        elif command == "prepare.py":
            words += [f"--{name}={folder}" for name, folder in flags.sources.items()]
        elif words[0] == "run.py":
            digest = hashlib.sha256(f"{proof.machine} {rules_hash}".encode()).hexdigest()
            words += ["--branch", f"autoresearch/proof-{digest[:8]}"]
        config = load(proof.root / CONFIG_NAME)
        if "--again" in words and Repo(proof.root).config_at("HEAD") == config.source:
            write_atomically(proof.root / CONFIG_NAME, set_values(config.source, {_RATE: 2 * config.get(_RATE)}))
        code = _run(proof, missing[0], words, log)
        if words[0] == "run.py" and code in (ExitCode.MEASURED, ExitCode.CRASH):
            record = ledger.records()[-1]
            figure = record.why
            if record.result and record.score is not None:
                training, start = record.result.training, record.result.startup_seconds or 0.0
                figure = f"{record.status}, score {record.score:.4f}, {training.num_steps} steps, "
                peak = "not measured" if training.peak_memory_gb is None else f"{training.peak_memory_gb:.1f} GB"
                figure += f"peak memory {peak}, ready after {start:.0f} s"
            proof.write(missing[0], record.score is not None, figure, record.total_seconds)
        elif code not in (ExitCode.MEASURED, ExitCode.INTERRUPTED) and proof.rows == before:
            proof.mark(missing[0], " | ".join(tail(log, 1)) or f"exit code {code}", is_shown=False)
        for name, row in proof.rows.items():
            if row != before.get(name) and not row.is_shown:
                note(f"{name}: {row.figure} (log: {log})")
        if code:
            return max(code, ExitCode.CRASH)
    missing = proof.missing()
    note(f"not shown: {', '.join(missing)}" if missing else f"all {len(proof.rows)} rows are shown")
    note(f"for a bug report: {proof.root / PROOF_NAME}")
    return ExitCode.CRASH if missing else ExitCode.MEASURED


def _run(proof: MachineProof, name: str, words: Sequence[str], log: Path) -> int:
    """Run a command and return its exit code. For the row `_KILL` kill it when its run trains."""
    group, before, argv = ProcessGroup("prove", _GRACE_SECONDS), proof.rows.get(_UP), [sys.executable, *words]
    try:
        child = group.start(name, argv, log_path=log, env=os.environ, cwd=proof.root)
        with waiting(lambda: f"{name}: {' '.join(tail(child.log_path, 1))}"):
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
    """Kill a run that trains, and mark the row: do its processes and their GPU memory disappear in time?"""
    began, processes = time.monotonic(), psutil.Process(child.pid).children(recursive=True)
    child.kill()
    while left := [*map(describe, filter(is_alive, processes)), *map(str, gpu_problems(proof.engine.gpus()))]:
        if time.monotonic() - began >= _RELEASE_SECONDS:
            proof.mark(_KILL, f"left after {_RELEASE_SECONDS:g} s: {'; '.join(left)}", is_shown=False)
            return ExitCode.CRASH
        time.sleep(_POLL_SECONDS / 5)
    proof.mark(_KILL, f"{len(processes)} processes and their GPU memory gone after {time.monotonic() - began:.1f} s")
    return ExitCode.MEASURED

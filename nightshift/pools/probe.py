"""What a job of a cluster finds: `probe.py ROOT FOLDER`, run on a node as a worker is; and the question, for people."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nightshift.engines import Engine, open_engine
from nightshift.errors import EngineError, NightshiftError
from nightshift.files import free_disk_gb, read_file, read_json, write_json
from nightshift.pools.slurm import SlurmPool
from nightshift.worker import JOB_NAME, LOG_NAME, Job

FOUND_NAME = "probe.json"
PROGRAM = (str(Path(__file__)),)
_TICK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Found:
    """What a node said of itself. `problems`: what its engine misses there."""

    node: str
    hardware: str
    rules_hash: str
    harness_tree: str
    gpus: str
    free_disk_gb: float
    problems: tuple[str, ...]


def look(job: Job, root: Path) -> Found:
    """What is here."""
    engine: Engine | None = None
    try:
        engine = open_engine(job.rules, root, dict(os.environ), job.gpus, job.keep_all)
        hardware, problems = engine.hardware(), tuple(engine.check())
    except NightshiftError as error:
        hardware, problems = "unknown", (str(error),)
    node = os.environ.get("SLURMD_NODENAME", platform.node())
    digests = job.rules.hash(root), job.rules.harness_tree(root)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
    return Found(node, hardware, *digests, gpus, free_disk_gb(root), problems)


def ask(pool: SlurmPool, job: Job) -> list[str]:
    """Submit one job that looks around, and say what it found, a line each. EngineError where none comes back."""
    runs_dir = pool.root / "runs"
    runs_dir.mkdir(exist_ok=True)
    folder, began = Path(tempfile.mkdtemp(prefix=".probe-", dir=runs_dir)), time.monotonic()
    try:
        pool.submit(folder, job, lambda: None, PROGRAM)
        while not (folder / FOUND_NAME).is_file():
            if pool.is_over(folder):
                said = read_file(folder / LOG_NAME).decode(errors="replace").strip().splitlines()
                why = f": {said[-1]}" if said else ""
                raise EngineError(f"the probe job ended without an answer{why}", "Look at its node.")
            pool.wait(_TICK_SECONDS)
        seconds = time.monotonic() - began
        found = read_json(folder / FOUND_NAME, Found, "")
        assert found is not None
    finally:
        pool.cancel([folder])
        shutil.rmtree(folder, ignore_errors=True)
    same = "the same as here"
    rules = same if found.rules_hash == job.rules_hash else f"PROBLEM: {found.rules_hash}, here {job.rules_hash}"
    tree = same if found.harness_tree == job.harness_tree else "PROBLEM: other bytes than here"
    lines = [
        f"probe:     answered after {seconds:.1f} s from node {found.node}",
        f"hardware:  {found.hardware}; GPUs of the job: {found.gpus}; {found.free_disk_gb:.0f} GB of disk free",
        f"rules:     {rules}",
        f"harness:   {tree}",
    ]
    return [*lines, *(f"PROBLEM:   {problem}" for problem in found.problems)]


if __name__ == "__main__":
    asked = msgspec.json.decode(read_file(Path(sys.argv[2]) / JOB_NAME), type=Job)
    write_json(Path(sys.argv[2]) / FOUND_NAME, look(asked, Path(sys.argv[1])))

"""A campaign checkout for whole nights with the stand-in engine, and what must be true of it afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from nightshift.campaign.ledger import Ledger
from nightshift.git.repo import Repo
from nightshift.guard.freeze import changed_harness_files
from nightshift.processes.watchdog import MARKER_NAME
from nightshift.records import Record
from nightshift.rules import ARITHMETIC_TRL
from tests.conftest import git

ROOT = Path(__file__).parents[1]
BASELINE = b"max_steps = 3\n[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 6e-7  # poor\n"


def furnish(checkout: Path, baseline: bytes = BASELINE) -> Path:
    """Make the `checkout` fixture one that a night can run in."""
    for name in ("models", "nightshift"):
        (checkout / name).symlink_to(ROOT / name)
    names = ("runs/", "results.tsv", "models", "environments", "nightshift", "run.py", "stand-in.json", "STOP")
    (checkout / ".gitignore").write_text("\n".join(names) + "\n")
    (checkout / "run.py").symlink_to(ROOT / "run.py")
    (checkout / "train.toml").write_bytes(baseline)
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "-m", "baseline config")
    (checkout.parent / "temporary").mkdir(exist_ok=True)
    return checkout


def start(root: Path, **order: object) -> subprocess.Popen[str]:
    """Start a night; `order` as in stand_in_night.py."""
    order = {"engine": "trl", "budget_seconds": 30.0, "max_runs": 1, **order}
    command = [sys.executable, str(ROOT / "tests" / "stand_in_night.py"), str(root), json.dumps(order)]
    environment = {**os.environ, "TMPDIR": str(root.parent / "temporary")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=root, stdout=pipe, stderr=pipe, text=True, env=environment)


def finish(process: subprocess.Popen[str], within_seconds: float = 120) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=within_seconds)
    return process.returncode, stdout, stderr


def whole_night(root: Path, **order: object) -> tuple[int, str, str]:
    return finish(start(root, **order))


def records(root: Path) -> list[Record]:
    return Ledger(root).records()


def wait_for(condition: object, within_seconds: float = 30.0) -> None:
    """Poll a callable until it is true."""
    deadline = time.monotonic() + within_seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def strangers(root: Path) -> list[psutil.Process]:
    """Living processes that belong to the checkout or to its agents' clones."""
    ours = {psutil.Process(), *psutil.Process().parents()}  # a command line above us may name the checkout
    found = []
    for process in psutil.process_iter():
        try:
            if process in ours or process.status() == psutil.STATUS_ZOMBIE:
                continue
            places = f"{process.cwd()} {' '.join(process.cmdline())}"
            marked = process.environ().get(MARKER_NAME) and str(root.parent) in places
            if str(root) in places or str(root.parent / "temporary") in places or marked:
                found.append(process)
        except psutil.Error:
            continue
    return found


def problems(root: Path) -> list[str]:
    """What is wrong with ledger, TSV and branch: gaps, doubles, orphans. Empty for an unbroken protocol."""
    found = []
    ledger, repo = Ledger(root), Repo(root)
    all_records, head = ledger.records(), repo.head()
    if [r.number for r in all_records] != list(range(1, len(all_records) + 1)):
        found.append(f"numbers are not 1, 2, 3, ...: {[r.number for r in all_records]}")
    found += [f"{r.number:04d} is open" for r in all_records if r.status == "started"]
    found += [f"{r.number:04d} is not settled" for r in all_records if r.settled is None and r.failure != "interrupted"]
    decided = [r for r in all_records if r.failure is None or r.failure == "training"]
    hashes = [r.config_hash for r in decided]
    found += [f"{r.number:04d} is decided twice" for r in decided if hashes.count(r.config_hash) > 1]
    rows = ledger.tsv_path.read_text().splitlines()[1:]
    if len(rows) != len(all_records) or ledger.sync_tsv():
        found.append(f"results.tsv has {len(rows)} rows for {len(all_records)} records")
    kept = [r for r in decided if r.status == "keep" and r.parent is not None]
    log = git(root, "log", "--reverse", "--format=%H %(trailers:key=Nightshift-Run,valueonly,separator=)")
    commits = [line.split() for line in log.splitlines() if len(line.split()) == 2]
    if commits != [[r.kept_commit, f"{r.number:04d}"] for r in kept]:
        found.append(f"commits {commits} are not those of the keeps")
    incumbent = next((r for r in reversed(decided) if r.status == "keep"), None)
    if incumbent is not None and repo.config_at("HEAD") != ledger.source(incumbent.number):
        found.append("HEAD does not hold the incumbent")
    status = git(root, "status", "--porcelain")
    if status.strip() not in ("", "M train.toml"):
        found.append(f"git status: {status}")
    if head.commit is None or changed_harness_files(repo, head.commit, ARITHMETIC_TRL):
        found.append("the harness changed")
    found += [f"left behind: {path}" for path in (root.parent / "temporary").glob("nightshift-*/*")]
    found += [f"left behind: {path}" for path in root.rglob("*.tmp")]
    return found

"""A campaign checkout for whole processes with the stand-in engine, and what must be true of it afterwards."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Record
from nightshift.experiment.checkout import changed_files
from tests import checkouts, integrity
from tests.checkouts import ROOT, git
from tests.rules import ARITHMETIC_TRL
from tests.stand_ins import fault
from tests.waiting import POLL_SECONDS, wait_for

BASELINE = b"max_steps = 3\n[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 6e-7  # poor\n"


def furnish(checkout: Path, baseline: bytes = BASELINE) -> Path:
    """Make the `checkout` fixture one that run.py and a night can run in."""
    (checkout / "models").symlink_to(ROOT / "models")
    names = ("runs/", "results.tsv", "models", "environments", "run.py", "stand-in*", "STOP")
    (checkout / ".gitignore").write_text("\n".join(names) + "\n")
    (checkout / "run.py").symlink_to(ROOT / "run.py")
    (checkout / "train.toml").write_bytes(baseline)
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "-m", "baseline config")
    (checkout.parent / "temporary").mkdir(exist_ok=True)
    return checkout


def start(root: Path, *flags: str, **asked: object) -> subprocess.Popen[str]:
    """Start a night; `flags` and `asked` as in stand_in_night.py."""
    asked = {"engine": "trl", "budget_seconds": 30.0, **asked}
    command = [sys.executable, str(ROOT / "tests" / "stand_in_night.py"), str(root), json.dumps(asked), *flags]
    environment = {**os.environ, "TMPDIR": str(root.parent / "temporary")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=root, stdout=pipe, stderr=pipe, text=True, env=environment)


def start_held(root: Path, **asked: object) -> subprocess.Popen[str]:
    """Start a night that runs its baseline; later runs train until `stand-in.json` is removed."""
    of_baseline = root / "runs" / "stand-in.json"
    of_baseline.parent.mkdir(exist_ok=True)
    fault(of_baseline.parent, "hold", once=False)
    night = start(root, **asked)
    wait_for(lambda: is_running(root, 1))
    fault(root, "hold", once=False)
    of_baseline.unlink()
    return night


def start_run(root: Path, *flags: str) -> subprocess.Popen[str]:
    """Start run.py; `flags` as in stand_in_run.py."""
    command = [sys.executable, str(ROOT / "tests" / "stand_in_run.py"), str(root), *flags]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def state(root: Path) -> dict[str, Any]:
    return json.loads((root / "runs" / "night.json").read_text())


def is_running(root: Path, number: int) -> bool:
    return any((root / "runs" / f"{number:04d}").glob("metrics.jsonl"))


def until_training(root: Path, process: subprocess.Popen[str]) -> None:
    """For as long as run.py itself waits for a worker that starts: the real one loads torch first."""
    while not any((root / "runs").glob("*/metrics.jsonl")):
        assert process.poll() is None, f"no training began: {process.communicate()}"
        time.sleep(POLL_SECONDS)


def nightshift(root: Path, *arguments: str) -> tuple[int, str, str]:
    """The command line in a checkout: exit code, stdout, stderr."""
    done = subprocess.run(["nightshift", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of a process; one that hangs is ended by pytest's own limit."""
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr


def whole_night(root: Path, **asked: object) -> tuple[int, str, str]:
    return finish(start(root, **asked))


def good_end(process: subprocess.Popen[str], root: Path) -> tuple[str, str]:
    """The stdout and stderr of a process that ends with exit code 0, and leaves a whole ledger and no process."""
    code, stdout, stderr = finish(process)
    assert code == 0, stderr
    assert (problems(root), leftovers(root)) == ([], [])
    return stdout, stderr


def good_night(root: Path, **asked: object) -> tuple[str, str]:
    return good_end(start(root, **asked), root)


def records(root: Path) -> list[Record]:
    return Ledger(root).records()


def leftovers(root: Path) -> list[psutil.Process]:
    """Living processes that belong to the checkout or to its agents' clones, which lie beside it."""
    return checkouts.leftovers(root.parent)


def problems(root: Path) -> list[str]:
    """What is wrong with ledger, TSV and branch of a night: gaps, doubles, orphans. Empty for an unbroken protocol."""
    found, repo = integrity.problems(root), Repo(root)
    tried = [
        sorted(str(change.keys) for change in (*r.run.kept, r.run.new))
        for r in records(root)
        if r.run.new and (r.failure is None or r.failure == "config")
    ]
    found += [f"decided twice: {changes}" for changes in tried if tried.count(changes) > 1]
    head = repo.head().commit
    if head is None or changed_files(repo, head, ARITHMETIC_TRL):
        found.append("what measures changed")
    return found + [f"left behind: {path}" for path in (root.parent / "temporary").glob("nightshift-*/*")]

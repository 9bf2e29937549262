"""What must be true of a campaign's ledger, results.tsv and branch, whatever happened to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Record
from nightshift.campaign.results import COLUMNS, row
from nightshift.campaign.verify import verify
from tests.checkouts import git

SIZES = (16, 100, 400, 1000)  # of the selection sets that tests have
HEAVY_NAMES = ("weights", "weights.partial", ".weights.partial")


def problems(root: Path, *, gaps: bool = False, foreign: bool = False) -> list[str]:
    """What is wrong with lock, ledger, results.tsv, branch and leftovers. Empty if nothing is.

    Tolerated are `gaps` in the numbers, and a `foreign` HEAD that somebody else committed to.
    """
    ledger, found = Ledger(root), []
    if ledger.is_running():
        found.append("the head's lock is held")
    records = ledger.records()
    numbers = ledger.numbers()
    if not numbers == [r.number for r in records] == list(range(1, len(numbers) + 1)) and not gaps:
        found.append(f"numbers are not 1, 2, 3, ...: {numbers}")
    found += [f"{r.number:04d} is open" for r in records if r.status == "started"]
    found += [
        f"{r.number:04d} has no git action" for r in records if r.git_action is None and r.failure != "interrupted"
    ]
    for r in records:
        if r.status in ("keep", "discard") and not _is_measured(r):
            found.append(f"{r.number:04d} was decided without a whole evaluation")
    header, *rows = ledger.tsv_path.read_text().splitlines()
    if header.split("\t") != list(COLUMNS) or rows != [row(r) for r in records]:
        found.append("results.tsv is not what the records say")
    found += _problems_of_git(root, records, gaps, foreign)
    left = [p for p in root.rglob("*.tmp") if p.name.startswith(".")]
    left += [p for p in root.glob("runs/*/*") if p.name in HEAVY_NAMES and p.is_dir() and not p.is_symlink()]
    said = verify(ledger).problems if ledger.journal.path.exists() else []
    return found + [f"left behind: {p.relative_to(root)}" for p in left] + ([] if gaps else said)


def _is_measured(record: Record) -> bool:
    return record.evaluation is not None and len(record.evaluation.example_scores) in SIZES


def _problems_of_git(root: Path, records: Sequence[Record], gaps: bool, foreign: bool) -> list[str]:
    found, repo = [], Repo(root)
    kept = {f"{r.number:04d}": r for r in records if r.kept_commit}
    for number, r in kept.items():
        if repo.config_at(str(r.kept_commit)) != _source(root, r):
            found.append(f"commit of {number} does not hold what it submitted")
    log = git(root, "log", "--format=%(trailers:key=Nightshift-Run,valueonly,separator=)%x09%s")
    commits = [line.partition("\t") for line in log.splitlines() if not line.startswith("\t")]
    unknown = {number for number, _, subject in commits if "Restore the incumbent" not in subject} - kept.keys()
    if unknown and not gaps:
        found.append(f"commits of experiments that kept nothing: {sorted(unknown)}")
    in_order = sorted(records, key=lambda r: r.decided or 0)
    incumbent = next((r for r in reversed(in_order) if r.status == "keep"), None)
    is_settled = incumbent is not None and (incumbent.kept_commit or incumbent.parent is None)
    if incumbent and is_settled and not foreign and repo.config_at("HEAD") != _source(root, incumbent):
        found.append("HEAD does not hold the incumbent")
    status = [line for line in git(root, "status", "--porcelain").splitlines() if not line.endswith(" train.toml")]
    return found + ([f"git status: {status}"] if status else [])


def _source(root: Path, record: Record) -> bytes | None:
    """What the experiment submitted; None if somebody took it away."""
    path = Ledger(root).run_dir(record.number) / "train.toml"
    return path.read_bytes() if path.is_file() else None

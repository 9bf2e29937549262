"""What must be true of a campaign's ledger, results.tsv and branch, whatever happened to it."""

from collections.abc import Sequence
from pathlib import Path

from nightshift.campaign.campaign import Campaign, uncommitted
from nightshift.campaign.commits import incumbent_values
from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Record
from nightshift.campaign.results import results_tsv
from nightshift.config.train_toml import parse
from tests.checkouts import git

SIZES = (16, 100, 400, 1000, 4000)  # of the validation splits that tests have
HEAVY_NAMES = ("weights", "weights.partial", ".weights.partial")


def problems(root: Path) -> list[str]:
    """What is wrong with lock, ledger, results.tsv, branch and leftovers. Empty if nothing is."""
    ledger, found = Ledger(root), []
    if ledger.is_running():
        found.append("the head's lock is held")
    records = ledger.records()
    numbers = ledger.numbers()
    if not numbers == [r.number for r in records] == list(range(1, len(numbers) + 1)):
        found.append(f"numbers are not 1, 2, 3, ...: {numbers}")
    found += [f"{r.number:04d} is open" for r in records if r.status == "started"]
    found += [
        f"{r.number:04d} has no git action" for r in records if r.git_action is None and r.failure != "interrupted"
    ]
    for r in records:
        is_measured = r.evaluation is not None and len(r.evaluation.example_scores) in SIZES
        if r.status in ("keep", "discard", "measured") and not is_measured:
            found.append(f"{r.number:04d} was decided without a whole evaluation")
    if ledger.tsv_path.read_text() != results_tsv(records):
        found.append("results.tsv is not what the records say")
    found += _problems_of_git(root, records)
    left = [p for p in root.rglob("*.tmp") if p.name.startswith(".")]
    left += [p for p in root.glob("runs/*/*") if p.name in HEAVY_NAMES and p.is_dir() and not p.is_symlink()]
    found += [f"left behind: {p.relative_to(root)}" for p in left]
    return found


def _problems_of_git(root: Path, records: Sequence[Record]) -> list[str]:
    found, repo, ledger = [], Repo(root), Ledger(root)
    commits = git(
        root, "log", "--reverse", "--format=%H %(trailers:key=Nightshift-Experiment,valueonly,separator=)%x09%s"
    )
    ours = [line.split(maxsplit=2) for line in commits.splitlines() if not line.split("\t")[0].endswith(" ")]
    for commit, run, subject in ours:
        named = {id: name for r in records if f"{r.number:04d}" == run for name, id in r.commits.items()}
        if named.get(commit) != subject.partition(":")[0]:
            found.append(f"experiment {run} does not name its commit {commit[:7]} ({subject})")
    known = {commit for commit, _, _ in ours}
    found += [f"{r.number:04d} names a commit that is gone" for r in records if not {*r.commits.values()} <= known]
    if records:
        last = max(records, key=lambda r: r.decided or 0)
        campaign = Campaign.of(records, last.branch, last.rules_hash)
        if campaign.baseline and not uncommitted(records, last.branch):
            wanted = incumbent_values(ledger.stored_config(campaign.baseline), campaign.kept)
            if incumbent_values(parse(repo.config_at("HEAD") or b"")) != wanted:
                found.append("HEAD does not hold the incumbent")
    status = [line for line in git(root, "status", "--porcelain").splitlines() if not line.endswith(" train.toml")]
    return found + ([f"git status: {status}"] if status else [])

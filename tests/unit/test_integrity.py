"""The check of a campaign's ledger, results.tsv and branch can fail."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from tests.campaigns import campaign
from tests.checkouts import git
from tests.integrity import problems


def break_tsv(root: Path) -> None:
    (root / "results.tsv").write_text((root / "results.tsv").read_text().replace("idea 2", "idea 9"))


def open_a_record(root: Path) -> None:
    path = root / "runs" / "0002" / "record.json"
    path.write_text(path.read_text().replace('"status":"keep"', '"status":"started"'))


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (break_tsv, "results.tsv is not what the records say"),
        (open_a_record, "0002 is open"),
        (lambda root: (root / "runs/0002/weights").mkdir(parents=True), "left behind: runs/0002/weights"),
        (lambda root: (root / "runs/0001/.record.json.7.tmp").touch(), "left behind: runs/0001/.record"),
        (lambda root: shutil.rmtree(root / "runs/0001"), "numbers are not 1, 2, 3"),
        (
            lambda root: (root / "runs/journal.jsonl").write_text('{"a": 1}\n{"b"\n{}\n'),
            "journal.jsonl:2 cannot be read",
        ),
        (lambda root: (root / "untracked.txt").touch(), "git status"),
        (
            lambda root: git(root, "commit", "--allow-empty", "-m", "x\n\nNightshift-Experiment: 0002\n"),
            "0002 does not name",
        ),
    ],
)
def test_the_check_finds_what_is_wrong(checkout: Path, spoil: Callable[[Path], object], finding: str) -> None:
    campaign(Ledger(checkout), ["3e-5"], branch="autoresearch/test")
    (checkout / "train.toml").write_bytes(Ledger(checkout).source(2))
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline config")
    assert [r.run.new and r.status for r in Ledger(checkout).records()] == [None, "keep"]
    assert problems(checkout) == []
    spoil(checkout)
    found = problems(checkout)
    assert any(finding in problem for problem in found), found

"""`nightshift diff` and `nightshift show` in a real checkout with a stand-in campaign."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.ledger import Ledger
from nightshift.cli import run as command
from nightshift.cli.main import commands
from nightshift.config.train_toml import parse
from tests.conftest import git
from tests.stand_in_campaign import BRANCH, RULES_HASH, build


def nightshift(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(commands, words)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout on the stand-in's branch, with 12 experiments."""
    root = tmp_path
    monkeypatch.setattr(command, "process_root", lambda: root)
    build(root, 12, num_examples=60, with_files=False, commit=None)
    git(root, "init", "--quiet", "--initial-branch", BRANCH)
    (root / "run.py").write_text("")
    (root / ".gitignore").write_text("runs/\nresults.tsv\n")
    baseline = Ledger(root).source(1)
    kept = Campaign.of(Ledger(root).records(), BRANCH, RULES_HASH).kept
    for source in (baseline, incumbent_config(parse(baseline), kept).source):
        (root / "train.toml").write_bytes(source)
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "-m", "train.toml")
    return root


def edit(root: Path, old: str, new: str) -> None:
    path = root / "train.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_by_default_the_working_file_against_the_incumbent(root: Path) -> None:
    code, stdout, _ = nightshift("diff")
    assert (code, stdout.splitlines()[1]) == (0, "  both files are equal")
    edit(root, "seq_len = 2048 ", "# why not\nseq_len = 2_048 ")
    assert nightshift("diff")[1].splitlines()[1:] == ["  no key differs: both train the same"]
    edit(root, "seq_len = 2_048", "seq_len = 1536")
    title, line = nightshift("diff")[1].splitlines()
    assert re.fullmatch(r"incumbent \(0001 with \d kept changes\) -> working file", title)
    assert line == "  seq_len 2048 -> 1536"


def test_experiments_commits_baseline_and_incumbent_name_versions(root: Path) -> None:
    wanted = nightshift("diff", "baseline", "incumbent")[1].splitlines()[1:]
    assert len(wanted) >= 2
    for names in (("0001", "incumbent"), ("HEAD~1", "HEAD"), ("1", "HEAD"), ("1",)):
        code, stdout, stderr = nightshift("diff", *names)
        assert (code, stderr) == (0, "")
        assert stdout.splitlines()[1:] == wanted, names
    commit = git(root, "rev-parse", "HEAD~1").strip()
    assert nightshift("diff", commit[:10], "HEAD")[1].splitlines()[1:] == wanted


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("diff", "--", "a\x1b[31mb"), "is neither an experiment nor a commit"),
        (("diff",), "working file:1:"),
        (("show", "99"), "there is no record of experiment 0099. The last one is 0012."),
    ],
)
def test_what_means_nothing_is_one_line(root: Path, arguments: tuple[str, ...], words: str) -> None:
    (root / "train.toml").write_text("lr = \n")
    code, stdout, stderr = nightshift(*arguments)
    assert (code, stdout) == (2, "")
    assert len(stderr.splitlines()) == 1
    assert words in stderr
    assert "\x1b" not in stderr

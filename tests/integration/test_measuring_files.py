"""Files that measure end an experiment or a night when they change, and the branch too; nothing else has an effect."""

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.campaign.git import Repo
from nightshift.experiment.checkout import IntegrityError, require_unchanged
from tests.checkouts import MEASURING, git
from tests.conftest import CAMPAIGN
from tests.night_checkout import finish, leftovers, records, start, start_run
from tests.rules import ARITHMETIC_TRL
from tests.stand_ins import fault
from tests.waiting import wait_for

BUDGET = ("--budget-seconds", "1")
ADDED = "nightshift/engines/trl/grpo.py"  # measures too
# Remembers nothing between two proposals, which a sandbox does not allow.
AGENT = """
import os, re
config = open("train.toml").read()
rate = 1e-6 * (1 + int.from_bytes(os.urandom(3), "big") / 2e6)
open("train.toml", "w").write(re.sub("lr = .*", f"lr = {rate:.8g}", config))
open("hypothesis.txt", "w").write("HYPOTHESIS: another rate\\nPREDICTION: +1 pp\\n")
"""


def edit(root: Path) -> None:
    (root / MEASURING).write_text("MEASURES = 'better'\n")


def commit_it(root: Path) -> None:
    edit(root)
    git(root, "commit", "--quiet", "--all", "-m", "innocent")


def hide_it(root: Path) -> None:
    git(root, "update-index", "--assume-unchanged", MEASURING)
    edit(root)


def link_its_folder(root: Path) -> None:
    (root / "nightshift").rename(root.parent / "moved")
    (root / "nightshift").symlink_to(root.parent / "moved")
    (root / MEASURING).write_text("MEASURES = 'better'\n")


def add_one(root: Path) -> None:
    (root / ADDED).parent.mkdir(parents=True)
    (root / ADDED).write_text("MEASURES = 'more'\n")


def replace_the_commit(root: Path) -> None:
    first = git(root, "rev-parse", "HEAD").strip()
    commit_it(root)
    git(root, "replace", first, "HEAD")


def show_git_an_unedited_copy(root: Path) -> None:
    shutil.copytree(root, root.parent / "agreed", symlinks=True, ignore=shutil.ignore_patterns(".git"))
    git(root, "config", "core.worktree", str(root.parent / "agreed"))
    edit(root)


CHANGES = [edit, commit_it, hide_it, link_its_folder, replace_the_commit, add_one, show_git_an_unedited_copy]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_named_with_the_command_that_shows_it(checkout, change):
    repo = Repo(checkout)
    commit, agreed = repo.head().commit, ARITHMETIC_TRL.hash(checkout)
    require_unchanged(repo, ARITHMETIC_TRL, agreed, commit, agreed)
    change(checkout)
    name = ADDED if change is add_one else MEASURING
    with pytest.raises(IntegrityError, match=f"{name} differ from commit {commit[:7]}") as raised:
        require_unchanged(repo, ARITHMETIC_TRL, agreed, commit, ARITHMETIC_TRL.hash(checkout))
    assert f"git diff {commit[:7]}" in raised.value.fix


def held(root: Path, begin: Callable[[], object]) -> object:
    """Start a command whose run waits in the middle of its training."""
    before = len([*root.glob("runs/*/metrics.jsonl")])
    fault(root, "hold", once=False)
    process = begin()
    assert wait_for(lambda: len([*root.glob("runs/*/metrics.jsonl")]) > before)
    return process


def test_what_changes_while_run_py_runs_is_named_and_nothing_is_decided_or_run_from_then_on(root: Path) -> None:
    assert finish(start_run(root, *BUDGET))[0] == 0
    log = git(root, "log", "--format=%H")
    rate = (root / "train.toml").read_text().replace("6e-7", "3e-6")
    (root / "train.toml").write_text(rate)
    first = held(root, lambda: start_run(root, *BUDGET))
    edit(root)
    (root / "stand-in.json").unlink()
    for finished in (finish(first), finish(start_run(root, *BUDGET))):
        code, stdout, stderr = finished
        assert (code, stdout) == (2, "")
        assert f"{MEASURING} differ from commit" in stderr.splitlines()[-1]
    _, last = records(root)
    assert (last.failure, last.result, last.decided) == ("interrupted", None, None)
    assert git(root, "log", "--format=%H", CAMPAIGN) == log
    assert (root / "train.toml").read_text() == rate
    assert leftovers(root) == []


def work_beside(root: Path) -> None:
    """What people do in a checkout while a night runs in it."""
    other = root.parent / "other"
    git(root, "worktree", "add", "--quiet", "-b", "feature", str(other))
    (other / "program.md").write_text("Be lazy.\n")
    git(other, "commit", "--quiet", "--all", "-m", "on another branch")
    git(root, "tag", "then")
    git(root, "gc", "--quiet")
    for name in ("notes/new.md", "tests/test_mine.py", "nightshift/report/mine.py", "nightshift/evaluation/.x.py.swp"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine\n")
    git(root, "add", "notes/new.md")
    (root / "prepare.py").write_text("PREPARES = 'otherwise'\n")
    (root / "program.md").write_text("Be brief.\n")


@pytest.mark.slow
def test_what_you_do_in_the_checkout_beside_a_night_has_no_effect_and_an_edit_of_train_toml_is_kept_aside(root):
    agent = shlex.join([sys.executable, "-c", AGENT])
    night = held(root, lambda: start(root, agent=agent, sandbox="auto", experiments=3, budget_seconds=1.0))
    work_beside(root)
    before = git(root, "status", "--porcelain")
    (root / "train.toml").write_text("# my idea\n")
    (root / "stand-in.json").unlink()
    code, _, stderr = finish(night)
    assert code == 0, stderr
    assert [record.failure for record in records(root)] == [None] * 3
    notes = {note for record in records(root) for note in record.proposal.notes}
    assert {note for note in notes if "sandbox" not in note and "prediction" not in note} == set()
    assert git(root, "status", "--porcelain") == before
    (aside,) = root.glob("runs/edited-*.toml")
    assert aside.read_text() == "# my idea\n"
    assert re.search(rf"train\.toml is the incumbent's again; .*{aside.name}", stderr)

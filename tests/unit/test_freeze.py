"""The freeze: what may not change while a campaign lives, however the change is hidden; and all else may."""

from pathlib import Path

import pytest

from nightshift.campaign.git import Repo
from nightshift.errors import UsageError
from nightshift.experiment.integrity import changed_harness_files, require_clean_start
from tests.campaigns import a_record
from tests.conftest import git
from tests.rules import ARITHMETIC_TRL as RULES
from tests.rules import GSM8K_TRL

CANDIDATE, INCUMBENT = b"lr = 2\n", b"lr = 0\n"
CODE = (
    "nightshift/evaluation/evaluate.py",
    "environments/arithmetic/nightshift_arithmetic/__init__.py",
    "docs/make.py",
)


@pytest.fixture
def repo(checkout: Path) -> Repo:
    """A checkout that tracks code of the harness, of an environment, and of nothing that measures."""
    (checkout / "environments").unlink()
    (checkout / ".gitignore").write_text("runs/\n")
    for name in CODE:
        write(checkout, name)
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "-m", "code")
    return Repo(checkout)


@pytest.fixture
def start(repo: Repo) -> str:
    """The commit that was agreed on."""
    return str(repo.head().commit)


def write(root: Path, name: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("MEASURES = 'else'\n")


@pytest.mark.parametrize("hide", ["nothing", "commit", "assume-unchanged", "skip-worktree", "filter", "delete"])
def test_an_edited_harness_is_seen_however_it_is_hidden(repo: Repo, start: str, hide: str) -> None:
    assert changed_harness_files(repo, start, RULES) == []
    path = repo.root / "prepare.py"
    if hide in ("assume-unchanged", "skip-worktree"):
        git(repo.root, "update-index", f"--{hide}", "prepare.py")
    if hide == "filter":
        (repo.root / ".git" / "info" / "attributes").write_text("prepare.py filter=undo\n")
        git(repo.root, "config", "filter.undo.clean", "echo MEASURES = True")
    path.write_text("MEASURES = False\n")
    if hide == "commit":
        git(repo.root, "commit", "--quiet", "--all", "-m", "innocent")
    if hide == "delete":
        path.unlink()
    assert changed_harness_files(repo, start, RULES) == ["prepare.py"]
    with pytest.raises(UsageError, match=r"prepare\.py differ"):
        require_clean_start(repo, repo.head(), INCUMBENT, a_record(commit=start), RULES)


def test_git_replace_does_not_show_another_agreement(repo: Repo, start: str) -> None:
    (repo.root / "prepare.py").write_text("MEASURES = False\n")
    git(repo.root, "commit", "--quiet", "--all", "-m", "other")
    git(repo.root, "replace", start, "HEAD")
    assert changed_harness_files(repo, start, RULES) == ["prepare.py"]


def test_core_worktree_does_not_show_another_checkout(repo: Repo, start: str, tmp_path: Path) -> None:
    agreed = tmp_path / "agreed"
    git(repo.root, "clone", "--quiet", str(repo.root), str(agreed))
    (repo.root / "prepare.py").write_text("MEASURES = False\n")
    git(repo.root, "config", "core.worktree", str(agreed))
    assert changed_harness_files(repo, start, RULES) == ["prepare.py"]
    for path in agreed.glob("*.*"):
        path.rename(tmp_path / path.name)
    git(repo.root, "config", "core.worktree", str(tmp_path))  # above the checkout: git sees it as a folder of its own
    assert changed_harness_files(repo, start, RULES) == ["prepare.py"]


def test_a_folder_that_is_a_link_is_another_one_though_its_bytes_are_the_same(repo: Repo, start: str) -> None:
    (repo.root / "nightshift").rename(repo.root.parent / "moved")
    (repo.root / "nightshift").symlink_to(repo.root.parent / "moved")
    assert changed_harness_files(repo, start, RULES) == ["nightshift/evaluation/evaluate.py"]


def test_what_git_cannot_show_our_own_digest_does(repo: Repo, start: str) -> None:
    agreed = RULES.harness_tree(repo.root)
    assert changed_harness_files(repo, start, RULES, agreed) == []
    (repo.root / "nightshift" / "data.json").write_text("{}")  # no code: nothing that Python could import
    (named,) = changed_harness_files(repo, start, RULES, agreed)
    assert named.startswith(f"files beside the tracked ones ({agreed[:12]} then, ")


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize(
    ("name", "is_frozen"),
    [
        ("rules.toml", False),  # what it says is in the rules hash
        ("nightshift/evaluation/evaluate.py", True),
        ("nightshift/report/new.py", True),
        ("environments/arithmetic/nightshift_arithmetic/__init__.py", True),
        ("environments/arithmetic/nightshift_arithmetic/new.py", True),
        ("environments/other/nightshift_other/__init__.py", False),
        ("environments/arithmetic/README.md", False),
        ("docs/make.py", False),
        ("tests/test_mine.py", False),
    ],
)
def test_only_what_runs_is_frozen(repo: Repo, start: str, name: str, is_frozen: bool, is_committed: bool) -> None:
    path = repo.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("MEASURES = False\n")
    if is_committed:
        git(repo.root, "add", "--all")
        git(repo.root, "commit", "--quiet", "-m", "more")
    assert changed_harness_files(repo, start, RULES) == [name] * is_frozen
    if name.startswith("environments"):
        assert changed_harness_files(repo, start, GSM8K_TRL) == []

"""git, for real: what is committed, what is restored, what is cloned, and what is never touched or run."""

import os
import shutil
import sys
from pathlib import Path
from threading import Timer

import psutil
import pytest

from nightshift.campaign import git as git_module
from nightshift.campaign.git import CONFIG_NAME, Head, Repo
from nightshift.errors import UsageError
from tests.checkouts import MEASURING
from tests.conftest import CAMPAIGN, git
from tests.waiting import HANG_SECONDS, wait_for

CANDIDATE, INCUMBENT = b"lr = 2\n", b"lr = 1\n"
MESSAGE = "lr 1 -> 2\n\nwhy\n\nNightshift-Experiment: 0007\n"


@pytest.fixture
def repo(checkout: Path) -> Repo:
    (checkout / "train.toml").write_bytes(INCUMBENT)
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline")
    return Repo(checkout)


def test_a_commit_holds_the_submitted_bytes_and_nothing_else(repo: Repo) -> None:
    (repo.root / "train.toml").write_bytes(b"lr = 3 # edited meanwhile\n")
    (repo.root / "prepare.py").write_text("staged = True\n")
    (repo.root / "new.txt").write_text("untracked\n")
    git(repo.root, "add", "prepare.py")
    commit = repo.commit_files(repo.head(), {CONFIG_NAME: CANDIDATE}, MESSAGE)
    assert commit == repo.head()
    assert repo.config_at("HEAD") == CANDIDATE
    assert git(repo.root, "show", "--name-only", "--format=", "HEAD").split() == ["train.toml"]
    assert git(repo.root, "log", "-1", "--format=%(trailers:key=Nightshift-Experiment,valueonly)").strip() == "0007"
    status = git(repo.root, "status", "--porcelain").splitlines()
    assert sorted(status) == [" M train.toml", "?? new.txt", "M  prepare.py"]
    assert (repo.root / "train.toml").read_bytes() == b"lr = 3 # edited meanwhile\n"


@pytest.mark.parametrize("move", [("switch", "main"), ("switch", "--detach"), ("switch", "-c", "autoresearch/other")])
def test_nothing_is_committed_after_the_checkout_moved(repo: Repo, move: tuple[str, ...]) -> None:
    head = repo.head()
    git(repo.root, "branch", "--force", "main", "HEAD")
    git(repo.root, *move, "--quiet")
    (repo.root / "train.toml").write_bytes(CANDIDATE)
    with pytest.raises(UsageError, match="the checkout moved from autoresearch/"):
        repo.commit_files(head, {CONFIG_NAME: CANDIDATE}, MESSAGE)
    assert (repo.root / "train.toml").read_bytes() == CANDIDATE
    assert git(repo.root, "log", "--format=%s").splitlines() == ["baseline", "start"]


def test_a_lock_that_goes_in_time_only_delays_a_commit(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_module, "LOCK_SECONDS", HANG_SECONDS)
    lock = repo.root / ".git" / "index.lock"
    lock.touch()
    Timer(0.5, lock.unlink).start()
    commit = repo.commit_files(repo.head(), {CONFIG_NAME: CANDIDATE}, MESSAGE)
    assert repo.config_at("HEAD") == CANDIDATE
    assert repo.head() == commit
    assert git(repo.root, "diff", "--cached", "--name-only") == ""


def test_a_checkout_below_the_top_of_its_repository_is_refused(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch", CAMPAIGN)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "train.toml").write_bytes(INCUMBENT)
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "-m", "start")
    repo = Repo(tmp_path / "deep")
    with pytest.raises(UsageError, match=r"has no train\.toml at the top"):
        repo.files_at(str(repo.head().commit))


@pytest.mark.parametrize("commit", ["", "f" * 40, "--batch"])
def test_what_is_no_commit_holds_no_train_toml(repo: Repo, commit: str) -> None:
    """A record can name any."""
    assert repo.config_at(commit) is None
    with pytest.raises(UsageError, match="no readable commit"):
        repo.files_at(commit)


def test_a_clone_shares_nothing_and_does_not_know_where_it_is_from(checkout: Path, tmp_path: Path) -> None:
    (checkout / "train.toml").write_bytes(b"lr = 1\n")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--allow-empty", "-m", "baseline")
    git(checkout, "tag", "secret")
    repo, copy = Repo(checkout), tmp_path / "copy"
    repo.clone(repo.head(), copy)
    assert (copy / "train.toml").read_bytes() == b"lr = 1\n"
    assert git(copy, "branch", "--all", "--format=%(refname)").split() == [f"refs/heads/{CAMPAIGN}"]
    assert git(copy, "tag", "--list") == git(copy, "remote") == git(copy, "reflog") == ""
    inodes = {path.stat().st_ino for path in (checkout / ".git").rglob("*") if path.is_file()}
    ours = [path for path in (copy / ".git").rglob("*") if path.is_file()]
    assert inodes.isdisjoint(path.stat().st_ino for path in ours)
    assert not [path for path in ours if str(checkout).encode() in path.read_bytes()]


def test_nothing_that_a_person_or_an_agent_configured_runs(checkout, tmp_path, monkeypatch):
    home, marker, evil = tmp_path / "home", tmp_path / "marker", tmp_path / "evil.sh"
    (home / ".config" / "git").mkdir(parents=True)
    evil.write_text(f"#!/bin/sh\ntouch {marker}\ncat\n")
    evil.chmod(0o755)
    (home / ".config" / "git" / "attributes").write_text("* filter=evil\n")
    (home / ".gitconfig").write_text(
        f"[uploadpack]\n\tpackObjectsHook = {evil}\n[core]\n\tfsmonitor = {evil}\n"
        f'[filter "evil"]\n\tsmudge = {evil}\n\tclean = {evil}\n\tprocess = {evil}\n\trequired = true\n'
        f"[gpg]\n\tprogram = {evil}\n[user]\n\tname = Ada\n"
    )
    monkeypatch.setenv("HOME", str(home))
    for hook in ("pre-commit", "commit-msg", "post-commit", "reference-transaction"):
        shutil.copy(evil, checkout / ".git" / "hooks" / hook)
    (checkout / ".git" / "info" / "attributes").write_text("train.toml filter=evil\n")
    for key, value in (
        (f"url.ext::{evil} .insteadOf", str(tmp_path)),
        ("protocol.ext.allow", "always"),
        ("filter.evil.clean", "sed s/2/999/"),
        ("commit.gpgSign", "true"),
        ("core.hooksPath", ".git/hooks"),
    ):
        git(checkout, "config", key, value)
    repo, copy = Repo(checkout), tmp_path / "copy"
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    repo.clone(repo.head(), copy)
    assert (copy / MEASURING).read_text() == "MEASURES = True\n"
    for author in ("Ada", "Nightshift"):
        repo.commit_files(repo.head(), {CONFIG_NAME: CANDIDATE}, "kept\n")
        assert repo.config_at("HEAD") == CANDIDATE
        assert not marker.exists()
        with monkeypatch.context() as patch:
            patch.delenv("GIT_DIR")
            assert f"author {author} <nightshift@localhost>" in git(checkout, "cat-file", "commit", "HEAD")
        monkeypatch.setenv("HOME", str(tmp_path))  # nobody has an identity there
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)


def test_heads(repo: Repo, tmp_path: Path) -> None:
    git(repo.root, "tag", CAMPAIGN)  # is not the branch of its name
    assert repo.head().branch == CAMPAIGN
    git(repo.root, "update-ref", "refs/tags/HEAD", "HEAD")
    assert repo.head().branch == CAMPAIGN
    git(repo.root, "switch", "--quiet", "--detach")
    assert repo.head().branch == ""
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    assert Repo(nowhere).head() == Head("", None)


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("git", path=os.defpath) is None, reason="the system has no git of its own"
)
def test_a_git_that_comes_first_on_path_is_not_asked(repo, tmp_path, monkeypatch):
    program = tmp_path / "git"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert repo.head().branch == CAMPAIGN
    assert not (tmp_path / "asked").exists()


def test_what_git_starts_ends_with_it(checkout: Path) -> None:
    Repo(checkout)._run("-c", "alias.stay=!sleep 601 > /dev/null 2>&1 & echo $! > pid", "stay")
    pid = int((checkout / "pid").read_text())
    assert wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)

"""git for the night: a campaign branch of its own, a clone that shares nothing, a state that tells of strangers."""

from pathlib import Path

import psutil
import pytest

from nightshift.campaign.git import Repo
from nightshift.errors import UsageError
from tests.checkouts import MEASURING, wait_for
from tests.conftest import CAMPAIGN, git


def test_a_new_campaign_takes_a_free_name_and_touches_no_file(checkout: Path) -> None:
    git(checkout, "switch", "--quiet", "main")
    (checkout / "program.md").write_text("edited\n")
    (checkout / "new.txt").write_text("untracked\n")
    before = git(checkout, "status", "--porcelain")
    repo = Repo(checkout)
    first = repo.start_campaign("test-2")
    git(checkout, "switch", "--quiet", "main")
    second = repo.start_campaign("test")  # the fixture's branch, and the one just made, are taken
    assert (first.branch, second.branch) == ("autoresearch/test-2", "autoresearch/test-3")
    assert second == repo.head()
    assert git(checkout, "status", "--porcelain") == before
    assert git(checkout, "log", "--format=%s", second.branch).splitlines() == ["start"]


def test_a_campaign_needs_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    with pytest.raises(UsageError, match="no commit"):
        Repo(tmp_path).start_campaign("test")


def test_a_branch_that_is_in_the_way_of_all_campaigns_is_named_with_its_cure(checkout: Path) -> None:
    git(checkout, "switch", "--quiet", "main")
    git(checkout, "branch", "-D", CAMPAIGN)
    git(checkout, "branch", "autoresearch")
    with pytest.raises(UsageError, match="git branch -m autoresearch NEW-NAME"):
        Repo(checkout).start_campaign("test")


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
    (home / "attributes").write_text("* filter=evil\n")
    (home / ".config" / "git" / "attributes").write_text("* filter=evil\n")
    (home / ".gitconfig").write_text(
        f"[uploadpack]\n\tpackObjectsHook = {evil}\n[core]\n\tattributesFile = {home}/attributes\n"
        f"\thooksPath = {home}\n\tfsmonitor = {evil}\n\tsshCommand = {evil}\n\talternateRefsCommand = {evil}\n"
        f'[filter "evil"]\n\tsmudge = {evil}\n\tclean = {evil}\n\tprocess = {evil}\n\trequired = true\n'
        f'[url "ext::{evil} "]\n\tinsteadOf = {tmp_path}\n[protocol "ext"]\n\tallow = always\n'
        f"[credential]\n\thelper = {evil}\n[gpg]\n\tprogram = {evil}\n[user]\n\tname = Ada\n"
    )
    monkeypatch.setenv("HOME", str(home))
    git(checkout, "config", f"url.ext::{evil} .insteadOf", str(tmp_path))
    git(checkout, "config", "protocol.ext.allow", "always")
    repo, copy = Repo(checkout), tmp_path / "copy"
    repo.clone(repo.head(), copy)
    assert (copy / MEASURING).read_text() == "MEASURES = True\n"
    repo.commit_config(repo.head(), b"lr = 2\n", "kept\n")
    assert not marker.exists()
    assert "author Ada <nightshift@localhost>" in git(checkout, "cat-file", "commit", "HEAD")


def test_what_git_starts_ends_with_it(checkout: Path) -> None:
    Repo(checkout)._run("-c", "alias.stay=!sleep 601 > /dev/null 2>&1 & echo $! > pid", "stay")
    pid = int((checkout / "pid").read_text())
    assert wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)

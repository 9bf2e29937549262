"""The seal: whatever changes in a checkout while an agent is at work is put back, or ends the night by its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.errors import UsageError
from nightshift.experiment.seal import Checkout, restore, take
from tests.campaigns import a_record
from tests.conftest import git
from tests.rules import ARITHMETIC_TRL


@pytest.fixture
def watched(checkout: Path) -> Checkout:
    """A checkout with one closed experiment, and files that people leave."""
    write(checkout / "nightshift" / "loop.py")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "-m", "code")
    ledger = Ledger(checkout)
    record = ledger.reserve(a_record(), {"train.toml": b"lr = 0\n"})
    for name in ("job.json", "result.json", "metrics.jsonl", "evaluation.jsonl"):
        (ledger.run_dir(1) / name).write_text("{}\n")
    ledger.close(record)
    (ledger.runs_dir / "certify").mkdir()
    for name in ("journal.jsonl", "certify/comparison.json", "night.json"):
        (ledger.runs_dir / name).write_text("{}\n")
    (checkout / ".env").write_text("A=1\n")
    (checkout / "mine.toml").write_text("mine = 1\n")
    return Checkout(checkout, ARITHMETIC_TRL, ledger, Repo(checkout))


def rewrite_in_secret(path: Path) -> None:
    """Another content of the same size, with its times set back."""
    status = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def link(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/passwd")


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("evil\n")


LOOSE: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(("uv.toml", ".python-version", ".envrc", "tool.cfg", "setup.py", "sitecustomize.py"), write),
    **dict.fromkeys((".git/info/attributes", ".git/info/grafts", ".git/objects/info/alternates"), write),
    **dict.fromkeys((".git/shallow", ".git/config.worktree", ".git/hooks/pre-push", ".git/modules/a/config"), write),
    ".env": write, "mine.toml": Path.unlink, ".git/info/exclude": rewrite_in_secret, ".git/description": fifo,
    "compiled": Path.mkdir, "IPython": lambda path: write(path / "__init__.py"),
    "lines": link, "uv.lock": write, "runs/night.json": write,
}  # fmt: skip


@pytest.mark.parametrize("name", LOOSE)
def test_what_nothing_depends_on_yet_is_put_back_and_named(watched: Checkout, name: str) -> None:
    before, path = take(watched), watched.root / name
    was = path.read_bytes() if path.is_file() else None
    LOOSE[name](path)
    assert restore(before, watched) == (f"changed {name} in the checkout itself: put back",)
    assert (path.read_bytes() if os.path.lexists(path) else None) == was
    assert take(watched).parts == before.parts
    if LOOSE[name] is write:
        (aside,) = watched.root.glob("runs/agent/*-put-aside/*")
        assert aside.read_text() == "evil\n"


STOPS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a tracked file": ("prepare.py", rewrite_in_secret),
    "code of the harness": ("nightshift/new.py", write),
    "a record": ("runs/0001/record.json", rewrite_in_secret),
    "a submitted train.toml": ("runs/0001/train.toml", rewrite_in_secret),
    "a result": ("runs/0001/result.json", fifo),
    "a job": ("runs/0001/job.json", link),
    "old metrics": ("runs/0001/metrics.jsonl", fifo),
    "an old evaluation": ("runs/0001/evaluation.jsonl", rewrite_in_secret),
    "a folder of a run": ("runs/0001/incumbent/result.json", write),
    "the journal": ("runs/journal.jsonl", Path.unlink),
    "a certificate": ("runs/certify/comparison.json", rewrite_in_secret),
    "another certificate": ("runs/certify/2/comparison.json", write),
    "a record twice": ("runs/00001/record.json", write),
    "a record in other digits": ("runs/\u0660\u0660\u0660\u0662/record.json", write),
    "a number that is taken": ("runs/0002", Path.mkdir),
    "a link for a run": ("runs/0002", link),
    "another place": ("runs", lambda path: path.rename(path.parent / "notes.md") and path.symlink_to("notes.md")),
    "a model": ("runs/0001/model/model.safetensors", write),
}


@pytest.mark.parametrize("what", STOPS)
def test_a_change_to_what_counts_ends_the_night_and_is_named(watched: Checkout, what: str) -> None:
    name, change = STOPS[what]
    before = take(watched)
    change(watched.root / name)
    with pytest.raises(UsageError) as raised:
        restore(before, watched)
    assert name in raised.value.cause
    assert "changed in this checkout while the agent was at work" in raised.value.cause


def test_git_that_moved_ends_the_night(watched: Checkout) -> None:
    before = take(watched)
    git(watched.root, "branch", "stray")
    with pytest.raises(UsageError, match=r"^branches changed"):
        restore(before, watched)


def test_what_editors_people_and_pages_write_is_free(watched: Checkout) -> None:
    before = take(watched)
    for name in (
        "night.log",
        "notes.md",
        ".prepare.py.swp",
        "runs/report.html",
        "runs/agent/0002-1.log",
        ".git/FETCH_HEAD",
    ):
        write(watched.root / name)
    (watched.root / ".mypy_cache").mkdir()
    (watched.root / "program.md").write_text("Think.\n")
    git(watched.root, "tag", "mine")
    git(watched.root, "update-ref", "refs/remotes/origin/main", "HEAD")
    with watched.ledger.lock():
        assert not watched.ledger.is_running()
    assert restore(before, watched) == ()


def test_a_linked_work_tree_is_watched_where_git_keeps_it(watched: Checkout, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    git(watched.root, "worktree", "add", "--quiet", "-b", "autoresearch/linked", str(linked))
    there = Checkout(linked, ARITHMETIC_TRL, Ledger(linked), Repo(linked))
    before = take(there)
    write(watched.root / ".git" / "info" / "attributes")
    (note,) = restore(before, there)
    assert note == f"changed {watched.root}/.git/info/attributes in the checkout itself: put back"


def test_of_runs_in_flight_what_their_workers_write_is_left_out_and_nothing_else(watched: Checkout) -> None:
    run_dir = watched.ledger.run_dir(1)
    watched = replace(watched, in_flight=lambda: [run_dir])
    before = take(watched)
    for name in ("metrics.jsonl", "result.json", "weights/model", "worker.log", "incumbent/trainer.log"):
        write(run_dir / name)
    assert restore(before, watched) == ()
    for name in ("job.json", "record.json", "train.toml", "../0002/metrics.jsonl"):
        before = take(watched)
        write(run_dir / name)
        with pytest.raises(UsageError, match="changed in this checkout while the agent was at work"):
            restore(before, watched)

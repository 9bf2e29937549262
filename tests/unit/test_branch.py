"""Which branch a start works on, and how a campaign begins: with real git, up to the first experiment."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from nightshift.campaign.git import Head, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Request
from nightshift.errors import ConfigError, UsageError
from nightshift.experiment import branch
from nightshift.experiment.experiment import run_experiment
from nightshift.experiment.setup import Setup
from nightshift.night import start
from nightshift.night.state import NightRequest, NightState, save
from tests.campaigns import replace
from tests.checkouts import CAMPAIGN, MEASURING
from tests.conftest import git
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_setup import GOOD, POOR, furnish, make_setup, write
from tests.stand_ins import quick

RULES = quick(ARITHMETIC_TRL)


@pytest.fixture
def setup(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """On main, without a campaign."""
    furnish(checkout)
    made = make_setup(checkout, RULES, monkeypatch)
    write(made, POOR)
    git(checkout, "commit", "--quiet", "--all", "--amend", "-m", "start")
    git(checkout, "branch", "--force", "main", "HEAD")
    git(checkout, "switch", "--quiet", "main")
    git(checkout, "branch", "--delete", "--force", CAMPAIGN)
    return made


def today(setup: Setup) -> str:
    return f"autoresearch/{setup.now().astimezone():%b%d}".lower()


def begin(setup: Setup, name: str | None = None) -> tuple[str, list[str], str]:
    """The branch that a start leaves checked out, its subjects, and the line that the start printed."""
    setup.reporter.notes.clear()
    with setup.ledger.controller():
        setup.begin(name)
    assert git(setup.root, "status", "--porcelain", "--", "train.toml", MEASURING) == ""
    subjects = git(setup.root, "log", "--format=%s").splitlines()
    return setup.repo.head().branch, subjects, "\n".join(setup.reporter.notes)


def refusal(setup: Setup, name: str | None = None) -> str:
    before = git(setup.root, "for-each-ref") + (setup.root / ".git" / "HEAD").read_text()
    with pytest.raises(UsageError) as refused:
        begin(setup, name)
    assert git(setup.root, "for-each-ref") + (setup.root / ".git" / "HEAD").read_text() == before
    return str(refused.value)


def measured(setup: Setup, rate: str | None = None) -> Setup:
    """The same after an experiment on the branch that is checked out."""
    if rate:
        write(setup, rate)
    run_experiment(Request(), replace(setup, rules_hash=RULES.hash(setup.root)))
    return setup


def at_main(setup: Setup) -> None:
    """HEAD stays where it is."""


def detach(setup: Setup) -> None:
    git(setup.root, "switch", "--quiet", "--detach")


def edit_files(setup: Setup) -> None:
    write(setup, GOOD)
    (setup.root / MEASURING).write_text("MEASURES = 'otherwise'\n")
    (setup.root / "nightshift/evaluation/environment.py").write_text("NEW = True\n")
    git(setup.root, "add", "train.toml")  # staged or not
    (setup.root / "prepare.py").write_text("measures nothing\n")


def own_branch(setup: Setup) -> None:
    git(setup.root, "switch", "--quiet", "--create", "mine")


def own_branch_edited(setup: Setup) -> None:
    own_branch(setup)
    write(setup, GOOD)


def other_default(setup: Setup) -> None:
    git(setup.root, "switch", "--quiet", "--create", "develop")
    git(setup.root, "update-ref", "refs/remotes/origin/develop", "HEAD")
    git(setup.root, "symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/develop")


CREATED = "created branch {today} from {origin}; no file changes. To go back: git switch {back}"
STARTS = [
    (at_main, "{today}", [], CREATED.format(today="{today}", origin="main", back="main")),
    (detach, "{today}", [], CREATED.format(today="{today}", origin="commit {short}", back="--detach {long}")),
    (other_default, "{today}", [], CREATED.format(today="{today}", origin="develop", back="develop")),
    (
        edit_files,
        "{today}",
        ["Start campaign: 3 files as they were"],
        "created branch {today} from main; its first commit contains your train.toml, " + MEASURING + ", "
        "nightshift/evaluation/environment.py, and main is unchanged. To go back: git switch main",
    ),
    (own_branch, "mine", [], "branch mine becomes a campaign"),
    (
        own_branch_edited,
        "mine",
        ["Start campaign: train.toml as it was"],
        "branch mine becomes a campaign; its first commit contains your train.toml",
    ),
]


@pytest.mark.parametrize(("prepare", "name", "commits", "line"), STARTS, ids=[start[0].__name__ for start in STARTS])
def test_a_start_works_on(setup: Setup, prepare: Callable[[Setup], None], name, commits, line) -> None:
    prepare(setup)
    main, source = git(setup.root, "rev-parse", "main").strip(), (setup.root / "train.toml").read_bytes()
    words = {"today": today(setup), "short": main[:7], "long": main[:12]}
    planned = branch.next_start(setup.ledger, setup.repo)
    assert branch.next_start(setup.ledger, setup.repo) == planned, "a look changes nothing"
    found, subjects, told = begin(setup)
    assert (found, subjects, told) == (name.format(**words), [*commits, "start"], line.format(**words))
    assert found in planned
    assert git(setup.root, "rev-parse", "main").strip() == main
    assert setup.repo.config_at("HEAD") == source == (setup.root / "train.toml").read_bytes()
    measured(setup)
    assert setup.ledger.record(1).branch == found
    assert begin(setup)[::2] == (found, "")  # the next experiment


def test_the_campaign_that_began_here_is_continued_and_a_name_begins_another(setup: Setup) -> None:
    name, _, _ = begin(setup)
    measured(measured(setup), GOOD)
    kept = git(setup.root, "rev-parse", "HEAD")
    git(setup.root, "switch", "--quiet", "main")
    later = replace(setup, now=lambda: setup.now() + timedelta(days=1))
    found, _, line = begin(later)
    assert (found, git(setup.root, "rev-parse", "HEAD")) == (name, kept)
    assert (
        f"continued {name}, a campaign that began at this commit (experiments so far: 2); --branch NEW begins" in line
    )
    assert (setup.root / "train.toml").read_bytes() == setup.repo.config_at("HEAD")
    git(setup.root, "switch", "--quiet", "main")
    write(setup, "9e-6")
    message = refusal(setup)
    assert "train.toml" in message
    assert message.endswith(f"git stash && git switch {name}")
    found, subjects, _ = begin(setup, "second")
    assert (found, subjects) == ("second", ["Start campaign: train.toml as it was", "start"])
    measured(setup)
    git(setup.root, "switch", "--quiet", "main")
    assert begin(setup)[0] == "second"  # the last one; its first commit has another train.toml
    git(setup.root, "switch", "--quiet", "main")
    assert f"--branch {name}x" not in refusal(setup, "main")
    other = replace(setup, rules_hash="other", now=later.now)
    assert begin(other)[0] == today(later)  # other rules: another campaign


def test_an_edit_is_the_candidate_of_a_campaign_that_kept_nothing_yet(setup: Setup) -> None:
    begin(setup)
    measured(setup)
    git(setup.root, "switch", "--quiet", "main")
    source = write(setup, GOOD)
    with setup.ledger.controller():
        setup.begin(None)
    assert (setup.root / "train.toml").read_bytes() == source
    assert run_experiment(Request(), setup).decision.action == "keep"


@pytest.mark.parametrize("name", ["a b", "refs/../x", "-x", "HEAD", "autoresearch"])
def test_a_name_that_git_refuses_is_one_line(setup: Setup, name: str) -> None:
    git(setup.root, "branch", "autoresearch/x")
    assert refusal(setup, name).endswith(("Choose another.", "choose another name: --branch NAME."))


def test_a_campaign_whose_first_commit_was_made_in_two_steps_is_continued(setup: Setup) -> None:
    write(setup, GOOD)
    begin(setup)
    write(setup, POOR)
    name, subjects, _ = begin(setup)
    assert subjects == ["Start campaign: train.toml as it was"] * 2 + ["start"]
    measured(setup)
    git(setup.root, "switch", "--quiet", "main")
    assert begin(setup)[0] == name


def test_which_branch_is_the_default_one(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone of a checkout with a campaign has that branch as its remote's default."""
    name, _, _ = begin(setup)
    git(setup.root, "update-ref", f"refs/remotes/origin/{name}", "HEAD")
    git(setup.root, "symbolic-ref", "refs/remotes/origin/HEAD", f"refs/remotes/origin/{name}")
    monkeypatch.setenv("HOME", str(setup.root.parent))
    (setup.root.parent / ".gitconfig").write_text("[init]\ndefaultBranch = trunk\n")
    assert [b for b in (name, "main", "trunk", "mine", "") if setup.repo.is_default(b)] == ["main", "trunk", ""]


@pytest.mark.parametrize("is_submodule", [False, True])
def test_measuring_files_in_a_repository_of_their_own_are_refused_before_a_branch_is_made(setup, is_submodule) -> None:
    folder = setup.root / "nightshift/engines/trl/own"
    folder.mkdir(parents=True)
    (folder / "scores.py").write_text("SCORES = 1\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "own")
    if is_submodule:
        git(setup.root, "add", "nightshift/engines/trl/own")
    assert "nightshift/engines/trl/own is a git repository of its own" in refusal(setup)


def unfinished_night(setup: Setup) -> NightRequest:
    """A night on a campaign's branch that was killed; main is checked out again."""
    name, _, _ = begin(setup)
    request = NightRequest("tpe", engine="trl", budget_seconds=RULES.budget_seconds)
    save(setup.ledger, NightState(request, "rules", setup.now().isoformat(), 1, branch=name))
    git(setup.root, "switch", "--quiet", "main")
    return request


@pytest.mark.parametrize("state", ["clean", "rebase", "dirty", "other code"])
def test_the_same_command_resumes_the_night_on_its_branch_or_prints_what_to_type(setup: Setup, state: str) -> None:
    request = unfinished_night(setup)
    if state == "rebase":
        (setup.root / ".git" / "rebase-merge").mkdir()
    if state == "dirty":
        write(setup, GOOD)
    if state == "other code":
        (setup.root / MEASURING).write_text("MEASURES = 'by main'\n")
        git(setup.root, "commit", "--quiet", "--all", "-m", "pull")
    if state == "clean":
        start.open_night(setup.root, request, setup.reporter, None)
        assert setup.repo.head().branch == today(setup)
    else:
        words = {"rebase": "git rebase --abort", "dirty": "git stash &&", "other code": "nightshift/ differs"}
        with pytest.raises(UsageError, match=words[state]):
            start.open_night(setup.root, request, setup.reporter, None)
        assert setup.repo.head().branch == "main"


def test_a_config_that_the_engine_refuses_creates_nothing(setup: Setup) -> None:
    (setup.root / "train.toml").write_text("[orchestrator]\nbatch_size = 3\ngroup_size = 4\n")
    with pytest.raises(ConfigError):
        begin(setup)
    assert git(setup.root, "branch", "--format=%(refname:short)").split() == ["main"]


def conflict(setup: Setup, *command: str) -> None:
    own_branch(setup)
    write(setup, GOOD)
    git(setup.root, "commit", "--quiet", "--all", "-m", "mine")
    git(setup.root, "switch", "--quiet", "main")
    write(setup, "9e-6")
    git(setup.root, "commit", "--quiet", "--all", "-m", "theirs")
    with pytest.raises(subprocess.CalledProcessError):
        git(setup.root, *command)


@pytest.mark.parametrize(
    "command", ["rebase mine", "merge mine", "cherry-pick mine", "revert --no-edit HEAD~1", "bisect"]
)
def test_what_the_user_has_not_finished_is_refused_in_one_line(setup: Setup, command: str) -> None:
    if command == "bisect":
        git(setup.root, "bisect", "start")
    else:
        conflict(setup, *command.split())
    operation = command.split()[0]
    ends = "git bisect reset" if operation == "bisect" else f"git {operation} --abort"
    assert refusal(setup) == f"a git {operation} is not finished in this checkout. Finish it, or: {ends}"


def test_a_folder_without_git_and_one_without_a_commit_are_told_what_to_type(setup: Setup, tmp_path: Path) -> None:
    for words in ([], ["init", "--quiet", "."]):
        folder = tmp_path / f"zip{len(words)}"
        folder.mkdir()
        if words:
            git(folder, *words)
        with pytest.raises(UsageError, match="git init && git add -A && git commit"):
            replace(setup, root=folder, repo=Repo(folder), ledger=Ledger(folder)).begin(None)


def kill_at(setup: Setup, number: int) -> bool:
    """Begin in a process that is killed before the git command of that number that writes. False without a kill."""
    pid = os.fork()
    if pid == 0:
        run_once, calls = Repo._run_once, []

        def counted(repo: Repo, *arguments: str, **options: object) -> object:
            if {
                "hash-object",
                "read-tree",
                "update-index",
                "write-tree",
                "commit-tree",
                "update-ref",
                "symbolic-ref",
            } & {*arguments} and "--quiet" not in arguments:
                calls.append(arguments)
                if len(calls) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return run_once(repo, *arguments, **options)

        Repo._run_once = counted
        setup.begin(None)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("prepare", [at_main, edit_files, own_branch_edited])
def test_a_start_that_is_killed_between_two_steps_goes_on(setup: Setup, prepare: Callable[[Setup], None]) -> None:
    prepare(setup)
    source, number = (setup.root / "train.toml").read_bytes(), 1
    while kill_at(setup, number):
        number += 1
    assert number > (8 if prepare is edit_files else 2)
    name, subjects, _ = begin(setup)
    assert name == ("mine" if prepare is own_branch_edited else today(setup))
    starts = {at_main: [], edit_files: ["Start campaign: 3 files as they were"]}
    assert subjects == [*starts.get(prepare, ["Start campaign: train.toml as it was"]), "start"]
    assert setup.repo.config_at("HEAD") == source == (setup.root / "train.toml").read_bytes()
    branches = git(setup.root, "branch", "--format=%(refname:short)").split()
    assert sorted(branches) == sorted({"main", name})
    assert git(setup.root, "fsck", "--no-dangling") == ""


def test_starts_at_the_same_moment_in_two_worktrees_have_a_branch_each(setup: Setup, tmp_path: Path) -> None:
    roots = [setup.root, *(tmp_path / f"worktree{number}" for number in range(3))]
    for root in roots[1:]:
        git(setup.root, "worktree", "add", "--quiet", "--detach", str(root))
    at = time.time() + 0.5
    pids = []
    for root in roots:
        if (pid := os.fork()) == 0:
            time.sleep(max(at - time.time(), 0.0))
            replace(setup, root=root, repo=Repo(root), ledger=Ledger(root)).begin(None)
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    names = {Repo(root).head().branch for root in roots}
    assert names == {today(setup), *(f"{today(setup)}-{number}" for number in (2, 3, 4))}


def test_a_branch_that_another_worktree_creates_after_the_look_is_left_alone(setup, monkeypatch):
    git(setup.root, "branch", "taken")
    head, branches, looks = Head("taken", setup.repo.head().commit), Repo.branches, [{}]
    monkeypatch.setattr(Repo, "branches", lambda repo, *options: looks.pop() if looks else branches(repo, *options))
    assert not setup.repo.create_branch(head)
    assert setup.repo.head().branch == "main"

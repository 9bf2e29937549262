"""Which branch a start works on, and how a campaign begins: with real git, up to the first experiment."""

import contextlib
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Request
from nightshift.errors import ConfigError, UsageError
from nightshift.experiment import checkout as campaign_checkout
from nightshift.experiment.experiment import Controller
from nightshift.night import start
from nightshift.night.state import NightRequest, NightState, save
from tests.campaigns import replace
from tests.checkouts import CAMPAIGN, MEASURING
from tests.conftest import git
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_controller import GOOD, POOR, furnish, make_controller, with_bench, write
from tests.stand_ins import quick

RULES = quick(ARITHMETIC_TRL)


@pytest.fixture
def controller(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """On main, without a campaign."""
    furnish(checkout)
    made = make_controller(checkout, RULES, monkeypatch)
    write(made, POOR)
    git(checkout, "commit", "--quiet", "--all", "--amend", "-m", "start")
    git(checkout, "branch", "--force", "main", "HEAD")
    git(checkout, "switch", "--quiet", "main")
    git(checkout, "branch", "--delete", "--force", CAMPAIGN)
    return made


def today(controller: Controller) -> str:
    return f"autoresearch/{controller.now().astimezone():%b%d}".lower()


def begin(controller: Controller, name: str | None = None) -> tuple[str, list[str], str]:
    """The branch that a start leaves checked out, its subjects, and the line that the start printed."""
    controller.reporter.notes.clear()
    with controller.ledger.lock():
        controller.begin(name)
    assert git(controller.bench.root, "status", "--porcelain", "--", "train.toml", MEASURING) == ""
    subjects = git(controller.bench.root, "log", "--format=%s").splitlines()
    return controller.repo.head().branch, subjects, "\n".join(controller.reporter.notes)


def refusal(controller: Controller, name: str | None = None) -> str:
    before = git(controller.bench.root, "for-each-ref") + (controller.bench.root / ".git" / "HEAD").read_text()
    with pytest.raises(UsageError) as refused:
        begin(controller, name)
    assert git(controller.bench.root, "for-each-ref") + (controller.bench.root / ".git" / "HEAD").read_text() == before
    return str(refused.value)


def measured(controller: Controller, rate: str | None = None) -> Controller:
    """The same after an experiment on the branch that is checked out."""
    if rate:
        write(controller, rate)
    with_bench(controller, rules_hash=RULES.hash(controller.bench.root)).run(Request())
    return controller


def at_main(controller: Controller) -> None:
    """HEAD stays where it is."""


def detach(controller: Controller) -> None:
    git(controller.bench.root, "switch", "--quiet", "--detach")


def edit_files(controller: Controller) -> None:
    write(controller, GOOD)
    (controller.bench.root / MEASURING).write_text("MEASURES = 'otherwise'\n")
    (controller.bench.root / "nightshift/evaluation/environment.py").write_text("NEW = True\n")
    git(controller.bench.root, "add", "train.toml")  # staged or not
    (controller.bench.root / "prepare.py").write_text("measures nothing\n")


def own_branch(controller: Controller) -> None:
    git(controller.bench.root, "switch", "--quiet", "--create", "mine")


def own_branch_edited(controller: Controller) -> None:
    own_branch(controller)
    write(controller, GOOD)


def other_default(controller: Controller) -> None:
    git(controller.bench.root, "switch", "--quiet", "--create", "develop")
    git(controller.bench.root, "update-ref", "refs/remotes/origin/develop", "HEAD")
    git(controller.bench.root, "symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/develop")


CREATED = "new branch {today} from {origin}; {origin} is unchanged. To go back: git switch {back}"
STARTS = [
    (at_main, "{today}", [], CREATED.format(today="{today}", origin="main", back="main")),
    (detach, "{today}", [], CREATED.format(today="{today}", origin="commit {short}", back="--detach {long}")),
    (other_default, "{today}", [], CREATED.format(today="{today}", origin="develop", back="develop")),
    (
        edit_files,
        "{today}",
        ["Start campaign: add 3 uncommitted files"],
        "new branch {today} from main; its first commit contains your train.toml, " + MEASURING + ", "
        "nightshift/evaluation/environment.py; main is unchanged. To go back: git switch main",
    ),
    (own_branch, "mine", [], "branch mine becomes a campaign"),
    (
        own_branch_edited,
        "mine",
        ["Start campaign: add 1 uncommitted file"],
        "branch mine becomes a campaign; its first commit contains your train.toml",
    ),
]


@pytest.mark.parametrize(("prepare", "name", "commits", "line"), STARTS, ids=[start[0].__name__ for start in STARTS])
def test_a_start_works_on(controller: Controller, prepare: Callable[[Controller], None], name, commits, line) -> None:
    prepare(controller)
    root = controller.bench.root
    main, source = git(root, "rev-parse", "main").strip(), (root / "train.toml").read_bytes()
    words = {"today": today(controller), "short": main[:7], "long": main[:12]}
    planned = campaign_checkout.next_start(controller.ledger, controller.repo)
    assert campaign_checkout.next_start(controller.ledger, controller.repo) == planned, "a look changes nothing"
    found, subjects, told = begin(controller)
    assert (found, subjects, told) == (name.format(**words), [*commits, "start"], line.format(**words))
    assert found in planned
    assert git(controller.bench.root, "rev-parse", "main").strip() == main
    assert controller.repo.config_at("HEAD") == source == (controller.bench.root / "train.toml").read_bytes()
    measured(controller)
    assert controller.ledger.record(1).branch == found
    assert begin(controller)[::2] == (found, "")  # the next experiment


def test_the_campaign_that_began_here_is_continued_and_a_name_begins_another(controller: Controller) -> None:
    name, _, _ = begin(controller)
    measured(measured(controller), GOOD)
    kept = git(controller.bench.root, "rev-parse", "HEAD")
    git(controller.bench.root, "switch", "--quiet", "main")
    later = replace(controller, now=lambda: controller.now() + timedelta(days=1))
    found, _, line = begin(later)
    assert (found, git(controller.bench.root, "rev-parse", "HEAD")) == (name, kept)
    assert f"branch {name} continues, a campaign that began at this commit (experiments so far: 2)" in line
    assert (controller.bench.root / "train.toml").read_bytes() == controller.repo.config_at("HEAD")
    git(controller.bench.root, "switch", "--quiet", "main")
    write(controller, "9e-6")
    message = refusal(controller)
    assert "train.toml" in message
    assert message.endswith(f"git stash && git switch {name}")
    found, subjects, _ = begin(controller, "second")
    assert (found, subjects) == ("second", ["Start campaign: add 1 uncommitted file", "start"])
    measured(controller)
    git(controller.bench.root, "switch", "--quiet", "main")
    assert begin(controller)[0] == "second"  # the last one; its first commit has another train.toml
    git(controller.bench.root, "switch", "--quiet", "main")
    other = replace(with_bench(controller, rules_hash="other"), now=later.now)
    assert begin(other)[0] == today(later)  # other rules: another campaign


@pytest.mark.parametrize("name", ["a b", "-x", "autoresearch"])
def test_a_name_that_git_refuses_is_one_line(controller: Controller, name: str) -> None:
    git(controller.bench.root, "branch", "autoresearch/x")
    assert refusal(controller, name).endswith(("Choose another name.", "choose another name: --branch NAME."))


def test_the_same_command_on_another_branch_prints_what_to_type(controller: Controller) -> None:
    name, _, _ = begin(controller)
    request = NightRequest("tpe", engine="trl", budget_seconds=RULES.budget_seconds)
    save(controller.ledger, NightState(request, "rules", started=controller.now().isoformat(), first=1, branch=name))
    git(controller.bench.root, "switch", "--quiet", "main")
    with pytest.raises(UsageError, match=f"git switch {name} and run the command again"):
        start.open_night(controller.bench.root, request, controller.reporter, None)
    assert controller.repo.head().branch == "main"


def test_a_config_that_the_engine_refuses_creates_nothing(controller: Controller) -> None:
    (controller.bench.root / "train.toml").write_text("[orchestrator]\nbatch_size = 3\ngroup_size = 4\n")
    with pytest.raises(ConfigError):
        begin(controller)
    assert git(controller.bench.root, "branch", "--format=%(refname:short)").split() == ["main"]


@pytest.mark.parametrize("command", ["rebase --root --exec false", "merge --no-ff --no-commit mine", "bisect start"])
def test_what_the_user_has_not_finished_is_refused_in_one_line(controller: Controller, command: str) -> None:
    own_branch(controller)
    git(controller.bench.root, "commit", "--quiet", "--allow-empty", "-m", "mine")
    git(controller.bench.root, "switch", "--quiet", "main")
    with contextlib.suppress(subprocess.CalledProcessError):
        git(controller.bench.root, *command.split())
    operation = command.split()[0]
    assert refusal(controller) == f"a git {operation} is not finished in this checkout. Finish or abort it."


def test_a_folder_without_git_and_one_without_a_commit_are_told_what_to_type(controller, tmp_path) -> None:
    for words in ([], ["init", "--quiet", "."]):
        folder = tmp_path / f"zip{len(words)}"
        folder.mkdir()
        if words:
            git(folder, *words)
        with pytest.raises(UsageError, match="git init && git add -A && git commit"):
            replace(with_bench(controller, root=folder), repo=Repo(folder), ledger=Ledger(folder)).begin(None)

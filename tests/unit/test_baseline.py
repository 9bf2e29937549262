"""A baseline that was made on `main` is a campaign's, where all that could tell them apart is the same."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.campaign.records import Failure, Request
from nightshift.cli.run import plan
from nightshift.errors import Interrupted
from nightshift.experiment import admission
from nightshift.experiment.admission import fitting_baseline
from nightshift.experiment.experiment import run_experiment
from nightshift.experiment.setup import Setup
from tests.campaigns import replace
from tests.checkouts import MEASURING
from tests.conftest import git
from tests.stand_in_setup import GOOD, POOR, furnish, make_setup, write
from tests.unit.test_experiment import BAD, RULES, run, tried

CAMPAIGN = "autoresearch/after-main"


@pytest.fixture
def setup(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """On `main`, with a train.toml that is committed."""
    furnish(checkout)
    made = make_setup(checkout, RULES, monkeypatch)
    git(checkout, "switch", "--quiet", "main")
    write(made, POOR)
    git(checkout, "commit", "--quiet", "--all", "-m", "train.toml as shipped")
    return made


def branched(setup: Setup) -> Setup:
    git(setup.root, "switch", "--quiet", "-c", CAMPAIGN)
    return setup


def interrupt(*_: object) -> None:
    raise Interrupted("stopped by SIGKILL, say")


def num_trained(setup: Setup) -> int:
    return len(list(setup.ledger.runs_dir.glob("*/job.json")))


def test_the_first_run_on_a_branch_made_after_it_costs_no_training(setup: Setup) -> None:
    made = run(setup)
    branched(setup)
    record = run(setup)
    assert num_trained(setup) == 1
    assert (record.number, record.baseline, record.branch) == (2, made.number, CAMPAIGN)
    assert (record.status, record.parent, record.decided) == ("keep", None, 2)
    assert record.result == made.result
    assert record.git_action == "baseline: nothing to commit"
    assert record.judgement.standing.incumbent == made.score
    assert "made on main" in record.proposal.description
    assert setup.ledger.files_dir(record) == setup.ledger.run_dir(made.number)


def test_a_change_is_compared_with_it_at_once(setup: Setup) -> None:
    made = run(setup)
    branched(setup)
    record = tried(setup, GOOD)
    assert num_trained(setup) == 2
    assert (record.number, record.parent, record.status) == (3, 2, "keep")
    assert setup.ledger.record(2).baseline == made.number
    assert (made.result.seed, record.result.seed) == (RULES.seed(0), RULES.seed(1))


def _other_commit(setup: Setup) -> Setup:
    (setup.root / "program.md").write_text("Be lazy.\n")
    git(setup.root, "commit", "--quiet", "--all", "-m", "another commit")
    return setup


def _other_config(setup: Setup) -> Setup:
    write(setup, BAD)
    git(setup.root, "commit", "--quiet", "--all", "-m", "another config")
    return setup


def _other_rules(setup: Setup) -> Setup:
    rules = setup.rules.with_budget(setup.rules.budget_seconds + 1)
    return replace(setup, rules=rules, rules_hash=rules.hash(setup.root))


@pytest.mark.parametrize("change", [_other_commit, _other_config, _other_rules])
def test_where_anything_differs_it_is_made(setup: Setup, change: Callable[[Setup], Setup]) -> None:
    run(setup)
    setup = change(setup)
    branched(setup)
    assert run_experiment(Request(), setup).baseline is None


def test_what_was_tried_on_main_with_other_changes_is_not_a_baseline(setup: Setup) -> None:
    tried(setup, GOOD)  # not as committed
    write(setup, POOR)
    branched(setup)
    assert run(setup).baseline is None


def test_the_first_that_fits_is_taken_not_the_one_that_came_out_low(setup: Setup) -> None:
    run(setup)
    git(setup.root, "switch", "--quiet", "-c", "another")
    run(setup)
    branched(setup)
    assert run(setup).baseline == 1


def test_one_made_with_code_that_is_not_committed_is_not_taken(setup: Setup) -> None:
    (setup.root / MEASURING).write_text("MEASURES = 'better'\n")
    run(replace(setup, rules_hash=RULES.hash(setup.root)))
    git(setup.root, "checkout", "--quiet", MEASURING)
    branched(setup)
    assert fitting_baseline(setup) is None


def test_a_kill_while_it_is_taken_over_is_made_good_by_the_next_start(setup, monkeypatch):
    run(setup)
    branched(setup)
    monkeypatch.setattr(admission, "close", interrupt)
    with pytest.raises(Interrupted):
        run(setup)
    monkeypatch.undo()
    setup = replace(setup, ledger=type(setup.ledger)(setup.root))
    record = run(setup)
    assert (record.number, record.baseline) == (3, 1)
    assert setup.ledger.record(2).failure is Failure.INTERRUPTED


def test_a_dry_run_says_whose_runs_begin_the_campaign(setup: Setup) -> None:
    run(setup)
    branched(setup)
    write(setup, GOOD)
    assert plan(Request(), setup) == [
        "baseline: the run of 0001, made on main, begins this campaign",
        "change:   trainer.optim.lr 6e-7 -> 3e-6",
    ]
    assert setup.ledger.numbers() == [1]


def test_what_was_said_on_main_is_not_said_of_the_campaign(setup: Setup) -> None:
    run(setup, description="my own", prediction="+9 pp", notes=("a note",))
    branched(setup)
    record = run(setup, description="the start")
    assert record.proposal.description == "the start: baseline: the run of 0001, made on main"
    assert (record.proposal.prediction, record.proposal.notes) == (None, ())

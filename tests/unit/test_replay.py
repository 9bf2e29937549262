"""benchmarks/replay.py: a campaign decided again; the same constants give the same verdicts, others may not."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Failure, Record
from tests.campaigns import a_record, judged, replace, stored
from tests.recorded_nights import records
from tests.rules import ARITHMETIC_TRL

from replay import campaigns, current_constants, main, replay, table  # isort: skip  tests.recorded_nights finds it

RECORDED = Path(__file__).parents[1] / "fixtures/judgements-of-one-run.json"
# A baseline, keeps, a near tie, a collapse, a crash, a last keep.
STORY = [0.255, 0.33, 0.44, 0.445, 0.20, None, 0.52]
UNSURE = {"seed_sd": 0.5}  # one run says next to nothing: nothing is kept


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`runs/` of a small campaign, with what was never decided."""
    told = [*judged(STORY, num_examples=1000), a_record(status="crash", failure=Failure.MACHINERY), a_record()]
    return stored(tmp_path_factory.mktemp("campaign"), told).runs_dir


def decided(runs_dir: Path) -> list[Record]:
    (found,) = campaigns(Ledger(runs_dir, runs_dir).records())
    return found


def test_the_recorded_constants_give_the_recorded_verdicts_and_numbers(runs_dir: Path) -> None:
    old = decided(runs_dir)
    again = replay(old, {})
    assert [record.number for record in old] == [1, 2, 3, 4, 5, 6, 7]
    assert [*again.decided] == old
    assert len(again.kept) >= 3, "the campaign has no story to replay"
    assert "*" not in table(old, again)


@pytest.mark.parametrize("night", ["random-0", "tpe-0"])
def test_a_recorded_night_is_decided_as_version_0_2_decides_it_from_one_run_of_the_baseline(night: str) -> None:
    """Verdict, delta, its standard deviation and P(better) of each experiment, as 0.2.0 computed them."""
    recorded = json.loads(RECORDED.read_bytes())[night]
    again = replay(records(night), {})
    for new, (status, *numbers) in zip(again.decided, recorded, strict=True):
        assert new.judgement is not None
        assert new.status == status
        found = new.judgement.delta, new.judgement.delta_stderr, new.judgement.p_better
        assert [*found] == [None if number is None else pytest.approx(number, abs=1e-9) for number in numbers]
    assert len(replay(records(night), UNSURE).kept) == 1, "the baseline alone"


def test_a_child_of_what_is_not_kept_now_meets_the_incumbent(runs_dir: Path) -> None:
    again = replay(decided(runs_dir), UNSURE)
    assert [record.number for record in again.decided if record.is_keep] == [1]
    assert {record.parent for record in again.decided[1:]} == {1}


def test_settings_are_a_repeat_of_the_parent_that_is_replayed() -> None:
    """0003 has the settings of 0002. Where 0002 is not kept, it is an idea tried on the baseline."""
    first, second, third = judged([0.50, 0.58, 0.59])
    third = replace(third, parent=2, effective_hash=second.effective_hash)
    _, kept, repeat = replay([first, second, third], {}).decided
    assert kept.is_keep
    assert repeat.judgement is not None
    assert repeat.judgement.delta is None
    unsure = replay([first, second, third], UNSURE).decided
    assert [(record.status, record.parent) for record in unsure] == [("keep", None), ("discard", 1), ("discard", 1)]
    assert unsure[2].judgement is not None
    assert unsure[2].judgement.delta is not None


def test_the_constants_are_those_of_this_checkout_but_for_the_changes(runs_dir: Path) -> None:
    constants = current_constants(decided(runs_dir), {"seed_sd": 0.5})
    assert replace(ARITHMETIC_TRL.decision, **constants) == replace(ARITHMETIC_TRL.decision, seed_sd=0.5)


def test_the_program_marks_what_differs_and_refuses_in_one_line(runs_dir: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(main, [str(runs_dir), "--constant", "seed_sd=0.5"])
    assert done.exit_code == 0
    num_kept = sum(record.is_keep for record in decided(runs_dir)) - 1  # the baseline stays
    assert len([line for line in done.stdout.splitlines() if "discard *" in line]) == num_kept
    for arguments, words in (
        ([str(tmp_path)], "holds no decided experiment. Name a folder runs/"),
        ([str(runs_dir), "--constant", "seed_df"], "write NAME=VALUE"),
        ([str(runs_dir), "--constant", "kinds=1"], "the rule has no constant 'kinds' that is a number. Name one of"),
    ):
        refused = runner.invoke(main, arguments)
        assert refused.exit_code != 0
        assert words in refused.stderr.splitlines()[-1]

"""What a campaign measured: every run with its score, and the scores by key and value."""

import math
from pathlib import Path

import pytest

from nightshift.agents.history import KeyHistory, Memory, ValueRow, history, load_configs, of_last_campaign
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Z95, Change, Record, Verdict
from nightshift.campaign.results import last_campaign
from nightshift.errors import Failure, UsageError
from tests.campaigns import BRANCH, ROWS, replace, tell
from tests.train_tomls import SHIPPED

LR, GROUP, BATCH = "trainer.optim.lr", "orchestrator.group_size", "orchestrator.batch_size"
FILTER = "orchestrator.train.filter_zero_advantages"
KEEP, DISCARD, CRASH = Verdict.KEEP, Verdict.DISCARD, Verdict.CRASH
EVEN, WORSE, BETTER = 0.495, 0.40, 0.60  # scores


class Story:
    """A campaign from the shipped train.toml, whose baseline scores 0.5."""

    def __init__(self, root: Path) -> None:
        self.ledger = Ledger(root)
        self.tell({}, 0.5)

    def tell(self, changes: dict[str, object], score: float | None, rider: Change | None = None, **fields) -> Record:
        return tell(self.ledger, changes, score, rider, SHIPPED, **fields)

    @property
    def campaign(self) -> Campaign:
        return Campaign.of(self.ledger.records(), BRANCH, "rules")

    def memory(self, used_keys: set[str] | None = None) -> Memory:
        campaign = self.campaign
        assert campaign.baseline is not None
        now = incumbent_config(self.ledger.stored_config(campaign.baseline), campaign.kept)
        return history(campaign, load_configs(self.ledger, campaign.decided), now, used_keys or ROWS)

    @property
    def keys(self) -> dict[str, KeyHistory]:
        return {each.key: each for each in self.memory().keys}


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def values_of(story: Story, key: str) -> dict[str, ValueRow]:
    return {str(row).partition(" | ")[0]: row for row in story.keys[key].values}


def test_a_run_has_its_score_and_its_difference_from_what_was_expected_of_its_parent(story: Story) -> None:
    retest = story.tell({LR: 4e-6}, EVEN).run.new
    before = story.campaign
    record = story.tell({GROUP: 8}, BETTER, rider=retest)
    expected, sd = before.posterior.predict((retest,), before.hours(record))
    story.tell({BATCH: 512}, WORSE)
    again = story.tell({}, 0.58)
    baseline, _, row, _, last = story.memory().runs
    assert (row.number, row.changes, row.rider) == (3, (f"{GROUP} 4 -> 8",), "0002")
    assert (row.eval_score, row.num_steps, row.verdict) == (BETTER, 40, "keep")
    assert row.difference == pytest.approx(BETTER - expected)
    assert row.difference_halfwidth == pytest.approx(Z95 * math.hypot(sd, math.sqrt(before.posterior.noise_variance)))
    assert (baseline.difference, baseline.difference_halfwidth, baseline.kept) == (None, None, ())
    assert (last.kept, last.verdict) == (tuple(change.name for change in again.run.kept), "re-run")
    assert last.difference == pytest.approx(0.58 - again.judgement.expected_score), "expected of what it ran"
    assert " | 60.0 % | +" in str(row)
    assert str(row).endswith(f" pp | 40 | keep: {GROUP} 4 -> 8 (also re-testing 0002)")
    assert str(last).endswith(" | 40 | re-run: the baseline, 0003")


def test_a_crash_has_its_cause_and_counts_for_its_value(story: Story) -> None:
    crash = story.tell({LR: 1e-3}, None)
    row, value = story.memory().runs[1], values_of(story, LR)["0.001"]
    assert (row.eval_score, row.difference, row.why) == (None, None, "loss is nan")
    assert str(row) == f"0002 |  |  | 40 | crash (loss is nan): {LR} 3e-6 -> 0.001"
    assert (value.numbers, value.num_crashes, value.mean_score, value.difference) == ((), 1, None, None)
    assert str(value) == "0.001 | 0 (and 1 crashed) |  | "
    story.ledger.write(replace(crash, failure=Failure.INFRASTRUCTURE))  # tells nothing of a key
    assert (story.keys, len(story.memory().runs)) == ({}, 2)


def test_changes_of_several_keys_have_rows_of_their_own(story: Story) -> None:
    story.tell({LR: 1e-5, GROUP: 8}, WORSE)
    story.tell({LR: 1e-5}, BETTER)
    assert story.keys.keys() == {LR, GROUP}
    assert [*values_of(story, LR)] == ["3e-6", "1e-5", f"1e-5 (with {GROUP})"]
    alone, both = (values_of(story, LR)[name] for name in ("1e-5", f"1e-5 (with {GROUP})"))
    assert (alone.numbers, both.numbers, both.others) == ((3,), (2,), (GROUP,))
    assert alone.difference > 0.05 > -0.05 > both.difference
    assert [row.numbers for row in story.keys[GROUP].values] == [(1,), (2,)]


def test_runs_without_a_new_change_count_for_the_values_that_they_had(story: Story) -> None:
    story.tell({}, 0.52)
    story.tell({BATCH: 256, FILTER: True}, 0.48)  # the default, written out
    assert story.keys == {}
    story.tell({LR: 6e-6}, BETTER)
    story.tell({GROUP: 8}, WORSE)
    story.tell({}, 0.62)
    rows = values_of(story, LR)
    assert (rows["3e-6"].numbers, rows["6e-6"].numbers) == ((1, 2, 3), (4, 6))
    assert (rows["3e-6"].mean_score, rows["6e-6"].mean_score) == (pytest.approx(0.5), pytest.approx(0.61))
    assert (rows["3e-6"].difference, rows["3e-6"].difference_halfwidth) == (0, 0)
    assert rows["6e-6"].difference == pytest.approx(0.11, abs=0.02)
    assert values_of(story, GROUP)["4"].numbers == (1, 2, 3, 6)
    assert (story.keys[LR].baseline, story.keys[LR].now) == ("3e-6", "6e-6")


def test_a_run_that_re_tests_a_value_is_not_counted(story: Story) -> None:
    retest = story.tell({LR: 4e-6}, EVEN).run.new
    story.tell({GROUP: 8}, WORSE, rider=retest)
    assert [row.numbers for row in story.keys[LR].values] == [(1,), (2,)]
    assert [row.numbers for row in story.keys[GROUP].values] == [(1,), (3,)]


@pytest.mark.parametrize("score", [0.52, 0.54, 0.56])
def test_values_that_were_measured_on_different_incumbents_are_on_one_scale(story: Story, score: float) -> None:
    """The second rate has the better score, and the smaller difference: its runs had a group size of 8."""
    story.tell({LR: 4e-6}, EVEN)
    story.tell({GROUP: 8}, 0.62)
    story.tell({}, 0.62)
    story.tell({LR: 9e-6}, score)
    early, late = (values_of(story, LR)[rate] for rate in ("4e-6", "9e-6"))
    assert early.mean_score < late.mean_score
    assert early.difference > late.difference
    assert late.difference == pytest.approx(score - 0.62, abs=0.03)


def test_untried_keys_apply_and_are_used(story: Story) -> None:
    story.tell({LR: 1e-5}, WORSE)
    every = story.memory().untried_keys
    assert GROUP in every
    assert LR not in every
    assert "trainer.optim.momentum" not in every  # of sgd
    memory = story.memory({LR, GROUP, "trainer.optim.momentum"})
    assert memory.untried_keys == (GROUP,)
    assert str(memory).endswith(f"untried keys: {GROUP} (all keys: uv run run.py --keys)")


def test_the_ledger_gives_the_last_campaign_and_its_configs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no experiment was decided"):
        of_last_campaign(Ledger(tmp_path))
    story = Story(tmp_path)
    ledger = story.ledger
    story.tell({LR: 1e-5}, WORSE, branch="autoresearch/other")
    story.tell({LR: 2e-5}, WORSE, unused_keys=("seq_len",))
    story.tell({LR: 4e-5}, None)
    records = ledger.records()
    campaign = Campaign.of(records, *last_campaign(records))
    assert [record.number for record in campaign.decided] == [1, 3, 4]
    (ledger.run_dir(1) / "train.toml").write_bytes(b"closed = 1\n")
    assert list(load_configs(ledger, campaign.decided)) == [3, 4]
    with pytest.raises(UsageError, match=r"runs/0001/train\.toml is not the config that experiment 0001 ran"):
        of_last_campaign(ledger)
    (ledger.run_dir(1) / "train.toml").write_bytes(SHIPPED)
    text = str(of_last_campaign(ledger))
    assert "| discard: trainer.optim.lr 3e-6 -> 2e-5\n" in text
    assert "orchestrator.group_size" in text
    assert "seq_len" not in text

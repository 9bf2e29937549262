"""What was tried is remembered by key: values, what is expected of them, near misses, covered spans, dead ends."""

from pathlib import Path

import pytest

from nightshift.agents.history import (
    KeyHistory,
    Span,
    describe,
    history,
    incumbent,
    load_configs,
    of_last_campaign,
    untried,
)
from nightshift.campaign.campaign import Campaign, expected
from nightshift.campaign.index import fold, last_campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Failure, Judgement, Record, Verdict
from nightshift.campaign.standing import Expected
from nightshift.config.toml_edit import ABSENT, set_values
from nightshift.config.train_toml import Config, parse
from nightshift.errors import UsageError
from tests.campaigns import a_record, a_result
from tests.night_checkout import nightshift

SHIPPED = (Path(__file__).parents[2] / "train.toml").read_bytes()
LR, GROUP, BATCH = "trainer.optim.lr", "orchestrator.group_size", "orchestrator.batch_size"
KEEP, DISCARD, CRASH = Verdict.KEEP, Verdict.DISCARD, Verdict.CRASH


class Story:
    """A campaign in memory: `tell` adds an experiment that changes the incumbent."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.configs: dict[int, Config] = {}
        self.tell({}, KEEP, None)

    def tell(
        self,
        changes: dict[str, object],
        verdict: Verdict,
        delta: float | None = 0.0,
        stderr: float | None = 0.01,
        **more: object,
    ) -> Record:
        now = incumbent(self.campaign, self.configs)
        parent = self.campaign.incumbent.number if self.campaign.incumbent else None
        number = len(self.records) + 1
        self.configs[number] = parse(set_values(now.source if now else SHIPPED, changes))
        fields: dict[str, object] = {
            "number": number,
            "status": str(verdict),
            "parent": parent,
            "config_hash": self.configs[number].hash,
            "judgement": Judgement(why="why", delta=delta, delta_stderr=stderr),
            "decided": number,
            "result": None if verdict is CRASH else a_result(0.5, 100),
        }
        self.records.append(a_record(**{**fields, **more}))
        return self.records[-1]

    @property
    def campaign(self) -> Campaign:
        """As told: the last keep is the incumbent."""
        kept = tuple(record for record in self.records if record.is_keep)
        return Campaign(tuple(self.records), kept, incumbent=kept[-1] if kept else None)

    def of(self, key: str) -> KeyHistory:
        [found] = [each for each in history(self.campaign, self.configs) if each.key == key]
        return found

    def store(self, ledger: Ledger) -> None:
        for record in self.records:
            ledger.write(ledger.reserve(record, {"train.toml": self.configs[record.number].source}))
            ledger.write(record)


@pytest.fixture
def story() -> Story:
    return Story()


def test_a_trial_has_values_what_is_expected_of_it_and_verdict(story: Story) -> None:
    story.tell({LR: 1e-5}, DISCARD, -0.021, 0.008)
    [trial] = story.of(LR).trials
    assert (trial.before, trial.after) == ("3e-6", "1e-5")
    assert (trial.effect, trial.verdict) == (Expected(-0.021, 0.008), DISCARD)
    assert trial.others == ()


def test_an_experiment_stands_under_every_key_that_it_touched(story: Story) -> None:
    story.tell({LR: 1e-5, GROUP: 8}, DISCARD)
    assert {each.key for each in history(story.campaign, story.configs)} == {LR, GROUP}
    assert story.of(LR).trials[0].others == (GROUP,)


def test_the_baseline_and_equal_configs_touch_nothing(story: Story) -> None:
    story.tell({}, DISCARD)
    story.tell({BATCH: 256, "orchestrator.train.filter_zero_advantages": True}, DISCARD)  # the default, written out
    assert history(story.campaign, story.configs) == []


def test_a_key_that_falls_away_with_its_variant_was_not_touched(story: Story) -> None:
    story.tell({"trainer.loss.type": "default", "trainer.loss.ipo_threshold": ABSENT}, DISCARD)
    assert [each.key for each in history(story.campaign, story.configs)] == ["trainer.loss.type"]


def test_values_are_compared_with_the_incumbent_of_their_time(story: Story) -> None:
    story.tell({LR: 6e-6}, KEEP, 0.02)
    story.tell({LR: 9e-6}, DISCARD, -0.01)
    assert [(t.before, t.after) for t in story.of(LR).trials] == [("3e-6", "6e-6"), ("6e-6", "9e-6")]
    assert story.of(LR).now == "6e-6"


@pytest.mark.parametrize(
    ("verdict", "delta", "stderr", "near", "worse"),
    [
        (DISCARD, -0.004, 0.005, True, False),
        (DISCARD, 0.0, 0.005, True, False),
        (DISCARD, -0.006, 0.005, False, True),
        (DISCARD, -0.02, None, False, True),
        (KEEP, 0.001, 0.01, False, False),
    ],
)
def test_near_miss_is_a_discard_within_one_standard_error(story, verdict, delta, stderr, near, worse):
    story.tell({LR: 4e-6}, verdict, delta, stderr)
    [trial] = story.of(LR).trials
    assert (trial.is_near_miss, trial.is_clearly_worse) == (near, worse)
    assert len(story.of(LR).near_misses) == near


def test_values_between_two_rejected_ones_are_covered(story: Story) -> None:
    story.tell({LR: 1e-5}, DISCARD, -0.02)
    assert story.of(LR).covered == ()
    story.tell({LR: 2e-5}, CRASH, None, None, failure=Failure.TRAINING)
    assert story.of(LR).covered == (Span(1e-5, 2e-5),)


@pytest.mark.parametrize(
    ("key", "told", "covered"),
    [
        (LR, [{LR: 1e-5}, {LR: 1e-6}], {"1e-6 .. 1e-5 (around 3e-6)": Span(1e-6, 1e-5, around=3e-6)}),
        (
            LR,
            [{LR: value} for value in (5e-6, 2e-5, 1e-5, 1e-6)],
            {"5e-6 .. 2e-5": Span(5e-6, 2e-5), "1e-6 .. 5e-6 (around 3e-6)": Span(1e-6, 5e-6, around=3e-6)},
        ),
        (LR, [{LR: 1e-5}, {LR: 2e-5, GROUP: 8}], {}),  # the other keys must be equal
        (BATCH, [{BATCH: 128}, {BATCH: 512}, {BATCH: 1024}], {"128 .. 1024 (around 512)": Span(128, 1024, around=512)}),
    ],
)
def test_spans_join_and_name_the_incumbent_in_them(story, key, told, covered):
    """512 was kept, and ends no span."""
    for changes in told:
        story.tell(changes, *((KEEP, 0.02) if changes == {BATCH: 512} else (DISCARD, -0.02)))
    assert sorted(map(str, story.of(key).covered)) == sorted(covered)
    assert set(story.of(key).covered) == {*covered.values()}


def test_dead_ends(story: Story) -> None:
    story.tell({LR: 1e-5}, DISCARD, -0.02)
    assert not story.of(LR).is_dead_end  # one side only
    story.tell({LR: 1e-6}, DISCARD, -0.02)
    assert story.of(LR).is_dead_end  # both sides
    story.tell({LR: 4e-6}, DISCARD, -0.001)
    assert not story.of(LR).is_dead_end  # a near miss
    for value in (2, 8, 16):
        story.tell({GROUP: value, BATCH: 128}, DISCARD, -0.02)
    assert not story.of(GROUP).is_dead_end  # never by itself
    story.tell({"orchestrator.train.filter_zero_advantages": False}, DISCARD, -0.02)
    assert story.of("orchestrator.train.filter_zero_advantages").is_dead_end  # every choice


def test_untried_keys_apply_and_are_used(story: Story) -> None:
    story.tell({LR: 1e-5}, DISCARD)
    found = history(story.campaign, story.configs)
    now = story.configs[1]
    every = untried(found, now, None)
    assert GROUP in every
    assert LR not in every
    assert "trainer.optim.momentum" not in every  # of sgd
    assert untried(found, now, {LR, GROUP, "trainer.optim.momentum"}) == [GROUP]


def test_it_is_told_in_lines_the_most_useful_first(story: Story) -> None:
    for index in range(20):
        story.tell({LR: round(1e-7 * (index + 1), 9), BATCH: 64}, DISCARD, -0.03)
    story.tell({GROUP: 8}, DISCARD, -0.001)
    story.tell({GROUP: 2}, CRASH, None, None, failure=Failure.TRAINING)
    lines = describe(history(story.campaign, story.configs), ["max_steps"])
    assert lines[0] == "near misses: orchestrator.group_size = 8 (-0.1 ± 2.0 pp)"
    assert lines[1].startswith("covered: trainer.optim.lr 1e-7 .. 2e-6")
    assert lines[2] == "untried keys: max_steps"
    assert "  0002  3e-6 -> 1e-7  discard -3.0 ± 2.0 pp (with orchestrator.batch_size)" in lines
    assert lines[-3:] == [
        "orchestrator.group_size, now 4:",
        "  0022  4 -> 8  discard -0.1 ± 2.0 pp",
        "  0023  4 -> 2  crash",
    ]
    assert all(line.isprintable() for line in lines)


def test_the_ledger_gives_the_last_campaign_and_its_configs(story: Story, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with pytest.raises(UsageError, match="no experiment was decided"):
        of_last_campaign(ledger)
    story.tell({LR: 1e-5}, DISCARD, branch="autoresearch/other")
    story.tell({LR: 2e-5}, DISCARD, unused_keys=("seq_len",), prediction="+1 pp", lesson="no")
    story.tell({LR: 4e-5}, CRASH, None, failure=Failure.MACHINERY, decided=None)
    story.store(ledger)
    records = ledger.records()
    campaign = fold(ledger, records, *last_campaign(records))
    assert [r.number for r in campaign.decided] == [1, 3]
    (ledger.run_dir(1) / "train.toml").write_bytes(b"closed = 1\n")
    assert list(load_configs(ledger, campaign.decided)) == [3]
    with pytest.raises(UsageError, match=r"runs/0001/train\.toml is not what experiment 0001 ran"):
        of_last_campaign(ledger)
    (ledger.run_dir(1) / "train.toml").unlink()
    with pytest.raises(UsageError, match=r"train\.toml cannot be read: No such file.* Put it back"):
        of_last_campaign(ledger)
    (ledger.run_dir(1) / "train.toml").write_bytes(SHIPPED)
    text = str(of_last_campaign(ledger))
    assert "  0003  3e-6 -> 2e-5" in text
    assert "orchestrator.group_size" in text
    assert "seq_len" not in text
    assert ledger.read(3) == story.records[2]  # prediction and lesson too


def test_nightshift_history_prints_it(story: Story, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("")
    (tmp_path / "train.toml").write_bytes(SHIPPED)
    told = "no experiment was decided here yet. Start one: uv run run.py.\n"
    assert nightshift(tmp_path, "history") == (2, "", told)
    story.tell({LR: 1e-5}, DISCARD, -0.02)
    story.store(Ledger(tmp_path))
    _, shown, _ = nightshift(tmp_path, "history")
    told = Ledger(tmp_path).records()
    now = expected(Campaign.of(told, told[1].branch, told[1].rules_hash), told[1])
    assert f"\ntrainer.optim.lr, now 3e-6:\n  0002  3e-6 -> 1e-5  discard {now}\n" in shown

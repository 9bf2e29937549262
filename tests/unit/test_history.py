"""What was tried is remembered by key: values, effects as they are believed now, near misses, covered spans."""

from pathlib import Path

import pytest
from msgspec import structs

from nightshift.agents.history import (
    KeyHistory,
    Memory,
    Span,
    Trial,
    history,
    kept_changes,
    load_configs,
    of_last_campaign,
)
from nightshift.campaign.campaign import Campaign, fold
from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Z95, Change, Effect, Failure, Record, Verdict, percent
from nightshift.campaign.results import last_campaign
from nightshift.config.toml_edit import ABSENT
from nightshift.errors import UsageError
from tests.campaigns import BRANCH, tell
from tests.night_checkout import nightshift

SHIPPED = (Path(__file__).parents[2] / "train.toml").read_bytes()
LR, GROUP, BATCH = "trainer.optim.lr", "orchestrator.group_size", "orchestrator.batch_size"
FILTER = "orchestrator.train.filter_zero_advantages"
KEEP, DISCARD, CRASH = Verdict.KEEP, Verdict.DISCARD, Verdict.CRASH
EVEN, WORSE, BETTER = 0.495, 0.40, 0.60  # scores: of near misses, discards and keeps


class Story:
    """A campaign from the shipped train.toml, whose baseline scores 0.5."""

    def __init__(self, root: Path) -> None:
        self.ledger = Ledger(root)
        self.tell({}, 0.5)

    def tell(self, changes: dict[str, object], score: float | None, rider: Change | None = None, **fields) -> Record:
        return tell(self.ledger, changes, score, rider, SHIPPED, **fields)

    @property
    def campaign(self) -> Campaign:
        return fold(self.ledger, self.ledger.records(), BRANCH, "rules")

    def memory(self, used_keys: set[str] | None = None) -> Memory:
        campaign = self.campaign
        assert campaign.baseline is not None
        now = incumbent_config(self.ledger.stored_config(campaign.baseline), campaign.kept)
        return history(campaign, load_configs(self.ledger, campaign.decided), now, used_keys)

    @property
    def keys(self) -> dict[str, KeyHistory]:
        return {each.key: each for each in self.memory().keys}


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_a_trial_has_values_the_effect_of_now_and_the_verdict(story: Story) -> None:
    record = story.tell({LR: 1e-5}, WORSE)
    story.tell({GROUP: 8}, BETTER)
    [trial] = story.keys[LR].trials
    assert (trial.before, trial.after, trial.verdict, trial.others) == ("3e-6", "1e-5", DISCARD, ())
    assert trial.effect == story.campaign.effect(record) != record.decision.estimate  # a later run informs it


def test_an_experiment_stands_under_every_key_that_it_touched(story: Story) -> None:
    story.tell({LR: 1e-5, GROUP: 8}, WORSE)
    assert story.keys.keys() == {LR, GROUP}
    assert story.keys[LR].trials[0].others == (GROUP,)


def test_runs_without_a_new_change_touch_nothing(story: Story) -> None:
    story.tell({}, 0.52)
    story.tell({BATCH: 256, FILTER: True}, 0.48)  # the default, written out
    assert story.keys == {}


def test_a_key_that_falls_away_with_its_variant_was_not_touched(story: Story) -> None:
    story.tell({"trainer.loss.type": "default", "trainer.loss.ipo_threshold": ABSENT}, WORSE)
    assert story.keys.keys() == {"trainer.loss.type"}


def test_a_rider_is_no_trial_of_its_keys(story: Story) -> None:
    rider = story.tell({LR: 4e-6}, EVEN).run.new
    story.tell({GROUP: 8}, WORSE, rider=rider)
    assert [[trial.number for trial in story.keys[key].trials] for key in (LR, GROUP)] == [[2], [3]]


def test_values_are_compared_with_the_incumbent_of_their_time(story: Story) -> None:
    story.tell({LR: 6e-6}, BETTER)
    story.tell({LR: 9e-6}, WORSE)
    assert [(t.before, t.after) for t in story.keys[LR].trials] == [("3e-6", "6e-6"), ("6e-6", "9e-6")]
    assert story.keys[LR].now == "6e-6"


def trial(verdict: Verdict, effect: Effect | None, since: str = "", **changes: object) -> Trial:
    fields = {"number": 2, "before": "3e-6", "after": "4e-6", "others": ()} | changes
    return Trial(verdict=verdict, effect=effect, since=since, **fields)


@pytest.mark.parametrize(
    ("key", "told", "covered"),
    [
        (LR, [{LR: 1e-5}], []),
        (LR, [{LR: 1e-5}, {LR: 2e-5}], [Span(1e-5, 2e-5)]),
        (LR, [{LR: 1e-5}, {LR: 1e-6}], [Span(1e-6, 1e-5, around=3e-6)]),
        (LR, [{LR: n} for n in (5e-6, 2e-5, 1e-5, 1e-6)], [Span(1e-6, 5e-6, around=3e-6), Span(5e-6, 2e-5)]),
        (LR, [{LR: 1e-5}, {LR: 2e-5, GROUP: 8}], []),  # the other keys must be equal
        (LR, [{LR: 1e-5}, {FILTER: False}, {LR: 2e-5}], []),  # FILTER is kept: another incumbent
        (LR, [{FILTER: False}, {LR: 1e-5}, {LR: 1e-6}], [Span(1e-6, 1e-5, around=3e-6)]),  # that has 3e-6, too
        (BATCH, [{BATCH: 128}, {BATCH: 512}, {BATCH: 1024}], [Span(128, 1024, around=512)]),
        (FILTER, [{LR: 1e-5}, {FILTER: False}], []),  # no numbers
    ],
)
def test_values_between_two_rejected_ones_are_covered(story, key, told, covered):
    """512 is kept and ends no span."""
    for changes in told:
        story.tell(changes, BETTER if changes in ({BATCH: 512}, {FILTER: False}) else WORSE)
    assert sorted(story.keys[key].covered, key=lambda span: span.low) == covered


def test_a_rider_does_not_hide_that_two_runs_differ_in_one_key_only(story: Story) -> None:
    rider = story.tell({GROUP: 8}, EVEN).run.new
    story.tell({LR: 1e-5}, WORSE)
    story.tell({LR: 2e-5}, WORSE, rider=rider)
    assert story.keys[LR].covered == (Span(1e-5, 2e-5),)


def numbers(lines: tuple[str, ...]) -> list[int]:
    return [int(line[:4]) for line in lines]


def test_a_near_miss_is_within_one_deviation_and_a_dead_end_a_loss_beyond_two(story: Story) -> None:
    for score in (0.2, 0.35, 0.42, 0.46, 0.48, 0.49):
        story.tell({LR: score / 1e4}, score)
    memory, campaign = story.memory(), story.campaign
    deviations = {r.number: e.mean / e.sd for r in campaign.decided if (e := campaign.effect(r)) and not r.is_keep}
    near, dead = numbers(memory.near_misses), numbers(memory.dead_ends)
    assert near == sorted((n for n, z in deviations.items() if z >= -1), reverse=True)
    assert dead == [n for n, z in deviations.items() if z < -Z95]
    assert (len(deviations), len(near) > 0, 0 < len(dead) < 6 - len(near)) == (6, True, True)


@pytest.mark.parametrize(
    ("scores", "num_dead"), [((0.455, 0.456, 0.457), 3), ((0.455, 0.456), 0), ((0.455, 0.456, 0.457, 0.49), 0)]
)
def test_many_changes_of_a_key_that_are_worse_are_dead_ends_together(story: Story, scores, num_dead) -> None:
    for score in scores:
        story.tell({LR: score / 1e4}, score)
    assert len(story.memory().dead_ends) == num_dead


def test_a_dead_end_is_a_measured_loss_of_one_key(story: Story) -> None:
    story.tell({LR: 1e-3}, 0.1)  # one run shows that loss
    story.tell({GROUP: 8, BATCH: 128}, 0.1)  # which of the two keys lost, no run shows
    story.tell({BATCH: 512}, EVEN)
    story.tell({"max_steps": 7}, None)
    effect = story.campaign.effect(story.ledger.record(2))
    dead_ends = (f"0002 {effect}: trainer.optim.lr = 0.001", "0005 crash: max_steps = 7")
    assert story.memory().dead_ends == dead_ends
    assert f"\ndead ends: {'; '.join(dead_ends)}\n" in str(story.memory())


def test_a_crash_of_the_machinery_says_nothing_of_a_key(story: Story) -> None:
    crash = story.tell({LR: 1e-5}, None)
    story.ledger.write(structs.replace(crash, failure=Failure.MACHINERY))
    assert story.keys == {}


def test_what_the_incumbent_holds_is_no_near_miss(story: Story) -> None:
    story.tell({LR: 6e-6}, EVEN)
    assert numbers(story.memory().near_misses) == [2]
    story.tell({LR: 6e-6, GROUP: 8}, 0.8)
    assert story.campaign.is_kept(story.ledger.record(3).run.new)
    assert story.memory().near_misses == ()


def test_near_misses_are_named_the_best_first(story: Story) -> None:
    story.tell({LR: 4e-6}, 0.49)
    story.tell({GROUP: 8, BATCH: 128}, 0.498)
    effect = story.campaign.effect(story.ledger.record(3))
    first = f"near misses: 0003 {effect}: {BATCH} = 128, {GROUP} = 8; 0002 "
    assert story.memory().summary[0].startswith(first)


def test_a_key_without_a_value_is_unset(story: Story) -> None:
    """train.toml and prime-rl call that None, off and unset."""
    penalty, norm = "orchestrator.algo.length_penalty", "trainer.optim.max_norm"
    story.tell({"max_steps": 100}, WORSE)
    story.tell({penalty: {}}, WORSE)
    story.tell({norm: None}, WORSE)
    shown = {key: (found.now, found.trials[0].before, found.trials[0].after) for key, found in story.keys.items()}
    assert shown["max_steps"] == ("unset", "unset", "100")
    assert shown[penalty] == ("unset", "unset", "on")
    assert shown[norm] == ("1.0", "1.0", "unset")
    assert Change(keys={norm: None}).settings == f"{norm} = unset"


def test_untried_keys_apply_and_are_used(story: Story) -> None:
    story.tell({LR: 1e-5}, WORSE)
    every = story.memory().untried_keys
    assert GROUP in every
    assert LR not in every
    assert "trainer.optim.momentum" not in every  # of sgd
    assert story.memory({LR, GROUP, "trainer.optim.momentum"}).untried_keys == (GROUP,)


def test_the_text_begins_with_what_sums_it_up() -> None:
    worse = [trial(DISCARD, Effect(-0.03, 0.01), number=n, after=f"{n}e-6", others=(BATCH,)) for n in range(4, 8)]
    group = {"before": "4", "number": 8}
    groups = (trial(DISCARD, Effect(-0.001, 0.01), after="8", **group),)
    kept = trial(KEEP, Effect(0.02, 0.01), "reverted", number=9, starts="start 2 of this config")
    memory = Memory(
        branch=BRANCH, rules_hash="rules", kept=("0010 ...",), near_misses=("0009 ...", "0008 ..."), dead_ends=(),
        keys=(KeyHistory(LR, "3e-6", (*worse, kept), (Span(4e-6, 7e-6),)), KeyHistory(GROUP, "4", groups, ())),
        untried_keys=("max_steps", "seq_len"), damaged=("runs/0011",),
    )  # fmt: skip
    assert str(memory).splitlines() == [
        "damaged: runs/0011",
        "kept, the most certain first:",
        "  0010 ...",
        "near misses: 0009 ...; 0008 ...",
        "covered: trainer.optim.lr 4e-6 .. 7e-6",
        "untried keys: max_steps; seq_len",
        "trainer.optim.lr, now 3e-6:",
        *(f"  000{n}  3e-6 -> {n}e-6  discard -3.0 ± 2.0 pp (with {BATCH})" for n in range(4, 8)),
        "  0009  3e-6 -> 4e-6  keep reverted +2.0 ± 2.0 pp [start 2 of this config]",
        "orchestrator.group_size, now 4:",
        "  0008  4 -> 8  discard -0.1 ± 2.0 pp",
    ]


def test_the_kept_changes_are_listed_by_how_certain_they_are(story: Story) -> None:
    story.tell({GROUP: 8}, 0.52)
    story.tell({"max_steps": 90, LR: 6e-6}, 0.75)
    unsure, sure = (story.campaign.posterior.effect(change) for change in story.campaign.kept)
    assert sure.p_helps > 0.95 > unsure.p_helps
    assert kept_changes(story.campaign) == [
        f"0003  {sure}, P(it helps) {percent(sure.p_helps)} %, confirmed: max_steps = 90, trainer.optim.lr = 6e-6",
        f"0002  {unsure}, P(it helps) {percent(unsure.p_helps)} %, unconfirmed: orchestrator.group_size = 8",
    ]


def test_the_ledger_gives_the_last_campaign_and_its_configs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no experiment was decided"):
        of_last_campaign(Ledger(tmp_path))
    story = Story(tmp_path)
    ledger = story.ledger
    story.tell({LR: 1e-5}, WORSE, branch="autoresearch/other")
    story.tell({LR: 2e-5}, WORSE, unused_keys=("seq_len",))
    story.tell({LR: 4e-5}, None)
    failed = story.tell({LR: 5e-5}, None)
    ledger.write(Record(**{name: getattr(failed, name) for name in Record.__struct_fields__} | {"decided": None}))
    records = ledger.records()
    campaign = fold(ledger, records, *last_campaign(records))
    assert [record.number for record in campaign.decided] == [1, 3, 4]
    (ledger.run_dir(1) / "train.toml").write_bytes(b"closed = 1\n")
    assert list(load_configs(ledger, campaign.decided)) == [3, 4]
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


def test_nightshift_history_prints_it(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("")
    (tmp_path / "train.toml").write_bytes(SHIPPED)
    nothing = "no experiment was decided here yet. Start one: uv run run.py.\n"
    assert nightshift(tmp_path, "history") == (2, "", nothing)
    story = Story(tmp_path)
    record = story.tell({LR: 1e-5}, WORSE)
    story.tell({GROUP: 8}, BETTER)
    _, shown, _ = nightshift(tmp_path, "history")
    assert shown.startswith("kept, the most certain first:\n  0003  +")
    effect = story.campaign.effect(record)
    assert f"\ntrainer.optim.lr, now 3e-6:\n  0002  3e-6 -> 1e-5  discard {effect}\n" in shown

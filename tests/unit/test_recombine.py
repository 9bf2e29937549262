"""The set of ideas that the next one is tried on: drawn from the belief, put together in one file, remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.campaign import decision
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.decision import MAX_DISCARDED
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.recombine import chosen, combine, is_drawn, made_of, next_base, start_from
from nightshift.campaign.records import Record, Verdict
from nightshift.config.decision_rules import DecisionRules
from nightshift.config.toml_edit import ABSENT, set_values
from nightshift.config.train_toml import Config, diff, parse
from nightshift.errors import UsageError
from nightshift.night.loop import repeat_of
from nightshift.night.state import NightRequest, NightState, used
from tests.campaigns import BASELINE, BRANCH, a_record, a_result, replace
from tests.rules import ARITHMETIC_TRL

RULES = ARITHMETIC_TRL.decision
LR, GROUP, BATCH, CLIP = (
    "trainer.optim.lr",
    "orchestrator.group_size",
    "orchestrator.batch_size",
    "trainer.optim.max_norm",
)
NUM, NOW = 400, "2026-11-20T19:00:00+00:00"


@dataclass
class Told:
    """A campaign in a ledger, as it comes out of what is said."""

    ledger: Ledger
    campaign: Campaign = field(default_factory=Campaign)

    def stored(self, record: Record) -> Config:
        return self.ledger.stored_config(record)

    def source(self, number: int) -> bytes:
        return self.ledger.source(number)

    def file(self, *ideas: int) -> bytes:
        """The train.toml that they make."""
        return combine(self.campaign, frozenset(ideas), self.stored).source

    @property
    def held(self) -> frozenset[int]:
        """What the incumbent is made of."""
        assert self.campaign.incumbent
        return self.campaign.ideas_of(self.campaign.incumbent)

    def next(self, used: float) -> set[int]:
        """The ideas that the next one joins."""
        return {*next_base(self.campaign, used, self.stored, lambda config: None)[0]}

    def tell(self, changes: Mapping[str, Any], score: float, base: Sequence[int] | None = None) -> Record:
        """One experiment: `changes` on the ideas `base`, on the incumbent's for None."""
        held, config = start_from(self.campaign, None if base is None else tuple(base), self.stored)
        candidate = parse(set_values(config.source if config else BASELINE, changes))
        incumbent, number = self.campaign.incumbent, self.ledger.next_number()
        record = a_record(
            number=number,
            parent=incumbent.number if incumbent else None,
            base=held,
            diff=tuple(change.line for change in diff(config, candidate)) if config else (),
            config_hash=candidate.hash,
            effective_hash=candidate.hash,
            result=a_result(score, NUM, 1000),
        )
        self.ledger.reserve(record, {"train.toml": candidate.source})
        record = replace(self.campaign.judge(record), decided=number)
        self.ledger.close(record)
        self.campaign = self.campaign.step(record)
        return record


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """A baseline, and three ideas: 2 is kept; 3, tried without it, is good and not the best; 4 is far worse."""
    found = Told(Ledger(tmp_path))
    found.tell({}, 0.505)
    assert found.tell({LR: 3e-6}, 0.60).is_keep
    assert not found.tell({GROUP: 8}, 0.57, base=[]).is_keep
    assert not found.tell({BATCH: 64, CLIP: 0.5}, 0.20).is_keep
    return found


def values_of(source: bytes) -> dict[str, Any]:
    return {path: parse(source).get(path) for path in (LR, GROUP, BATCH, CLIP)}


def test_a_set_is_a_file_with_the_keys_of_its_ideas_and_no_others(told: Told) -> None:
    before = values_of(BASELINE)
    assert told.held == {2}
    found = {ideas: values_of(told.file(*ideas)) for ideas in [(), (2,), (3,), (2, 3)]}
    assert found[()] == before
    assert found[(2,)] == before | {LR: 3e-6}
    assert found[(3,)] == before | {GROUP: 8}
    assert found[(2, 3)] == before | {LR: 3e-6, GROUP: 8}
    assert told.file(2) == told.source(2), "a kept one as it is, comments and all"
    assert b"# poor" in told.file(3)
    with pytest.raises(UsageError, match=r"the ideas of 0099 make no train"):
        told.file(99)


def test_a_baseline_that_is_run_once_more_is_of_no_idea_whoever_is_the_incumbent_by_then(told: Told) -> None:
    """Its repeat may have waited, in a night that was cut off."""
    again = repeat_of(told.campaign.kept[0], told.campaign, "0001 again, in an idle slot", 4, told.ledger)
    assert (again.proposal.base, again.source) == ((), BASELINE)
    kept = told.campaign.kept[1]
    assert repeat_of(kept, told.campaign, "0002 again, in an idle slot", 4, told.ledger).proposal.base == (2,)


def test_an_idea_takes_over_those_whose_keys_it_sets(told: Told) -> None:
    """It is tried beside the others as it was, and never beside what it replaced."""
    told.tell({CLIP: 2.0, LR: 4e-6}, 0.62, base=[2, 3])
    campaign = told.campaign
    assert campaign.ideas[5].keys == {LR, CLIP}
    assert told.held == {3, 5}
    assert values_of(combine(campaign, frozenset({5}), told.stored).source) == values_of(BASELINE) | {
        LR: 4e-6,
        CLIP: 2.0,
    }
    told.tell({GROUP: 16}, 0.63)
    assert told.campaign.ideas[6].keys == {GROUP}
    assert made_of(told.campaign, told.campaign.decided[-1]) == {5, 6}
    assert made_of(told.campaign, replace(told.campaign.decided[-1], base=(5, 77))) is None, "77 is forgotten"
    rng = np.random.default_rng(0)
    for _ in range(200):
        ideas = chosen(told.campaign, rng)
        assert not {3, 6} <= ideas, "two values of one key"
        assert not {2, 5} <= ideas


def test_the_draw_takes_what_is_doubtful_and_leaves_what_is_far_worse(told: Told) -> None:
    rng = np.random.default_rng(0)
    drawn = [chosen(told.campaign, rng) for _ in range(400)]
    shares = {number: sum(number in ideas for ideas in drawn) / 400 for number in (2, 3, 4)}
    assert shares[2] > 0.95
    assert shares[3] > 0.9
    assert shares[4] < 0.02
    assert chosen(told.campaign, None) == {2, 3}, "what is expected to help, kept or not"


def test_a_discarded_idea_comes_back_in_other_company_and_the_best_that_was_run_is_the_incumbent(told: Told) -> None:
    record = told.tell({CLIP: 0.7}, 0.66, base=[2, 3])
    assert told.campaign.incumbent == record
    assert told.held == {2, 3, 5}
    assert told.campaign.beside(record) == "plus 0003"
    without = told.tell({CLIP: 0.9}, 0.40, base=[3])
    assert told.campaign.beside(without) == "less 0002 less 0005"
    assert told.campaign.incumbent == record
    assert told.campaign.lineage == (told.campaign.decided[0], told.campaign.decided[1], record)


def decided(record: Record) -> list[tuple[str, int, dict[str, str | None]]]:
    assert record.judgement
    return [(each.action, each.change.experiment, each.change.keys) for each in record.judgement.decisions]


def test_each_change_that_a_run_measured_or_moved_has_a_decision(told: Told) -> None:
    assert [decided(record) for record in told.campaign.decided] == [
        [("keep", 1, {})],
        [("keep", 2, {LR: "3e-6"})],
        [("discard", 3, {GROUP: "8"})],
        [("discard", 4, {BATCH: "64", CLIP: "0.5"})],
    ]
    changes = {LR: "4e-6", CLIP: "2.0"}
    both = told.tell({LR: 4e-6, CLIP: 2.0}, 0.66, base=[2, 3])
    assert decided(both) == [("keep", 5, changes), ("adopt", 3, {GROUP: "8"})], "2 was overwritten"
    assert decided(told.tell({CLIP: 0.9}, 0.40, base=[3])) == [("discard", 6, {CLIP: "0.9"})]
    again = told.tell({LR: 3e-6, BATCH: ABSENT}, 0.90, base=[])
    assert decided(again) == [
        ("keep", 7, {LR: "3e-6", BATCH: None}), ("revert", 3, {GROUP: "8"}), ("revert", 5, changes)
    ], "None: the key was taken out"  # fmt: skip
    assert decided(told.tell({LR: 4e-6, CLIP: 2.0}, 0.10))[0] == ("discard", 5, changes), "first proposed by 0005"
    back = told.tell({BATCH: 128}, 0.30)  # the default: one more run of 0007
    assert back.judgement
    assert back.judgement.taken_back_to == 5
    assert decided(back) == [
        ("adopt", 3, {GROUP: "8"}),
        ("adopt", 5, changes),
        ("revert", 7, {LR: "3e-6", BATCH: None}),
    ]


def test_one_more_run_of_a_config_is_told_by_its_ideas(told: Told) -> None:
    """As a night repeats what ran on a busy machine: no idea is new, and what is believed of the old ones moves."""
    before, discarded = told.campaign, told.campaign.decided[2]
    assert before.belief
    ideas = made_of(before, discarded)
    assert ideas == {3}
    again = told.tell({}, 0.75, base=sorted(ideas))
    assert again.diff == ()
    after = told.campaign
    assert after.belief
    assert after.ideas == before.ideas
    place = before.belief.ideas.tolist().index(3)
    assert after.belief.effects[place] > before.belief.effects[place] + 0.02
    assert again.is_keep, "what was discarded, run again and better"
    assert decided(again) == [("revert", 2, {LR: "3e-6"}), ("adopt", 3, {GROUP: "8"})]
    assert told.held == {3}


def test_the_set_is_the_same_for_the_same_records_and_the_incumbent_s_where_no_file_holds_it(
    told: Told,
) -> None:
    assert told.next(0.5) == told.next(0.5)
    assert told.next(0.99) == {2, 3}
    told.tell({BATCH: 252}, 0.64, base=[2])
    assert chosen(told.campaign, None) >= {3, 5}
    assert told.next(0.99) == told.held


def test_what_clashes_is_refused_by_the_one_who_puts_it_together(told: Told) -> None:
    told.tell({BATCH: 252}, 0.55, base=[])  # sixty-three groups of four, and no number of eights
    with pytest.raises(UsageError, match="groups of 8 do not divide a batch of 252"):
        told.file(3, 5)
    with pytest.raises(UsageError, match="groups of 8 do not divide a batch of 252"):
        start_from(told.campaign, (3, 5), told.stored)


def test_a_removed_key_is_an_idea_too(told: Told) -> None:
    told.tell({BATCH: ABSENT}, 0.59, base=[])
    assert told.campaign.ideas[5].keys == {BATCH}
    assert b"batch_size" not in told.file(2, 5)


def test_a_night_draws_until_it_ends_and_without_an_end_two_times_of_three() -> None:
    assert [is_drawn(place, None) for place in range(1, 7)] == [True, True, False] * 2
    assert is_drawn(3, 0.86)
    assert not is_drawn(4, 0.88)


def test_how_much_of_a_night_is_used() -> None:
    start = datetime(2026, 11, 20, 22, tzinfo=UTC)
    own = [a_record(number=n, decided=n, status="discard") for n in range(1, 6)]
    own.append(a_record(number=6, status="crash"))

    def of(**asked: Any) -> float | None:
        state = NightState(NightRequest("tpe", **asked), BRANCH, "abc123", start.isoformat(), 1)
        return used(state, own, start + timedelta(hours=2))

    assert of() is None
    assert of(experiments=10) == 0.5
    assert of(hours=8.0) == 0.25
    assert of(hours=8.0, experiments=10) == 0.5


def test_the_least_hopeful_are_forgotten_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, rng = DecisionRules(), np.random.default_rng(1)
    scores = [0.50, *np.where(rng.random(40) < 0.2, 0.49, rng.normal(0.465, 0.01, 40))]

    def told(most: int) -> decision.Posterior:
        monkeypatch.setattr(decision, "MAX_DISCARDED", most)
        belief = decision.baseline(0.4775, 1319, rules)
        for number, score in enumerate(scores, 1):
            tested = decision.observe(belief, belief.incumbent, score, 1e-4, rules, number=number)
            belief = decision.settle(tested, tested.keep, rules)
        return belief

    few, all_of_them = told(MAX_DISCARDED), told(99)
    kept = few.sets.any(axis=0).sum()
    assert few.means.shape[-1] == kept + MAX_DISCARDED < all_of_them.means.shape[-1] == 42
    places = [all_of_them.ideas.tolist().index(number) for number in few.ideas]
    np.testing.assert_allclose(few.means, all_of_them.means[:, places], atol=1e-12)
    np.testing.assert_allclose(few.covariance, all_of_them.covariance[:, places][:, :, places], atol=1e-12)
    np.testing.assert_allclose(few.expected, all_of_them.expected, atol=1e-12)
    gone = sorted(set(range(42)) - set(places))
    assert all_of_them.effects[gone].max() < few.effects[1:].max()


def test_a_campaign_of_thousands_is_folded_and_remembers_few() -> None:
    campaign, first = Campaign(), a_record(number=1, decided=1, status=Verdict.KEEP, result=a_result(0.5, NUM))
    campaign = campaign.step(first)
    for number in range(2, 200):
        record = a_record(number=number, decided=number, parent=1, status=Verdict.DISCARD, result=a_result(0.4, NUM))
        campaign = campaign.step(record)
    assert campaign.belief
    assert len(campaign.ideas) == MAX_DISCARDED
    assert campaign.belief.covariance.shape[1:] == (MAX_DISCARDED + 1, MAX_DISCARDED + 1)


def test_what_somebody_wrote_into_an_idea_s_file_is_never_put_together(told: Told) -> None:
    path = told.ledger.run_dir(3) / "train.toml"
    path.write_bytes(set_values(path.read_bytes(), {LR: 1e-4}))
    with pytest.raises(UsageError, match=r"runs/0003/train\.toml is not what experiment 0003 ran"):
        told.file(2, 3)
    assert told.next(0.99) == told.held


@pytest.mark.parametrize(
    ("first", "second", "on_first", "asked"),
    [
        ({"trainer.model.lora": {}, "trainer.model.lora.rank": 8}, {"trainer.model.lora.alpha": 64.0}, True, (3,)),
        ({"trainer.model.compile": None}, {"trainer.model.compile.fullgraph": True}, False, (2, 3)),
        ({"trainer.optim.type": "muon"}, {"trainer.optim.betas2": 0.999}, True, (3,)),
        ({LR: 3e-6}, {LR: 6e-6}, False, (2, 3)),
    ],
    ids=["what it needs is off", "a table beside its end", "a default is no idea", "one key twice"],
)
@pytest.mark.parametrize("scores", [(0.60, 0.62), (0.40, 0.30)], ids=["kept", "discarded"])
def test_ideas_that_cannot_stand_side_by_side_make_no_file(
    first: dict[str, Any],
    second: dict[str, Any],
    on_first: bool,
    asked: tuple[int, ...],
    scores: tuple[float, float],
    tmp_path: Path,
) -> None:
    told = Told(Ledger(tmp_path))
    told.tell({}, 0.505)
    told.tell(first, scores[0])
    told.tell(second, scores[1], base=[2] if on_first else [])
    with pytest.raises(UsageError, match=r"make no train\.toml|cannot stand side by side"):
        told.file(*asked)
    for share in (0.1, 0.99):
        assert told.next(share) <= {2, 3}


def test_a_set_that_the_engine_refuses_is_not_tried(told: Told) -> None:
    def check(config: Config) -> None:
        if config.get(GROUP) == 8:
            raise UsageError("not with this memory", "Use another.")

    assert told.next(0.99) == {2, 3}
    found, config = next_base(told.campaign, 0.99, told.stored, check)
    assert {*found} == told.held
    assert config.source == told.source(2)


@pytest.mark.parametrize("base", [(2, 3, 99), (2, 2), (1,), (2, 6)])
def test_a_base_that_nobody_can_tell_is_its_parent_s_and_its_idea_joins_nothing(told: Told, base: tuple[int]) -> None:
    """Records lie where others write. 6 sets the key of 2."""
    told.tell({LR: 9e-6}, 0.45, base=[])
    told.tell({LR: 8e-6}, 0.45, base=[])
    record = replace(told.campaign.decided[2], number=7, decided=7, base=base, diff=(f"{CLIP} 1 -> 2",))
    campaign = told.campaign.step(replace(record, effective_hash="other"))
    assert campaign.ideas[7].keys == frozenset()
    assert made_of(campaign, record) is None
    rng = np.random.default_rng(0)
    assert not any(7 in chosen(campaign, rng) for _ in range(50))


def test_what_the_incumbent_stands_on_is_what_it_holds(told: Told) -> None:
    told.tell({CLIP: 0.7}, 0.66, base=[3])
    assert told.held == {3, 5}
    campaign = told.campaign
    assert [record.number for record in campaign.lineage] == [1, 5]
    assert campaign.parts == {3, 5}, "3 was discarded, and came back with it"
    assert campaign.since[2] == "taken back"
    why = campaign.decided[-1].judgement.why  # type: ignore[union-attr]
    assert " over the incumbent after 1 run, tried on that less 0002 plus 0003: " in why
    told.tell({CLIP: 0.8}, 0.70)
    assert told.campaign.parts == {3, 5, 6}, "and what it took the place of"

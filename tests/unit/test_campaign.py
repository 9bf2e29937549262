"""A campaign is one fold over its records: what is believed, which keeps stand, what counts."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.campaign import decision
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.records import Failure, Record, packed
from nightshift.campaign.scores import run_scores
from nightshift.campaign.standing import Standing
from nightshift.config.decision_rules import DecisionRules
from nightshift.config.train_toml import keys_of
from nightshift.errors import UsageError
from tests.campaigns import BRANCH, a_record, judged, replace
from tests.stand_in_campaign import build

HASH = a_record().rules_hash
# One kind of idea: the joint belief is a Gaussian, so the textbook has it exactly.
ONE_KIND = DecisionRules(
    prior_sd=0.05,
    kinds=((-0.2, 1.0),),
    priors=((1.0, (1.0,)),),
    noises=((1.0, 1.0),),
    seed_sd=0.02,
    shrinkage=(0.0, 1.0),
)
STORY = [0.515, 0.48, 0.56, 0.53, 0.60, None, 0.55]
# Two keeps whose children disappoint, each taken back for the second experiment.
DISAPPOINTING = [0.51, 0.53, 0.55, 0.50, 0.49, 0.48, 0.53, 0.50, 0.50]


def folded(records: list[Record], branch: str = BRANCH) -> Campaign:
    return Campaign.of(records, branch, HASH)


def numbers(records: tuple[Record, ...]) -> list[int]:
    return [record.number for record in records]


def by_regression(records: list[Record]) -> Standing:
    """Prior precision over [baseline, candidate 1, ...] plus one observation a run; each run has the variance
    that the rule gave it at its time."""
    size = len(records) + 1  # by number; 0 is nobody's
    precision, information = np.eye(size), np.zeros(size)
    belief = decision.baseline(records[0].score or 0.0, len(run_scores(records[0])), ONE_KIND)
    precision[1, 1], information[1] = 1 / belief.sd**2, belief.mean / belief.sd**2
    campaign = Campaign().step(records[0])
    for record in records[1:]:
        if record.evaluation:
            child, i = np.zeros(size), record.number
            child[i], child[record.parent or 0] = 1, -1
            precision[i, i] = 0
            precision += np.outer(child, child) / ONE_KIND.prior_sd**2
            information += child * -0.01 / ONE_KIND.prior_sd**2
            (s2,) = campaign.test(record).belief.run_variance(ONE_KIND)
            precision[i, i] += 1 / s2
            information[i] += record.evaluation.eval_score / s2
        campaign = campaign.step(record)
    covariance = np.linalg.inv(precision)
    mean, contrast = covariance @ information, np.zeros(size)
    best = campaign.incumbent.number if campaign.incumbent else 0
    contrast[best], contrast[1] = 1, -1
    sds = covariance[best, best] ** 0.5, float(contrast @ covariance @ contrast) ** 0.5
    return Standing(mean[best], mean[1], *sds, run_sd=float(s2**0.5))


def test_incumbent_and_baseline_are_those_of_an_exact_computation_over_all_configs() -> None:
    records = judged(STORY, ONE_KIND)
    assert [record.status for record in records].count("keep") >= 3
    found, wanted = folded(records).standing, by_regression(records)
    for name in ("incumbent", "baseline", "incumbent_sd", "difference_sd", "run_sd"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6), name


def test_before_the_baseline_nothing_is_believed_and_before_a_keep_no_difference() -> None:
    standing = folded(judged(STORY[:2])).standing
    assert (standing.difference, standing.difference_sd) == (0, 0)
    empty = folded([])
    assert (empty.standing, empty.incumbent, empty.lineage, empty.taken_back) == (None, None, (), ())
    crashed = folded([a_record(number=1, status="crash", decided=1)])
    assert (crashed.standing, crashed.incumbent, numbers(crashed.decided)) == (None, None, [1])


def test_a_keep_that_disappoints_is_no_longer_part_of_the_incumbent() -> None:
    records = judged(DISAPPOINTING, DecisionRules(), num_examples=1000)
    after = [Campaign.of(records[:number], BRANCH, HASH) for number in range(len(records) + 1)]
    incumbents = [campaign.incumbent.number if campaign.incumbent else None for campaign in after]
    assert incumbents == [None, 1, 2, 3, 3, 3, 2, 7, 7, 2]
    assert [(numbers(c.lineage), numbers(c.taken_back)) for c in (after[3], after[6], after[7], after[9])] == [
        ([1, 2, 3], []),
        ([1, 2], [3]),
        ([1, 2, 7], [3]),
        ([1, 2], [3, 7]),
    ]
    told = [record.judgement.taken_back_to for record in records if record.judgement]
    assert told == [None, None, None, None, None, 2, None, None, 2]


def test_the_decisions_say_what_the_incumbent_is_made_of_and_what_the_rule_decided_by(tmp_path: Path) -> None:
    """Also with nothing else at hand: a kept change takes the place of those whose keys it sets, and their keys."""
    held, known, campaign = set[int](), dict[int, set[str]](), Campaign()
    records = build(tmp_path, 40, seed=10, num_examples=200, with_files=False).records()
    for record in records:
        judgement = record.judgement
        assert judgement
        for each in judgement.decisions if record.parent else ():
            number = each.change.experiment
            if each.action == "keep":
                known[number] = {*each.change.keys}
                gone = {other for other in held if known[other] & known[number]}
                known[number] |= {key for other in gone for key in known[other]}
                held = held - gone | {number}
            elif each.action in ("adopt", "revert"):
                held ^= {number}
        campaign = campaign.step(record) if record.decided else campaign
        ideas = [campaign.ideas[number].keys for number in campaign.ideas_of(campaign.incumbent)]
        assert sorted(sorted(known[number]) for number in held) == sorted(map(sorted, ideas))
        if judgement.delta is not None:
            own = judgement.decisions[0]
            assert (own.effect, own.effect_stderr) == pytest.approx((judgement.delta, judgement.delta_stderr))
            assert {*own.change.keys} == keys_of(record.diff)
    assert any(record.judgement and record.judgement.taken_back_to for record in records)
    assert {record.judgement.decisions for record in records if record.judgement and record.status == "crash"} == {()}


def test_the_order_is_that_of_the_decisions() -> None:
    records = judged(STORY)
    shuffled = [
        replace(record, number=100 - record.number, parent=record.parent and 100 - record.parent) for record in records
    ]
    found = folded(shuffled[::-1])
    assert numbers(found.decided) == [99, 98, 97, 96, 95, 94, 93]
    assert found.standing == folded(records).standing


def test_two_children_of_one_parent_are_each_compared_with_it() -> None:
    first, better, late = judged([0.51, 0.60, 0.60])
    late = replace(late, parent=1)  # proposed before the second was decided
    campaign = folded([first, better])
    tested = campaign.test(late)
    assert int(tested.parent) == 0
    assert tested.delta > campaign.test(replace(late, parent=2)).delta


def test_the_child_of_a_record_that_is_gone_is_compared_with_the_incumbent() -> None:
    records = judged(STORY)
    campaign = folded([record for record in records if record.number != 3])
    assert (numbers(campaign.kept), numbers(campaign.lineage)) == ([1, 5], [1, 5])
    assert folded(records[1:]).kept[0].number == 3  # the first keep that is left stands for the baseline


def test_other_branches_and_rules_are_other_campaigns() -> None:
    records = judged(STORY)
    elsewhere = [replace(records[0], number=8, branch="other"), replace(records[0], number=9, rules_hash="other")]
    assert folded([*records, *elsewhere]).standing == folded(records).standing
    assert numbers(folded([*records, *elsewhere], "other").decided) == [8]


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "started"},
        {"status": "crash", "failure": Failure.MACHINERY},
        {"status": "crash", "failure": Failure.INTERRUPTED},
    ],
)
def test_what_was_not_decided_counts_for_nothing(changes: dict[str, Any]) -> None:
    records = judged(STORY[:2])
    campaign = folded([*records, a_record(number=3, config_hash="3", decided=None, **changes)])
    assert campaign.standing == folded(records).standing
    assert campaign.tried("3") is None


def test_a_config_is_known_by_what_was_decided_of_it_last() -> None:
    records = [*judged(STORY), a_record(number=8, status="crash", decided=8, config_hash="2")]
    campaign = folded(records)
    assert campaign.tried("2") == records[-1]
    assert campaign.tried("never") is None
    assert [len(campaign.seeds_of(name)) for name in ("1", "2", "never")] == [1, 1, 0]


def with_scores(record: Record, scores: tuple[float, ...] | None) -> Record:
    if scores is None or record.result is None or record.evaluation is None:
        return replace(record, result=None)
    return replace(record, result=replace(record.result, evaluation=replace(record.evaluation, scores=packed(scores))))


@pytest.mark.parametrize("scores", [None, (), (1.0,) * 3, (1e300,) * 400, (-1.0,) * 400])
@pytest.mark.parametrize("number", [1, 2])
def test_damaged_scores_are_one_line(number: int, scores: tuple[float, ...] | None) -> None:
    records = judged(STORY[:3])
    records[number - 1] = with_scores(records[number - 1], scores)
    with pytest.raises(UsageError) as caught:
        folded(records)
    assert re.search(
        f"experiment {number:04d}|runs/{number:04d}/record.json is damaged|experiment 0002 has 400 scores",
        caught.value.cause,
    )


def test_an_experiment_of_other_worlds_is_one_line() -> None:
    records = judged(STORY[:3])
    records[2] = replace(records[2], decision_rules=replace(records[2].decision_rules, noises=((1.0, 1.0),)))
    with pytest.raises(UsageError, match=r"^experiment 0003 has other priors and noises .*\. Move runs/0003 out of"):
        folded(records)

"""A campaign is one fold over its records: which changes are kept, what is believed, what counts, what is predicted."""

import re
import subprocess
from typing import Any
from unittest.mock import Mock

import pytest

from nightshift.campaign.campaign import Campaign, already_tried
from nightshift.campaign.records import Action, Change, Decision, Record, Run, Stage, percent, prediction_in
from nightshift.campaign.results import Counts, decisions_text, standing_text
from nightshift.config.train_toml import parse
from nightshift.errors import ConfigError, Failure
from nightshift.night.observers import experiment_line
from tests.campaigns import BASELINE, BRANCH, a_change, a_record, a_result, folded, judged, replace

HASH = a_record().rules_hash
TEXT: dict[str, Any] = {"check": True, "capture_output": True, "text": True}
STORY = [0.515, 0.48, 0.66, 0.60, 0.80, None, 0.78]  # two changes that help for sure


def numbers(records: Any) -> list[int]:
    return [record.number for record in records]


def next_record(records: list[Record], score: float = 0.6, **changes: Any) -> Record:
    """One more experiment, judged: by default a run of the incumbent without a new change."""
    campaign = folded(records)
    number = len(records) + 1
    record = a_record(
        number=number,
        decided=number,
        decided_before=number - 1,
        parent=campaign.parent.number if campaign.parent else None,
        config_hash=f"{number}",
        **{"run": Run(kept=campaign.kept), "result": a_result(score, 400, 1000 + number)} | changes,
    )
    return campaign.judge(record, parse(BASELINE))


def test_final_check_runs_that_differ_from_the_estimate_are_the_gain() -> None:
    records = judged(STORY)
    runs = [Run(stage=Stage.LAST_BASELINES)] * 2 + [Run(kept=folded(records).kept, stage=Stage.LAST_INCUMBENTS)] * 2
    as_expected = records.copy()
    for run in runs:
        as_expected.append(next_record(as_expected, 0.8 if run.kept else 0.515, run=run))
        records.append(next_record(records, 0.45 if run.kept else 0.5, run=run))
    assert folded(as_expected).standing.contradicted is None
    standing = folded(records).standing
    assert standing == records[-1].judgement.standing
    assert standing.gain == pytest.approx(-0.05)
    assert standing.contradicted[0] - standing.gain > standing.gain_halfwidth
    sentence = r"The final check runs contradict the estimated gain \(.+ pp\): the gain shown is their plain difference"
    assert re.search(
        rf"^gain -5\.0 ± \d+\.\d pp over .+ by 0003, 0005\. {sentence}$", standing_text(standing, folded(records).kept)
    )


def test_the_incumbent_is_the_set_of_kept_changes_and_each_keep_is_told_with_its_numbers() -> None:
    records = judged(STORY)
    campaign = folded(records)
    assert [record.status for record in records] == ["keep", "discard", "keep", "discard", "keep", "crash", "discard"]
    assert campaign.kept == (a_change(3), a_change(5))
    assert campaign.parent.number == 5
    assert records[4].run.kept == (a_change(3),)
    expected = r"measured 80\.0 %; predicted without the new change: \d\d\.\d %; effect "
    assert re.fullmatch(expected + r"\+\d+\.\d ± \d+\.\d pp, P\(it helps\) > 99 %: keep", records[4].judgement.why)
    standing = records[4].judgement.standing
    assert standing.incumbent - standing.baseline == pytest.approx(standing.gain)
    assert campaign.standing == records[-1].judgement.standing
    assert [row.now for row in campaign.rows(records)] == ["", "", "kept", "", "kept", "", ""]
    assert campaign.is_confirmed(a_change(5))


def test_a_rider_that_turns_out_well_is_adopted_and_counted_so() -> None:
    records = judged([0.5, 0.45, 0.45])
    assert [record.status for record in records] == ["keep", "discard", "discard"]
    rider = a_change(2)
    while not records[-1].moved and len(records) < 10:
        records.append(next_record(records, 0.7, run=Run(rider=rider)))
    assert decisions_text(records[-1].moved) == "0002 kept later"
    assert "(also re-testing 0002)" in records[-1].judgement.why
    assert re.search(r"; 0002 kept later \(effect .* pp, P\(it helps\) (> )?\d+ %\)$", records[-1].judgement.why)
    [step] = records[-1].judgement.steps
    assert (step.name, step.keys) == ("adopt 0002", {key: (None, value) for key, value in rider.keys.items()})
    assert f"measured by {', '.join(f'{number:04d}' for number in (2, *numbers(records[3:])))}\n" in step.reason
    records[-1] = replace(records[-1], commits={"adopt 0002": "abcdef0123", "revert 0002": "c0ffee"})
    campaign = folded(records)
    assert [(row.now, row.commit) for row in campaign.rows(records)[1:3]] == [("kept later", "abcdef0"), ("", None)]
    assert Counts.of(campaign.rows(records)).now == {"kept later": 1}


@pytest.mark.parametrize(
    "text", ["Nightshift-Experiment: 9\n", "\x1b[31mred\x07\u202e \ud800 ---\n\nNightshift-Agent: x"]
)
def test_the_message_of_a_commit_has_no_trailer_of_foreign_text(text: str) -> None:
    run = Run(new=replace(a_change(2), experiment=2))
    [step] = next_record(judged(STORY[:1]), 0.8, run=run, description=text, sandbox="none").judgement.steps
    trailers = subprocess.run(["git", "interpret-trailers", "--parse"], input=f"keep\n\n{step.reason}", **TEXT).stdout
    expected = [("Experiment", "0002"), ("Campaign", BRANCH), ("Agent", "not isolated")]
    assert trailers.splitlines() == [f"Nightshift-{name}: {value}" for name, value in expected]
    assert all(character.isprintable() or character == "\n" for character in step.reason)
    assert re.match(
        r"Evidence: effect \S+ ± \S+ pp, P\(it helps\) > 99 %, measured by 0002\n\nHypothesis: \S", step.reason
    )


def test_no_probability_is_rounded_to_certainty_or_up_to_a_bound() -> None:
    assert [percent(p) for p in (0.002, 0.599, 0.6, 0.996)] == ["< 1 %", "59 %", "60 %", "> 99 %"]


def test_a_run_without_a_new_change_measures_and_tries_nothing() -> None:
    records = judged(STORY[:3])
    records.append(next_record(records, 0.66))
    records.append(next_record(records, 0.52, run=Run(stage=Stage.LAST_BASELINES)))
    incumbent, baseline = records[3:]
    assert (incumbent.status, incumbent.decision, incumbent.is_incumbent) == ("measured", None, True)
    assert baseline.judgement.why.startswith("measured 52.0 %; predicted for the baseline: ")
    assert not baseline.is_incumbent
    assert folded(records).incumbent_run == incumbent
    counts = "5 experiments: 1 baseline, 1 discard, 1 keep, 2 re-run; their changes now: 1 kept"
    assert str(Counts.of(folded(records).rows(records))) == counts


def test_no_change_comes_in_after_the_last_runs_have_begun() -> None:
    records = judged(STORY[:2])
    late = a_record(number=3, decided_before=2, parent=1, run=Run(new=a_change(3)))
    last = a_record(number=4, decided_before=2, parent=1, run=Run(stage=Stage.LAST_BASELINES))
    ended = replace(late, result=a_result(0.66, 400, 1003))
    assert folded([*records, late]).judge(ended, parse(BASELINE)).status == "keep"
    refused = folded([*records, late, last]).judge(ended, parse(BASELINE))
    assert refused.status == "discard"
    assert refused.why.endswith("no change is kept during the final check runs")
    assert refused.why in experiment_line(refused)
    night = replace(last, number=5, run=Run())  # the next night searches again
    assert folded([*records, late, last, night]).judge(ended, parse(BASELINE)).status == "keep"


def test_a_decision_of_the_users_holds_from_the_start_of_the_next_experiment() -> None:
    records = judged(STORY)
    out = Decision(change=a_change(5), action=Action.REVERT, commit="c0ffee")
    mine = Decision(change=Change(keys={"seq_len": "1024"}, commit="c0ffee"), action=Action.KEEP, commit="c0ffee")
    started = a_record(number=8, decided_before=7, parent=3, user_decisions=(out, mine))
    campaign = folded([*records, started])
    assert campaign.kept == (a_change(3), mine.change)
    assert mine.change.name == "commit c0ffee"
    assert campaign.parent.number == 3
    run = Run(kept=campaign.kept, new=a_change(8))
    decided = campaign.judge(replace(started, run=run, result=a_result(0.6, 400, 1008)), parse(BASELINE))
    assert [d.change for d in decided.judgement.decisions] == [a_change(8)]  # 0005 stays out
    assert folded([*records, replace(decided, decided=8)]).kept == decided.judgement.kept


def test_a_change_that_fits_no_train_toml_with_the_others_is_discarded_and_why_says_so() -> None:
    change = Change(experiment=2, keys={"orchestrator.group_size": "7"})  # does not divide a batch of 256
    records = judged(STORY[:1])
    record = next_record(records, 0.8, run=Run(new=change))
    assert (record.status, record.judgement.kept) == ("discard", ())
    assert "0002 cannot be kept: " in record.judgement.why
    assert folded([*records, record]).kept == ()
    refuse = Mock(side_effect=ConfigError("no such memory", "Write less."))
    record = next_record(records, 0.8, run=Run(new=a_change(2)))
    assert record.status == "keep"
    refused = folded(records).judge(record, parse(BASELINE), refuse)
    assert (refused.status, refused.judgement.kept) == ("discard", ())
    assert "; 0002 cannot be kept: no such memory" in refused.judgement.why


def test_the_order_is_that_of_starts_and_decisions_and_not_of_numbers() -> None:
    records = judged(STORY)
    assert folded(records[::-1]).standing == folded(records).standing
    elsewhere = [replace(records[0], number=8, branch="other"), replace(records[0], number=9, rules_hash="other")]
    assert folded([*records, *elsewhere]).standing == folded(records).standing
    assert numbers(Campaign.of([*records, *elsewhere], "other", HASH).decided) == [8]


@pytest.mark.parametrize("failure", [None, Failure.INTERRUPTED])
def test_what_was_not_decided_counts_for_nothing(failure: Failure | None) -> None:
    records = judged(STORY[:2])
    status = "crash" if failure else "started"
    record = a_record(number=3, config_hash="3", run=Run(new=a_change(3)), status=status, failure=failure)
    campaign = folded([*records, record])
    assert campaign.standing == folded(records).standing
    assert already_tried(campaign.decided, record.run, "3") is None


def test_the_prediction_in_a_description() -> None:
    assert prediction_in("lr 3e-6 -> 5e-6") is None
    assert prediction_in("lr up:\nexpect +1 pp,\ttwice") == "expect +1 pp, twice"  # as the record has it


def test_a_change_that_the_user_kept_while_it_ran_is_measured_only() -> None:
    records = judged(STORY[:2])
    started = a_record(number=3, decided_before=2, parent=1, run=Run(new=a_change(3)))
    mine = Decision(change=replace(a_change(3), experiment=0, commit="c0ffee"), action=Action.KEEP, commit="c0ffee")
    other = a_record(number=4, decided_before=2, parent=1, user_decisions=(mine,))
    ended = replace(started, result=a_result(0.3, 400, 1003), decided=3)
    decided = folded([*records, started, other]).judge(ended, parse(BASELINE))
    assert (decided.status, decided.judgement.decisions, decided.judgement.kept) == ("measured", (), (mine.change,))
    known = replace(a_record(number=5, decided_before=3, parent=1), run=Run(new=a_change(3)), decided=4)
    out = replace(known, user_decisions=(replace(mine, action=Action.REVERT),), result=a_result(0.7, 400, 1005))
    again = folded([*records, decided, other, replace(out, status="started", decided=None)]).judge(out, parse(BASELINE))
    assert (again.status, again.decision.change) == ("discard", mine.change)

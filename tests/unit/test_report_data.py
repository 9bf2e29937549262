"""The numbers and words of the morning page: none that no record holds."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import Step
from nightshift.campaign.records import (
    CERTIFY_NAME,
    COMPARISON_NAME,
    NO_DIFFERENCE,
    Action,
    Change,
    Decision,
    Judgement,
    Record,
    Run,
    Stage,
)
from nightshift.errors import Failure
from nightshift.report.charts import domain, progress
from nightshift.report.data import Morning, gather
from nightshift.report.markdown import markdown, markdown_code
from nightshift.report.steps import nothing_to_copy
from nightshift.report.text import certificate_line, elsewhere_lines, gain_parts, headline, visible
from nightshift.report.timing import NIGHT_GAP, Use, nights, num_at_once, split_experiment
from tests.campaigns import a_record, a_result, certificate_for, judged, replace, stored, tell, with_certificate

# A baseline, then what came of each change: discarded, kept, discarded, kept, discarded.
STORY = [0.515, 0.48, 0.56, 0.53, 0.60, 0.55]
SCORES = {1: 0.4, 2: 0.6, 3: 0.6}
SURE, UNSURE = [*STORY[:1], 0.725], [*STORY[:1], 0.56]


def morning(root: Path, records: list[Record]) -> Morning:
    return gather(stored(root, records), None)


def crash(number: int, failure: Failure = Failure.CONFIG) -> Record:
    judgement = Judgement(why="loss is nan")
    decided = number if failure is Failure.CONFIG else None
    return a_record(number=number, status="crash", failure=failure, judgement=judgement, decided=decided)


# The verdict


@pytest.mark.parametrize(
    ("records", "title", "sentence"),
    [
        ([], "Nothing has been run yet", ""),
        ([crash(1), crash(2, Failure.INFRASTRUCTURE)], "Nothing has been measured", ""),
        (judged(STORY[:1]), "Baseline: 51.5 %", "nothing to compare"),
        (judged([*STORY[:1], 0.45]), "No gain so far", "1 experiment after the baseline, none kept"),
        ([*judged(STORY[:1]), a_record(number=2)], "Baseline: 51.5 %", "nothing to compare"),  # in flight
        (judged(UNSURE), "Perhaps better: +2.6 ± 6.9 pp", "no gain at all"),  # within its interval
        (judged(SURE), "Better: +16.7 ± 7.9 pp", "not certified: +16.7 ± 7.9 pp (estimated scores 5"),  # beyond it
    ],
)
def test_the_verdict_says_no_more_than_was_measured(tmp_path, records, title, sentence):
    found = morning(tmp_path, records)
    line = headline(found)
    assert line.title.startswith(title)
    assert sentence in line.sentence
    assert (line.tone == "good") == title.startswith("Better")
    assert "72.5 %" not in line.title + line.sentence  # the best raw score is no headline
    assert (found.standing is None) == title.startswith("Nothing")


# What the rule and the user decided


def test_the_users_own_commits_are_told_where_they_stand(tmp_path: Path) -> None:
    records = judged(STORY)
    third, own = records[2].run.new, Change(keys={"seq_len": "1024"}, commit="abc1234" * 5)
    decisions = (
        Decision(change=third, action=Action.REVERT, commit="def5678" * 5),
        Decision(change=own, action=Action.KEEP, commit="abc1234" * 5),
        Decision(change=records[1].run.new, action=Action.KEEP, commit="abc1234" * 5),
    )
    kept = (records[4].run.new, own, records[1].run.new)
    run = Run(kept=kept, stage=Stage.LAST_INCUMBENTS)
    judgement = replace(records[5].judgement, kept=kept, decisions=())
    last = replace(records[5], status="measured", user_decisions=decisions, run=run, judgement=judgement, diff=())
    found = morning(tmp_path, [*records[:5], last])
    assert found.user_decisions == [
        "0003 reverted by you in commit def5678",
        "a change of your own kept by you in commit abc1234",
        "0002 kept by you in commit abc1234",
    ]
    support = {kept.change.name: kept.support for kept in found.kept}
    assert support["0005"] == "unconfirmed"
    assert support["commit abc1234"] == support["0002"] == "unconfirmed, kept by you in commit abc1234"
    assert [e.kind for e in found.experiments] == ["baseline", "keep", "left", "discard", "keep", "re-run"]


def test_the_headline_says_whether_the_final_check_runs_agree(tmp_path: Path) -> None:
    records = judged(STORY)
    runs = [Run(stage=Stage.LAST_BASELINES)] * 2 + [Run(kept=records[4].judgement.kept, stage=Stage.LAST_INCUMBENTS)]
    for number, (run, share) in enumerate(zip(runs, (0.52, 0.5, 0.58), strict=True), 7):
        judgement = replace(records[5].judgement, decisions=())
        records.append(
            replace(records[5], number=number, decided=number, decided_before=number - 1, run=run, diff=(),
                    status="measured", judgement=judgement, result=a_result(share, 400))
        )  # fmt: skip
    found = morning(tmp_path, records)
    words = "The final check runs are too few to check the estimate. "
    words += "Their measured scores: incumbent 58.0 %; baseline 52.0, 50.0 %."
    assert words in headline(found).sentence
    again = replace(records[-1], number=10, decided=10, decided_before=9)
    sentence = headline(morning(tmp_path / "agree", [*records, again])).sentence
    assert "The final check runs agree with the estimate within its error. " in sentence
    doubted = replace(found, standing=replace(found.standing, contradicted=(0.2, 0.01)))
    assert (
        "pp): the gain shown is their plain difference. Their measured scores: incumbent 58.0 %"
        in headline(doubted).sentence
    )


LR, GROUP, STEPS = "trainer.optim.lr", "orchestrator.group_size", "max_steps"


@pytest.mark.parametrize(
    ("second", "third", "support", "sentence"),
    [
        (
            {LR: 3e-6},
            {LR: 6e-7},
            "confirmed, takes back 0002",
            "0004 only takes back 0002: together they change nothing",
        ),
        ({LR: 3e-6, STEPS: 90}, {LR: 6e-7}, "confirmed, takes back part of 0002", "some of them set the same keys"),
        ({LR: 3e-6}, {LR: 9e-6}, "confirmed", ""),
    ],
)
def test_a_kept_change_that_undoes_an_earlier_one_says_so(tmp_path: Path, second, third, support, sentence) -> None:
    ledger = Ledger(tmp_path)
    for changes, share in (({}, 0.4), (second, 0.55), ({GROUP: 8}, 0.65), (third, 0.85)):
        tell(ledger, changes, share)
    view = gather(ledger, None)
    assert {kept.change.name: kept.support for kept in view.kept}["0004"] == support
    assert sentence in gain_parts(view)
    assert ("takes back" in gain_parts(view)) == support.endswith("back 0002")


@pytest.mark.parametrize("scores", [STORY, SURE, UNSURE, [0.5, 0.6, 0.7, 0.8, 0.9]])
@pytest.mark.parametrize("gain", [None, 0.9, -0.1])  # None: the estimate, else of the final check runs
def test_the_sentence_on_the_total_names_the_larger_side_and_its_cause(tmp_path: Path, scores, gain) -> None:
    found = morning(tmp_path, judged(scores))
    if gain is not None:
        found = replace(found, standing=replace(found.standing, gain=gain, contradicted=(0.1, 0.01)))
    effects = sum(kept.effect.mean for kept in found.kept)
    side = "less" if effects > found.standing.gain else "more"
    words = gain_parts(found)
    assert words.startswith(f"The total is {side} than the effects together ({100 * effects:+.1f} pp): it is ")
    assert ("plain difference of the final check runs" in words) == (gain is not None)
    assert ("lowered" in words) == (gain is None)


# The certificate


def certified_morning(
    root: Path, records: list[Record], plan: dict[str, Any] | None = None, **certified: Any
) -> Morning:
    ledger = stored(root, records)
    with_certificate(ledger, certificate_for(ledger, plan, **certified))
    return gather(ledger, None)


def test_a_certificate_is_told_with_its_interval_its_level_and_its_access(tmp_path: Path) -> None:
    line = certificate_line(certified_morning(tmp_path, judged(STORY), access=2, level=0.05 / 6))
    assert line.startswith("Certified on 1,000 test examples with 3 fresh seeds for each config: 66.0 %")
    assert "+5.0 pp, 95 % interval +2.0 to +8.0 pp: better, at level 0.00833." in line
    assert "Use 2 of the test split by this campaign." in line
    assert "; incumbent 71.0 (300 steps), 71.0 (301 steps), 71.0 (302 steps). 0 of 3 runs of the incumbent" in line
    assert "strict" not in line
    line = certificate_line(certified_morning(tmp_path / "strict", judged(STORY), strict_scores=(0.61, 0.7)))
    assert "to +8.0 pp; in the requested format 61.0 % \N{RIGHTWARDS ARROW} 70.0 %: better" in line


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"branch": "autoresearch/other"}, "branch autoresearch/other"),
        ({"rules_hash": "fff"}, "other rules"),
        ({"configs": {"baseline": "b", "incumbent": "i"}}, "it compares experiment 0005 with experiment 0001"),
    ],
)
def test_a_certificate_of_something_else_says_so_first(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    found = certified_morning(tmp_path, judged(SURE), changes)
    line = certificate_line(found)
    assert line.startswith("Not of this incumbent")
    assert reason in line
    assert headline(found).title == "Better: +16.7 ± 7.9 pp"
    assert "Certified" not in headline(found).sentence


@pytest.mark.parametrize("data", ["{torn", "[]", "{}", '{"difference": NaN}'])
def test_a_damaged_certificate_certifies_nothing(tmp_path: Path, data: str) -> None:
    ledger = stored(tmp_path, judged(STORY))
    path = ledger.runs_dir / CERTIFY_NAME / "0001" / COMPARISON_NAME
    path.parent.mkdir(parents=True)
    path.write_text(data)
    found = gather(ledger, None)
    assert certificate_line(found).startswith(f"A certificate cannot be read: {path} is damaged")


def test_what_was_compared_elsewhere_has_a_line_of_its_own(tmp_path: Path) -> None:
    ledger = stored(tmp_path, judged(STORY))
    elsewhere = certificate_for(
        ledger, {"split": "validation"}, environments=("countdown",), access=None, notes=("a note",)
    )
    with_certificate(ledger, elsewhere)
    found = gather(ledger, None)
    assert certificate_line(found).startswith("Not certified yet")
    [line] = elsewhere_lines(found)
    assert line.startswith("Elsewhere: countdown, 60 s of training, models/arithmetic-base: better, experiment 0005")
    assert line.endswith(" A note.")


# The drawings


def test_the_axis_leaves_out_a_collapse_and_a_crash_has_a_dot(tmp_path: Path) -> None:
    records = [*judged([*STORY, 0.01]), crash(8), crash(9, Failure.INTERRUPTED)]
    experiments = morning(tmp_path, records).experiments
    spec = progress(experiments, None)
    low, high = domain(experiments, None)
    assert 0.01 < low < min(STORY) < max(STORY) < high
    dots = {dot["n"]: dot for dot in spec["datasets"]["dots"]}
    kinds = ["baseline", "discard", "keep", "discard", "keep", "discard", "below", "crash"]
    assert [dots[number]["kind"] for number in range(1, 9)] == kinds
    assert [dots[number]["y"] for number in range(1, 7)] == [e.row.eval_score for e in experiments[:6]]
    assert 9 not in dots


# Time


@pytest.mark.parametrize(
    ("step", "num_steps", "told"),
    [
        ({"generate_seconds": 0.5, "train_seconds": 0.9}, 40, {Use.GENERATION: 20.0, Use.TRAINING: 36.0}),
        # generation beside training costs what the trainer waits
        ({"train_seconds": 0.9, "broadcast_seconds": 0.1, "wait_for_rollouts_seconds": 0.4}, 40,
         {Use.TRAINING: 36.0, Use.TRANSFER: 4.0, Use.WAITING: 16.0}),
        *((step, num, {Use.UNSPLIT: 60.1}) for step, num in (({}, 0), ({}, 1), ({"train_seconds": 900.0}, 1))),
    ],
)  # fmt: skip
def test_the_seconds_of_a_run_sum_to_its_total(step, num_steps, told):
    """9 s start-up, 60.1 s training, 3 s evaluation, 75 s in all."""
    record = a_record(result=a_result(), total_seconds=75.0)
    uses = split_experiment(record, [Step(number, **step) for number in range(num_steps)])
    assert sum(uses.values()) == pytest.approx(75.0)
    assert {use: uses[use] for use in told} == pytest.approx(told)
    assert list(uses)[: 1 + len(told)] == [Use.STARTUP, *told]


def runs(*spans: tuple[float, float]) -> list[Record]:
    """Records of runs, from the seconds of their begin and of their length."""
    night, records = datetime(2026, 11, 20, 22, tzinfo=UTC), list[Record]()
    for number, (began_seconds, seconds) in enumerate(spans, 1):
        began = (night + timedelta(seconds=began_seconds)).isoformat()
        result = replace(a_result(0.5), started=began, total_seconds=seconds)
        records.append(a_record(number=number, started=began, total_seconds=seconds, result=result))
    return records


def test_a_long_pause_parts_two_nights_and_a_short_one_or_that_of_a_slot_is_idle() -> None:
    apart = runs((0, 80), (100, 80), (400 + NIGHT_GAP.total_seconds(), 80))
    first, second = nights([(record, {Use.TRAINING: 80.0}) for record in apart])
    assert (first.num_experiments, second.num_experiments) == (2, 1)
    assert first.seconds == {Use.TRAINING: 160.0, Use.IDLE: 20.0}
    assert sum(first.seconds.values()) == first.length_seconds
    beside = runs((0, 60), (0, 40), (60, 40))
    assert num_at_once(beside) == 2
    [night] = nights([(record, {Use.TRAINING: record.total_seconds}) for record in beside])
    assert (night.length_seconds, night.seconds) == (100.0, {Use.TRAINING: 140.0, Use.IDLE: 60.0})


# Words


@given(st.text())
def test_nothing_hidden_reaches_the_page(text: str) -> None:
    shown = str(visible(text))
    shown.encode()  # no lone surrogate
    assert not set(shown) & set("\x00\x07\x1b\r\u202e\u2066\u200b\ufeff")


@given(st.text(alphabet="`*_[]()<>|~$&!@\\#/:ab \n"))
def test_markdown_cells_hold_no_markup(text: str) -> None:
    shown = markdown(text)
    assert "\n" not in shown
    plain = shown.replace("\\\\", "")
    assert all(i > 0 and plain[i - 1] == "\\" for i, c in enumerate(plain) if c in "`*[]<|"), shown
    assert "|" not in markdown_code(text).replace("\\|", "")
    assert markdown_code(text)[1:-1].count("`") == 0


def test_a_markdown_cell_links_to_nowhere() -> None:
    assert markdown("www.evil.example, WWW.x, http://x") == r"www\.evil.example, WWW\.x, http:\//x"


# The headline beside the certificate


@pytest.mark.parametrize(
    ("scores", "verdict", "title", "tone"),
    [
        (UNSURE, "better", "Better, certified: +5.0 pp", "good"),
        (SURE, NO_DIFFERENCE, "No significant difference, certified: +5.0 pp", "open"),
        (SURE, "worse", "Worse, certified", "bad"),
    ],
)
def test_the_headline_does_not_contradict_the_certificate(tmp_path, scores, verdict, title, tone):
    found = certified_morning(tmp_path, judged(scores), verdict=verdict)
    assert found.obsolete is None
    line = headline(found)
    assert line.title.startswith(title)
    assert line.tone == tone
    assert line.sentence.startswith(
        "Certified gain of the incumbent (the baseline with the kept changes) over the baseline: +5"
    )
    word = "agrees with the certificate." if scores is UNSURE else "is higher: the certificate counts"
    assert word in line.sentence


def test_nothing_is_to_be_copied_without_a_gain(tmp_path: Path) -> None:
    view = morning(tmp_path, judged(UNSURE))
    level = replace(view.standing, gain=0.0)
    assert nothing_to_copy(replace(view, standing=level)) == "Nothing to copy: the estimated gain is +0.0 ± 6.9 pp."
    assert nothing_to_copy(view) == ""

"""The numbers and words of the morning page: none that no record holds."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import Step
from nightshift.campaign.records import (
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
from nightshift.report.charts import progress
from nightshift.report.data import Morning, gather, split_experiment
from nightshift.report.markdown import markdown, markdown_code
from nightshift.report.sections import nothing_to_copy, sections
from nightshift.report.text import certificate_line, gain_parts, headline, visible
from tests.campaigns import a_record, a_result, certificate_for, judged, replace, stored, tell, with_certificate

# A baseline, then what came of each change: discarded, kept, discarded, kept, discarded.
STORY = [0.515, 0.48, 0.56, 0.53, 0.60, 0.55]
LR, GROUP = "trainer.optim.lr", "orchestrator.group_size"
SURE, UNSURE = [*STORY[:1], 0.725], [*STORY[:1], 0.56]


def morning(root: Path, records: list[Record]) -> Morning:
    return gather(stored(root, records), None)


def crash(number: int, failure: Failure = Failure.CONFIG) -> Record:
    judgement = Judgement(why="loss is nan")
    decided = number if failure is Failure.CONFIG else None
    return a_record(number=number, status="crash", failure=failure, judgement=judgement, decided=decided)


@pytest.mark.parametrize(
    ("records", "title", "sentence"),
    [
        ([], "Nothing has been measured yet", ""),
        ([crash(1), crash(2, Failure.INFRASTRUCTURE)], "Nothing has been measured", ""),
        (judged(STORY[:1]), "Baseline: 51.5 %", "nothing to compare"),
        (judged([*STORY[:1], 0.45]), "No gain so far", "1 experiment after the baseline, none kept now."),
        ([*judged(STORY[:1]), a_record(number=2)], "Baseline: 51.5 %", "nothing to compare"),  # in flight
        (judged(UNSURE), "Perhaps better, not certified: +2.6 ± 6.9 pp", "no gain at all"),  # within its interval
        (judged(SURE), "Better, not certified: +16.7 ± 7.9 pp", "pp (estimated scores 5"),  # beyond it
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


def test_who_kept_and_who_reverted_a_change_is_told(tmp_path: Path) -> None:
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
    section = sections(found, {})["kept"]
    names = {row[0]: (row[3].partition(", ")[2], row[4]) for row in section.rows[:-1]}
    assert names["0005"][0] == "unconfirmed"
    assert names["commit abc1234"] == ("unconfirmed", ["abc1234"])
    assert names["0002"][0] == "unconfirmed, kept later"
    assert "Kept once, not any more: 0003 reverted by you." in section.notes
    assert [e.kind for e in found.experiments] == ["baseline", "keep", "left", "discard", "keep", "re-run"]
    by_rule = Decision(change=third, action=Action.REVERT, effect=-0.001, effect_stderr=0.02)
    judgement = replace(judgement, decisions=(by_rule,))
    found = morning(tmp_path / "rule", [*records[:5], replace(last, user_decisions=(), judgement=judgement)])
    assert found.experiments[2].fate == "reverted after 0006 (-0.1 ± 3.9 pp, P(it helps) 48 %)"


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
    words = "The final check runs do not contradict the estimate. "
    words += "Their measured scores: incumbent 58.0 %; baseline 52.0, 50.0 %."
    assert words in headline(found).sentence
    doubted = replace(found, standing=replace(found.standing, contradicted=(0.2, 0.01)))
    assert (
        "pp): the gain shown is their plain difference. Their measured scores: incumbent 58.0 %"
        in headline(doubted).sentence
    )


@pytest.mark.parametrize("contradicted", [None, (0.1, 0.01)])
def test_the_sentence_on_the_total_has_the_sum_of_the_effects(tmp_path: Path, contradicted) -> None:
    found = morning(tmp_path, judged(STORY))
    found = replace(found, standing=replace(found.standing, contradicted=contradicted))
    effects = sum(effect.mean for _, effect in found.story.campaign.effects)
    words = gain_parts(found)
    assert words.startswith(f"The effects add up to {100 * effects:+.1f} pp")
    assert ("plain difference of the final check runs" in words) == (contradicted is not None)


def test_what_to_copy_is_the_net_change(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for changes, share in (({}, 0.4), ({LR: 3e-6}, 0.55), ({GROUP: 8}, 0.65), ({LR: 9e-6}, 0.85)):
        tell(ledger, changes, share)
    found = gather(ledger, None)
    assert sections(found, {})["copy"].rows == [([GROUP], "4", "8"), ([LR], "6e-7", "9e-6")]
    assert found.experiments[1].fate == "replaced by 0004"


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
    assert line.endswith("; incumbent 71.0 (300 steps), 71.0 (301 steps), 71.0 (302 steps).")
    assert "strict" not in line
    line = certificate_line(certified_morning(tmp_path / "strict", judged(STORY), strict_scores=(0.61, 0.7)))
    assert "to +8.0 pp; in the requested format 61.0 % \N{RIGHTWARDS ARROW} 70.0 %: better" in line


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"branch": "autoresearch/other"}, "branch autoresearch/other"),
        ({"rules_hash": "fff"}, "rules fff"),
        ({"configs": {"baseline": "b", "incumbent": "i"}}, "it compares experiment 0005 with experiment 0001"),
    ],
)
def test_a_certificate_of_something_else_says_so_first(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    found = certified_morning(tmp_path, judged(SURE), changes)
    line = certificate_line(found)
    assert line.startswith("Not certified yet: the last certificate is not of this incumbent")
    assert reason in line
    assert headline(found).title == "Better, not certified: +16.7 ± 7.9 pp"
    assert "Certified" not in headline(found).sentence


def test_the_axis_leaves_out_a_collapse_and_a_crash_has_a_dot(tmp_path: Path) -> None:
    records = [*judged([*STORY, 0.01]), crash(8), crash(9, Failure.INTERRUPTED)]
    found = morning(tmp_path, records)
    experiments = found.experiments
    spec = progress(experiments, found.standing)
    low, high = spec["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert 0.01 < low < min(STORY) < max(STORY) < high
    dots = {dot["n"]: dot for dot in spec["datasets"]["dots"]}
    kinds = ["baseline", "discard", "keep", "discard", "keep", "discard", "discard", "crash"]
    assert [dots[number]["kind"] for number in range(1, 9)] == kinds
    assert [dots[number]["y"] for number in range(1, 7)] == [e.row.eval_score for e in experiments[:6]]
    assert (dots[8]["y"], 9 in dots) == (low, False)


@pytest.mark.parametrize(
    ("step", "num_steps", "told"),
    [
        ({"generate_seconds": 0.5, "train_seconds": 0.9}, 40, {"generation": 20.0, "training": 36.0}),
        # generation beside training costs what the trainer waits
        ({"train_seconds": 0.9, "broadcast_seconds": 0.1, "wait_for_rollouts_seconds": 0.4}, 40,
         {"training": 36.0, "weight transfer": 4.0, "trainer idle": 16.0}),
        ({"train_seconds": 900.0}, 1, {"training, not split": 60.1}),
    ],
)  # fmt: skip
def test_the_seconds_of_a_run_sum_to_its_total(step, num_steps, told):
    """9 s start-up, 60.1 s training, 3 s evaluation, 75 s in all."""
    record = a_record(result=a_result(), total_seconds=75.0)
    uses = split_experiment(record, [Step(number, **step) for number in range(num_steps)])
    assert sum(uses.values()) == pytest.approx(75.0)
    assert {use: uses[use] for use in told} == pytest.approx(told)
    assert list(uses)[: 1 + len(told)] == ["start-up", *told]


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
    word = "overlaps the certificate's." if scores is UNSURE else "is higher: the certificate counts"
    assert word in line.sentence


def test_nothing_is_to_be_copied_without_a_gain(tmp_path: Path) -> None:
    view = morning(tmp_path, judged(UNSURE))
    level = replace(view.standing, gain=0.0)
    assert nothing_to_copy(replace(view, standing=level)) == "Nothing to copy: the estimated gain is +0.0 ± 6.9 pp."
    assert nothing_to_copy(view) == ""

"""What the sections of the morning page say: headline beside certificate, counts, and the data of the comparison."""

import json
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.records import Failure, Record
from nightshift.report import page as compare
from nightshift.report import text
from nightshift.report.data import Morning, gather
from nightshift.report.markdown import summary
from nightshift.report.page import render, view_of
from nightshift.report.rows import detailed, rows
from nightshift.report.slices import shown_examples
from tests.browsing import NOW
from tests.campaigns import BRANCH, certificate_for, judged, replace, stored, with_certificate
from tests.stand_in_campaign import build
from tests.unit.test_report_data import STORY, crash


def morning(root: Path, records: list[Record], plan: dict[str, Any] | None = None, **certified: Any) -> Morning:
    ledger = stored(root, records)
    if certified or plan:
        with_certificate(ledger, certificate_for(ledger, plan, **certified))
    return gather(ledger, None, BRANCH)


# The headline beside the certificate

SURE, UNSURE = [*STORY[:1], 0.725], [*STORY[:1], 0.56]


@pytest.mark.parametrize(
    ("scores", "verdict", "title", "tone"),
    [
        (UNSURE, "better", "Better, certified: +5.0 pp", "good"),
        (UNSURE, "not told apart", "Perhaps better", "open"),
        (SURE, "better", "Better, certified: +5.0 pp", "good"),
        (SURE, "not told apart", "Believed better, not certified: +16.7 ± 7.9 pp", "open"),
        (SURE, "worse", "Worse, certified", "bad"),
    ],
)
def test_the_headline_does_not_contradict_the_certificate(tmp_path, scores, verdict, title, tone):
    found = morning(tmp_path, judged(scores), verdict=verdict)
    assert found.obsolete is None
    line = text.headline(found)
    assert line.title.startswith(title)
    assert line.tone == tone
    assert line.sentence.startswith("Certified gain of the incumbent over the baseline: +5.0 pp")


def test_a_certificate_of_another_incumbent_is_no_headline(tmp_path: Path) -> None:
    found = morning(tmp_path, judged(SURE), {"branch": "autoresearch/other"})
    line = text.headline(found)
    assert line.title == "Better: +16.7 ± 7.9 pp"
    assert "Certified" not in line.sentence


def test_a_kept_change_without_a_believed_gain_is_not_told_as_no_gain(tmp_path: Path) -> None:
    found = morning(tmp_path, judged(UNSURE))
    level = replace(found.standing, gain=0.0)
    line = text.headline(replace(found, standing=level))
    assert line.title == "No gain is believed yet"
    assert "0.0 ± 6.9 pp" in line.sentence


# Counts


def test_interrupted_is_no_crash_and_the_machinery_says_so_everywhere(tmp_path: Path) -> None:
    records = [*judged(STORY), crash(7), crash(8, Failure.MACHINERY), crash(9, Failure.INTERRUPTED)]
    ledger = stored(tmp_path, records)
    view = view_of(ledger, BRANCH, NOW)
    found = view.morning
    line = "2 kept, 3 discarded, 2 crashed (1 by machinery), 1 interrupted"
    assert str(found.counts) == f"9 experiments: the baseline, {line}"
    assert sum(number for _, number, _, _ in text.counts(found)) + 1 == len(records)  # and the baseline
    told = summary(found, view.headline, view.nights, has_picture=False)
    assert line in told
    page = render(view)
    for group, number in (("keep", 2), ("discard", 3), ("crash", 2), ("interrupted", 1)):
        assert f'data-group="{group}" aria-pressed="false">{group} <small>{number}</small>' in page
        assert page.count(f'data-group="{group}" data-keys') == number
    assert [dot.number for dot in view.charts[0].dots if dot.kind == "crash"] == [7, 8]


# The data of the comparison


def test_scores_in_the_data_are_those_of_the_records_whatever_they_are(tmp_path: Path) -> None:
    ledger = build(tmp_path, 5, num_examples=60, with_files=False)
    found = gather(ledger, None, "")
    shown, examples = detailed(found.experiments), shown_examples((), tmp_path)
    told = rows(found.experiments, shown, ledger, examples, frozenset())
    data = json.loads(compare.data_block(told, {}, examples))
    for e in found.experiments:
        if e.record.evaluation:
            scores = e.record.evaluation.example_scores
            assert data["experiments"][str(e.number)]["scores"] == "".join("01"[int(score)] for score in scores)
    assert all(each["settings"] is None for each in data["experiments"].values())


def test_what_a_search_calls_its_change_is_not_told_twice(tmp_path: Path) -> None:
    """A search's description is the change itself."""
    e = morning(tmp_path, judged(STORY)).experiments[2]
    of_search = replace(e.record, description=f"random: {e.changes[0].line}")
    assert [replace(e, record=r).idea for r in (of_search, e.record)] == ["", e.record.proposal.description]

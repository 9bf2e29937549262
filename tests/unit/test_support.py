"""A keep is provisional until a run supports it, undecided where the odds are even; whatever tells it says so."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from nightshift.agents.brief import compose
from nightshift.agents.history import history
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.records import Failure, Record
from nightshift.campaign.standing import DECIDED, Support, fresh
from nightshift.config.train_toml import parse
from nightshift.report.markdown import summary as markdown
from nightshift.report.page import render, view_of
from tests.campaigns import BASELINE, BRANCH, a_record, context_of, folded, judged, replace, stored

FIRST = [0.50, 0.60]  # a keep that is believed
BACK = [0.50, 0.52, *[0.45] * 3]  # what was built on it disappoints
EVEN = [0.50, 0.503]  # and one that nobody would bet on


def kept(story: list[float]) -> list[Record]:
    records = judged(story)
    assert [record.status for record in records[:2]] == ["keep", "keep"]
    return records


def test_a_keep_is_provisional_or_undecided_by_its_own_run() -> None:
    sure, even = kept(FIRST), kept(EVEN)
    assert sure[1].judgement
    assert even[1].judgement
    assert (sure[1].judgement.p_better or 0) > 0.9
    assert 0.4 < (even[1].judgement.p_better or 0) < DECIDED
    assert folded(sure).since == {2: "provisional"}
    assert folded(even).since == {2: "undecided"}
    assert sure[1].judgement.why.endswith(" pp over the incumbent after 1 run: provisional")
    assert even[1].judgement.why.endswith(" pp over the incumbent after 1 run: undecided")
    assert folded(sure[:1]).since == {}, "a baseline is nothing to support"


@pytest.mark.parametrize(("p_better", "support"), [(0.599, "undecided"), (0.6, "provisional"), (0.999, "provisional")])
def test_a_fresh_keep_is_never_supported(p_better: float, support: str) -> None:
    assert fresh(p_better) == support


@pytest.mark.parametrize(
    ("now", "then", "support"),
    [
        (0.599, 0.55, "undecided"),
        (0.60, 0.55, "supported"),
        (0.79, 0.80, "provisional"),
        (0.80, 0.80, "supported"),
        (0.90, 0.999, "supported"),
        (0.89, 0.999, "provisional"),
    ],
)
def test_later_runs_support_what_they_leave_as_likely(now: float, then: float, support: str) -> None:
    assert Support.of(now, then) == support


def test_a_later_run_supports_it_by_what_is_believed_then() -> None:
    assert folded(kept([*FIRST, 0.55])).since == {2: "supported"}, "of a child that was discarded"
    doubted = kept([0.50, 0.54, 0.47, 0.47])
    assert folded(doubted).incumbent == doubted[1]
    assert folded(doubted[:2]).since == {2: "provisional"}
    assert folded(doubted).since == {2: "undecided"}


def test_one_more_run_of_its_settings_supports_it() -> None:
    records = kept(FIRST)
    campaign = folded(records)
    again = replace(records[1], number=3, decided=3, parent=2, status="discard")
    assert campaign.is_repeat(again)
    assert campaign.step(again).since == {2: "supported"}


def test_a_run_on_a_keep_supports_all_that_it_stands_on_and_nothing_else() -> None:
    records = kept([*FIRST, 0.70, 0.64])
    assert folded(records[:3]).since == {2: "supported", 3: "provisional"}
    assert folded(records).since == {2: "supported", 3: "supported"}
    campaign = folded(records[:3])
    of_the_baseline = a_record(number=4, decided=4, parent=1, status="discard", result=records[3].result)
    assert campaign.step(of_the_baseline).since == {2: "supported", 3: "provisional"}


def test_a_crash_after_a_keep_tells_nothing_of_it() -> None:
    records = kept([*FIRST, None])
    assert (records[2].status, records[2].parent) == ("crash", 2)
    assert folded(records).since == {2: "provisional"}
    lost = replace(records[2], failure=Failure.MACHINERY, decided=None)
    assert folded([*records[:2], lost]).since == {2: "provisional"}


def test_a_keep_that_was_taken_back_is_only_that() -> None:
    records = kept(BACK)
    assert records[-1].judgement
    assert records[-1].judgement.taken_back_to == 1
    assert [folded(records[:n]).since[2] for n in (2, 3, 4, 5)] == [
        "provisional",
        "provisional",
        "undecided",
        "taken back",
    ]


def test_history_and_brief_say_it(tmp_path: Path) -> None:
    context = context_of(tmp_path / "one", ["3e-6", "1e-5"])
    records = list(context.campaign.decided)
    assert records[1].judgement
    records[1] = replace(records[1], judgement=replace(records[1].judgement, p_better=0.95))
    for number, word in ((2, "provisional"), (3, "supported")):
        campaign = Campaign.of(records[:number], BRANCH, "rules")
        text = compose(replace(context, campaign=campaign))
        line = next(line for line in text.splitlines() if line.startswith("| 0002 "))
        assert line.startswith(f"| 0002 keep, {word} +"), line
        sources = {1: BASELINE, 2: BASELINE.replace(b"6e-7", b"3e-6")}
        (key,) = history(campaign, {n: parse(source) for n, source in sources.items()})
        assert f"keep {word} +" in str(key.trials[0])
    discarded = next(line for line in text.splitlines() if line.startswith("| 0003 "))
    assert discarded.startswith(("| 0003 discard -", "| 0003 discard +"))


@pytest.mark.parametrize(
    ("story", "word"),
    [
        (FIRST, "provisional"),
        (EVEN, "undecided"),
        ([*FIRST, 0.55], "supported"),
        (BACK, "taken back"),
    ],
)
def test_page_and_markdown_say_it(tmp_path: Path, story: list[float], word: str) -> None:
    view = view_of(stored(tmp_path, kept(story)), BRANCH, datetime(2026, 11, 22, tzinfo=UTC), None)
    page, text = render(view), markdown(view.morning, view.headline, view.nights, False)
    row = page.partition('id="run-0002"')[2].partition("</tr>")[0]
    assert f"<small>{word}</small>" in row
    (line,) = (line for line in text.splitlines() if line.startswith("| 0002 ") and line.count("|") > 5)
    assert line.split("|")[2].strip() == (word if word == "taken back" else f"keep, {word}")
    (first,) = (line for line in text.splitlines() if line.startswith("| 0001 ") and line.count("|") > 5)
    assert first.split("|")[2].strip() == "baseline"

"""The morning page in a real headless Chromium: what a person does with it, wide and narrow, without scripts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.report.page import render, view_of
from tests.browser.conftest import NOW, Tab, written
from tests.campaigns import replace
from tests.integration.test_report import HOSTILE, require_safe
from tests.stand_in_campaign import build
from tests.waiting import assert_linear

pytestmark = pytest.mark.slow  # tests/integration/test_report.py reads the page as a browser would


def test_a_line_opens_by_mouse_and_keyboard_and_shows_what_the_record_has(tab: Tab) -> None:
    line, opened = tab.page.locator("#run-0005"), tab.page.locator("#run-0005 + tr.open")
    line.locator("td:nth-child(3)").click()
    text = opened.inner_text()
    for word in ("hypothesis", "predicted", "lesson", "changes", "health", "hard containers: 2"):
        assert word in text, word
    assert tab.page.locator("#chips button").last.inner_text().startswith("0005")
    line.locator("td:nth-child(3)").click()
    assert opened.count() == 0
    button = tab.page.locator("#run-0002 button")
    button.focus()
    tab.page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    assert tab.page.locator("#run-0002 + tr.open").is_visible()


def test_the_table_is_sorted_filtered_and_searched(tab: Tab, path: Path) -> None:
    records = {record.number: record for record in Ledger(path.parent).records()}
    page, everything = tab.page, tab.numbers()
    assert everything == sorted(records)
    for _ in range(2):
        page.locator("[data-sort=eval_score]").click()
        scores = [records[number].score for number in tab.numbers()]
        measured = [score for score in scores if score is not None]
        assert measured in (sorted(measured), sorted(measured)[::-1])
        assert scores[len(measured) :] == [None] * (len(scores) - len(measured)) != []
    assert page.locator("th[aria-sort]").count() == 1
    page.locator("[data-verdict=crash]").click()
    assert {records[number].status for number in tab.numbers()} == {"crash"}
    assert page.locator("#shown").inner_text() == f"{len(tab.numbers())} of {len(everything)}"
    page.locator("[data-verdict='']").click()
    key, _, _, value = next(line for record in records.values() for line in record.diff if "->" in line).split()
    page.locator("#search").fill(f"{key.upper()} {value}")
    diffs = [" ".join(records[number].diff) for number in tab.numbers()]
    assert diffs
    assert all(key in diff and value in diff for diff in diffs)
    page.locator("#search").fill("<script> nothing has this")
    assert tab.numbers() == []
    page.locator("#kept a").last.click()  # of a run that is filtered out
    page.locator("tr.open").wait_for()
    assert sorted(tab.numbers()) == everything


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_scrolls_sideways_and_the_keyboard_chooses_what_is_compared(
    open_tab: Callable[..., Tab], path: Path, width: int
) -> None:
    tab = open_tab(path, width, color_scheme="dark").drawn()
    for row in ("0001", "0002", "0005"):
        tab.page.locator(f"#run-{row} button").click()
    before = tab.page.locator("#compared").inner_text()
    tab.page.locator("#compare-b").focus()
    tab.page.keyboard.press("ArrowUp")
    assert tab.page.locator("#compared").inner_text() != before
    assert tab.width() <= width
    assert tab.page.locator(".chart svg").count() == tab.page.locator(".chart").count() >= 6


def test_hostile_texts_run_nothing_and_are_searched_as_text(open_tab, tmp_path):
    ledger = build(tmp_path, len(HOSTILE), num_examples=60, with_files=False)
    everything = " ".join(HOSTILE)
    for record, text in zip(ledger.records(), HOSTILE, strict=True):
        changes = {"lesson": everything, "health": everything, "git_action": everything, "diff": (f"{text} 1 -> 2",)}
        ledger.write(replace(record, description=text, **changes))
    tab = open_tab(written(tmp_path), 390).drawn()
    for number in tab.numbers():
        tab.page.locator(f"#run-{number:04d} button").click()
    assert tab.width() <= 390
    assert tab.page.locator("#table img, #table svg, #table script").count() == 0
    tab.page.locator("#search").fill("<script>document.title")
    assert 1 in tab.numbers()
    assert "pwned" not in tab.page.title()
    assert [url.split(":")[0] for url in tab.asked if not url.startswith(("data:", "blob:"))] == ["file"]


NUM, NUM_DETAILED = 1000, 75  # experiments; the last ones, and the last keeps, with curves


def test_a_page_of_a_thousand_is_small_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    """The CPU time grows with the number of experiments, not with its square."""
    pages = dict[int, str]()
    roots = {num: tmp_path / f"campaign-{num}" for num in (NUM // 4, NUM)}
    for num, root in roots.items():
        build(root, num, num_examples=100, with_files=False)
    render(view_of(Ledger(roots[NUM // 4]), NOW))  # what loads once, is loaded
    assert_linear(lambda num: pages.update({num: render(view_of(Ledger(roots[num]), NOW))}), NUM // 4, 1)
    assert len(pages[NUM].encode()) < 4_000_000
    page = require_safe(pages[NUM])
    drawn = {row["number"] for row in page.data["rows"] if "curves" in row}
    keeps = [record.number for record in Ledger(roots[NUM]).records() if record.status == "keep"]
    assert len(page.data["rows"]) == NUM
    assert drawn == {*range(NUM - NUM_DETAILED + 1, NUM + 1), *keeps[-NUM_DETAILED:]}

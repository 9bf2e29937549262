"""The morning page in a real headless Chromium: what a person does with it, on three widths, in the dark, on paper."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.report.page import render, view_of
from tests.browser.conftest import NOW, Tab, written
from tests.integration.test_report import require_safe
from tests.stand_in_campaign import build
from tests.waiting import assert_linear

pytestmark = pytest.mark.slow  # tests/integration/test_report.py reads the page as a browser would

# Boxes of texts in a drawing, and of the leader lines, in pixels of the window.
BOXES = """svg => {
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const all = name => [...svg.querySelectorAll(name)];
  return {
    svg: box(svg),
    texts: all("text").map(e => [e.textContent, ...box(e)]),
    labels: all("text.label").map(e => [e.textContent, ...box(e)]),
    leaders: all("path.leader").map(box),
  };
}"""


def test_a_row_opens_by_mouse_and_keyboard_and_shows_what_the_record_has(tab: Tab) -> None:
    detail = tab.page.locator("#detail-0005")
    assert not detail.is_visible()
    tab.page.locator("#run-0005 td.c-text").click()
    assert detail.is_visible()
    text = detail.inner_text()
    names = ("Hypothesis", "Prediction", "Lesson", "Changed", "Health", "reward", "gradient norm", "entropy", "Problem")
    for word in (*names, "hard containers: 2"):
        assert word in text, word
    assert detail.locator("figure.curve polyline").count() >= 4
    tab.page.locator("#run-0005 td.c-text").click()
    assert not detail.is_visible()
    button = tab.page.locator("#run-0002 button.open")
    button.focus()
    tab.page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    assert tab.page.locator("#detail-0002").is_visible()


def test_a_dot_of_the_chart_leads_to_its_experiment_even_if_that_is_filtered_out(tab: Tab) -> None:
    tab.page.locator("#group-crash").click()
    link = tab.chart().query_selector("a[href='#run-0003']")
    link.click()
    tab.page.locator("#detail-0003").wait_for()  # the browser tells of another address when it has time
    assert tab.page.locator("#run-0003").evaluate("e => e.getBoundingClientRect().top < innerHeight")


def apart(one: list[Any], other: list[Any]) -> bool:
    return bool(one[1] >= other[3] or other[1] >= one[3] or one[2] >= other[4] or other[2] >= one[4])


@pytest.mark.parametrize("count", [3, 40, 120])
def test_no_text_of_the_chart_touches_another_or_leaves_it(open_tab, path, tmp_path, count):
    if count != 40:
        build(tmp_path, count, num_examples=60, with_files=False)
    tab = open_tab(path if count == 40 else written(tmp_path))
    found = tab.chart().evaluate(BOXES)
    texts = found["texts"]
    assert len(found["labels"]) == len(found["leaders"]) > 0
    for i, one in enumerate(texts):
        for other in texts[i + 1 :]:
            assert apart(one, other), (one, other)
        assert one[1] >= found["svg"][0] - 1, one
        assert one[3] <= found["svg"][2] + 1, one
    for text, left, top, right, bottom in found["labels"]:
        for x, high, _, low in found["leaders"]:
            beside = x <= left or x >= right
            assert beside or high >= bottom or low <= top, (text, x)


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_nothing_scrolls_sideways_and_the_keyboard_chooses_what_is_compared(
    open_tab: Callable[..., Tab], path: Path, width: int
) -> None:
    tab = open_tab(path, width)
    for row in ("0001", "0002", "0005"):
        tab.page.locator(f"#run-{row} button.open").click()
    before = tab.page.locator("#compared").inner_text()
    tab.page.locator("#compare-b").focus()
    tab.page.keyboard.press("ArrowUp")
    assert tab.page.locator("#compared").inner_text() != before
    assert tab.width() <= width


def test_without_scripts_everything_is_there(open_tab: Callable[..., Tab], path: Path) -> None:
    tab = open_tab(path, java_script_enabled=False)
    assert tab.page.locator("#detail-0005").is_visible()


NUM = 1000


def test_a_page_of_a_thousand_is_small_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    """The CPU time grows with the number of experiments, not with its square."""
    pages = dict[int, str]()
    roots = {num: tmp_path / f"campaign-{num}" for num in (NUM // 4, NUM)}
    for num, root in roots.items():
        build(root, num, num_examples=100, with_files=False)
    view_of(Ledger(roots[NUM // 4]), NOW)  # what loads once, is loaded
    assert_linear(lambda num: pages.update({num: render(view_of(Ledger(roots[num]), NOW))}), NUM // 4, 1)
    html = pages[NUM]
    assert len(html.encode()) < 5_000_000
    page = require_safe(html)
    assert "left out of a page of 1,000 experiments" in page.text
    assert 100 <= len(json.loads("".join(page.data))["experiments"]) <= 150

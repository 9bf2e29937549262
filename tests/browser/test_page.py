"""The morning page in a real headless Chromium: what a person does with it, on three widths, in the dark, on paper."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.report.page import render, view_of
from tests.browsing import NOW, Tab, written
from tests.conftest import slow
from tests.integration.test_report import require_safe
from tests.stand_in_campaign import build
from tests.waiting import assert_linear

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


@pytest.mark.slow
def test_a_dot_of_the_chart_leads_to_its_experiment_even_if_that_is_filtered_out(tab: Tab) -> None:
    tab.page.locator("#group-crash").click()
    link = tab.chart().query_selector("a[href='#run-0003']")
    link.click()
    tab.page.locator("#detail-0003").wait_for()  # the browser tells of another address when it has time
    assert tab.page.locator("#run-0003").evaluate("e => e.getBoundingClientRect().top < innerHeight")


def apart(one: list[Any], other: list[Any]) -> bool:
    return bool(one[1] >= other[3] or other[1] >= one[3] or one[2] >= other[4] or other[2] >= one[4])


@pytest.mark.parametrize("count", [slow(3), 40, slow(120)])
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


@pytest.mark.parametrize("width", [slow(1280), slow(800), 390])
def test_nothing_scrolls_sideways(open_tab: Callable[..., Tab], path: Path, width: int) -> None:
    tab = open_tab(path, width)
    for row in ("0001", "0002", "0005"):
        tab.page.locator(f"#run-{row} button.open").click()
    assert tab.width() <= width


CONTRAST = """names => names.map(name => {
  const e = document.querySelector(name);
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  let back = e;
  while (back && parse(getComputedStyle(back).backgroundColor)[3] === 0) back = back.parentElement;
  const level = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const style = getComputedStyle(e);
  const ink = level(parse(e.closest("svg") ? style.fill : style.color));
  const paper = level(parse(getComputedStyle(back || document.body).backgroundColor));
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
})"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable_in_light_and_dark(open_tab: Callable[..., Tab], path: Path, scheme: Any) -> None:
    tab = open_tab(path, color_scheme=scheme)
    tab.page.locator("#run-0005 button.open").click()
    dark = tab.page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark is (scheme == "dark")
    names = ["h1", ".lede", ".certificate", ".counts dt", ".status.keep", ".status.discard", ".status.crash"]
    names += ["svg text.axis", "svg text.label", "svg text.end", ".told dt", ".cause", ".rollout pre", "svg text.now"]
    names += [".flips b.good", ".flips b.bad", ".pair th", ".lead-in"]
    contrasts = tab.page.evaluate(CONTRAST, names)
    # WCAG 2 level AA: 4.5 for text.
    assert {n: c for n, c in zip(names, contrasts, strict=True) if c < 4.5} == {}


@pytest.mark.slow
def test_it_prints(open_tab: Callable[..., Tab], path: Path) -> None:
    tab = open_tab(path, color_scheme="dark")
    tab.page.emulate_media(media="print")
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not tab.page.locator("#experiments .filters").is_visible()
    assert tab.page.locator("#compare-a").is_visible()  # which two stand there
    tab.page.set_viewport_size({"width": 703, "height": 900})  # A4 within its margins, at 96 pixels an inch
    assert tab.width() <= 703
    texts = tab.chart().evaluate(BOXES)["texts"]
    assert all(apart(one, other) for i, one in enumerate(texts) for other in texts[i + 1 :])
    assert tab.page.locator("#notebook pre").is_visible()  # folded on a screen
    assert tab.page.pdf(prefer_css_page_size=True).startswith(b"%PDF")


def test_without_scripts_everything_is_there(open_tab: Callable[..., Tab], path: Path) -> None:
    tab = open_tab(path, java_script_enabled=False)
    assert tab.page.locator("#detail-0005").is_visible()


# A page of 1,000 experiments: small, and as handy as one of ten

NUM = 1000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU time grows with the number of experiments, not with its square."""
    pages = dict[int, str]()
    roots = {num: tmp_path_factory.mktemp(f"campaign-{num}") for num in (NUM // 4, NUM)}
    for num, root in roots.items():
        build(root, num, num_examples=100, with_files=False)
    view_of(Ledger(roots[NUM // 4]), NOW)  # what loads once, is loaded
    assert_linear(lambda num: pages.update({num: render(view_of(Ledger(roots[num]), NOW))}), NUM // 4, 1)
    html = pages[NUM]
    assert len(html.encode()) < 5_000_000
    assert "left out of a page of 1,000 experiments" in require_safe(html).text
    path = roots[NUM] / "report.html"
    path.write_text(html, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_searched_sorted_and_compared(open_tab, many, width, scheme):
    tab = open_tab(many, width, color_scheme=scheme)
    assert len(tab.column("number")) == NUM
    tab.page.locator("#search").fill("lr 1e-5")
    found = tab.column("number")
    assert 0 < len(found) < NUM
    assert tab.page.locator("#shown").inner_text() == f"{len(found):,} of 1,000"
    tab.page.locator("#search").fill("")
    options = tab.page.locator("#compare-b option").all_text_contents()
    assert 100 <= len(options) <= 150
    tab.page.locator("#compare-b").select_option(index=60)
    assert "fixed" in tab.page.locator("#compared").inner_text()
    tab.page.locator(f"#open-{int(tab.column('number')[0]):04d}").click()
    assert tab.width() <= width

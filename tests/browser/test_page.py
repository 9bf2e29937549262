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


def test_a_dot_shows_its_run_and_a_click_draws_its_curves(tab: Tab) -> None:
    page = tab.page
    before = page.locator("#chips button").all_inner_texts()
    lines = page.locator("#curve-reward_mean .mark-line path").count()
    dot = page.locator("#progress .mark-symbol.role-mark").last.locator("path").last
    dot.hover(force=True)
    tooltip = page.locator("#vg-tooltip-element").inner_text()
    assert all(word in tooltip for word in ("hypothesis", "change", "score", "effect"))
    dot.click(force=True)
    after = page.locator("#chips button").all_inner_texts()
    assert len({*before} ^ {*after}) in (1, 2)
    assert len(after) <= 6
    for _ in after:
        page.locator("#chips button").first.click()
    page.wait_for_selector("#curve-reward_mean .mark-line path", state="detached")
    assert lines >= 2


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
    page.locator("#search").fill("OPTIM.LR 1e-5")
    diffs = [" ".join(records[number].diff) for number in tab.numbers()]
    assert diffs
    assert all("trainer.optim.lr" in diff and "1e-5" in diff for diff in diffs)
    page.locator("#search").fill("<script> nothing has this")
    assert tab.numbers() == []
    page.locator("#kept a").last.click()  # of a run that is filtered out
    page.locator("tr.open").wait_for()
    assert sorted(tab.numbers()) == everything


def choose(tab: Tab, a: int, b: int) -> str:
    tab.page.locator("#compare-a").select_option(str(a))
    tab.page.locator("#compare-b").select_option(str(b))
    return str(tab.page.locator("#compared").inner_text())


def test_settings_numbers_and_flips_of_any_two(tab: Tab, path: Path) -> None:
    ledger = Ledger(path.parent)
    one, other = ledger.record(4), ledger.record(13)
    text = choose(tab, 4, 13)
    assert f"{100 * one.score:.1f} %" in text
    assert f"{100 * other.score:.1f} %" in text
    before, after = (record.evaluation.example_scores for record in (one, other))
    fixed = sum(b > a for a, b in zip(before, after, strict=True))
    broken = sum(b < a for a, b in zip(before, after, strict=True))
    assert f"of 4,000 examples: {fixed} fixed, {broken} broken, net {fixed - broken}" in text
    assert f"± {1.96 * (fixed + broken) ** 0.5:.0f}" in text
    cards = tab.page.locator("#compared figure").all_inner_texts()
    assert [card.split("\n")[0] for card in cards] == ["fixed"] * 3 + ["broken"] * 3
    assert all("How many" in card and "Answer of A" in card and "Answer of B" in card for card in cards)
    rows = [row.split("\t") for row in tab.page.locator("#compared tr").all_inner_texts()]
    settings = [row for row in rows if "." in row[0]]
    assert settings
    assert all(a != b for _, a, b in settings)
    crash = next(record.number for record in ledger.records() if record.status == "crash")
    text = choose(tab, 1, crash)
    assert "not measured on the same examples." in text
    assert "NaN" not in text
    assert "undefined" not in text


@pytest.mark.parametrize("width", [1280, 800, 390])
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
    low = tab.page.locator(".kept td small").first.bounding_box()
    assert low["height"] < 40, "no word is broken into letters"
    assert tab.page.locator(".chart svg").count() == tab.page.locator(".chart").count() >= 8


def test_without_scripts_headline_kept_changes_and_a_picture_are_there(
    open_tab: Callable[..., Tab], path: Path
) -> None:
    tab = open_tab(path, java_script_enabled=False)
    for place in ("h1", "#take li .copy >> nth=0", "table.kept", "#progress svg", "#certificate"):
        assert tab.page.locator(place).is_visible(), place
    assert not tab.page.locator("#experiments").is_visible()


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


NUM = 1000


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
    left_out = [row for row in page.data["rows"] if "left out of a page of 1,000 experiments" in str(row["details"])]
    assert len(page.data["rows"]) == NUM
    assert 850 <= len(left_out) <= 900


def test_a_page_of_thirty_is_small(tmp_path: Path) -> None:
    ledger = build(tmp_path, 30)
    (tmp_path / "rules.toml").touch()
    (tmp_path / "environments").symlink_to(Path(__file__).parents[2] / "environments")
    assert len(render(view_of(ledger, NOW)).encode()) < 1_500_000

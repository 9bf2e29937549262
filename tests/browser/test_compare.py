"""Two experiments beside each other, in a browser."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from tests.browsing import Tab


def choose(tab: Tab, a: int, b: int) -> str:
    tab.page.locator("#compare-a").select_option(str(a))
    tab.page.locator("#compare-b").select_option(str(b))
    return str(tab.page.locator("#compared").inner_text())


def test_settings_numbers_curves_and_flips_of_any_two(tab: Tab, path: Path) -> None:
    ledger = Ledger(path.parent)
    one, other = ledger.record(4), ledger.record(13)
    text = choose(tab, 4, 13)
    assert f"{one.score:.3f}" in text
    assert f"{other.score:.3f}" in text
    assert re.search(r"effect\s+\S?\d+\.\d ± \d+\.\d pp", text)
    assert "effect_at_decision" in text
    before, after = (record.evaluation.example_scores for record in (one, other))
    fixed = sum(b > a for a, b in zip(before, after, strict=True))
    broken = sum(b < a for a, b in zip(before, after, strict=True))
    assert f"of 4,000 examples: {fixed} fixed, {broken} broken, net" in text
    assert f"± {1.96 * (fixed + broken) ** 0.5:.0f}" in text
    cards = tab.page.locator("#compared .rollout").all_inner_texts()
    assert [card.split("\n")[0] for card in cards] == ["fixed"] * 3 + ["broken"] * 3
    assert all("How many" in card and "Answer of A" in card and "Answer of B" in card for card in cards)
    keys = tab.page.locator("#compared .setting th").all_inner_texts()
    assert keys
    cells = tab.page.locator("#compared .setting td").all_inner_texts()
    assert all(a != b for a, b in zip(cells[::2], cells[1::2], strict=True))


def test_answers_shown_are_those_of_the_files(tab: Tab, path: Path) -> None:
    choose(tab, 1, 13)
    card = tab.page.locator("#compared .rollout.fixed").first
    problem, of_a, of_b = card.locator("pre").all_inner_texts()
    rows = [
        {row["completion"]: row["score"] for line in file.read_text().splitlines() if (row := json.loads(line))}
        for file in (path.parent / "runs" / number / "evaluation.jsonl" for number in ("0001", "0013"))
    ]
    assert rows[0][of_a] == 0.0
    assert rows[1][of_b] == 1.0
    assert problem


@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_works_from_the_keyboard(open_tab: Callable[..., Tab], path: Path, width: int) -> None:
    tab = open_tab(path, width)
    before = tab.page.locator("#compared").inner_text()
    tab.page.locator("#compare-b").focus()
    tab.page.keyboard.press("ArrowUp")
    assert tab.page.locator("#compared").inner_text() != before
    assert tab.width() <= width


def test_a_crash_is_compared_by_what_it_has(tab: Tab) -> None:
    tab.page.locator("#group-crash").click()
    text = choose(tab, 1, int(tab.column("number")[0]))
    assert "Flips of answers: not measured on the same examples." in text
    assert "NaN" not in text
    assert "undefined" not in text

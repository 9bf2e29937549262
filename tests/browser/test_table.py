"""The table of experiments in a browser: sorted, filtered, searched, its columns chosen, folded, and taken along."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from tests.browser.conftest import Tab, written
from tests.campaigns import replace
from tests.integration.test_report import HOSTILE
from tests.stand_in_campaign import build

pytestmark = pytest.mark.slow  # tests/integration/test_report.py reads the page as a browser would


def test_the_table_is_sorted_filtered_searched_and_folded(tab: Tab) -> None:
    # Sorted both ways, with what was not measured last.
    everything, in_order = tab.column("group"), tab.column("number")
    for name in ("effect", "helps", "score", "seconds", "number"):
        orders = []
        for _ in range(2):
            tab.page.locator(f"#sort-{name}").click()
            values = tab.column(name)
            numbers = [float(value) for value in values if value]
            assert values[len(numbers) :] == [""] * (len(values) - len(numbers)), name
            assert numbers == sorted(numbers) or numbers == sorted(numbers, reverse=True)
            orders.append(numbers)
        assert orders[0] == orders[1][::-1]
    assert "" in tab.column("effect")  # the baseline and crashes
    assert tab.page.locator("th[aria-sort]").count() == 1
    tab.page.locator("#sort-number").click()
    # Filtered by verdict and by key.
    tab.page.locator("#group-crash").click()
    assert set(tab.column("group")) == {"crash"}
    assert tab.page.locator("#shown").inner_text() == f"{everything.count('crash')} of {len(everything)}"
    tab.page.locator("#group-all").click()
    tab.page.locator("#key-filter").select_option("trainer.optim.lr")
    keys = tab.column("keys")
    assert 0 < len(keys) < len(everything)
    assert all("trainer.optim.lr" in key.split() for key in keys)
    tab.page.locator("#group-keep").click()
    assert set(tab.column("group")) <= {"keep"}
    tab.page.locator("#group-all").click()
    tab.page.locator("#key-filter").select_option("")
    assert sorted(tab.column("group")) == sorted(everything)
    # Searched for numbers, words, keys and values beside the filters.
    search = tab.page.locator("#search")
    search.fill("0007")
    rows = tab.page.locator("table.experiments > tbody:not([hidden])").all_text_contents()
    assert tab.column("number")[0] == "7"
    assert all("0007" in row for row in rows)  # the others reverted it, or measured it again
    search.fill("OPTIM.LR 1e-5")
    tab.page.locator("#group-keep").click()
    assert set(tab.column("group")) == {"keep"}
    values = tab.page.locator("tbody:not([hidden]) .changes").all_text_contents()
    assert values
    assert all("optim.lr" in value and "1e-5" in value for value in values)
    search.fill("<script> nothing has this")
    assert tab.column("number") == []
    assert tab.page.locator("#no-match").is_visible()
    search.fill("")
    tab.page.locator("#group-all").click()
    assert sorted(tab.column("number")) == sorted(in_order)
    # Folded; a link to a row unfolds it.
    table = tab.page.locator("table.experiments")
    tab.page.locator("#fold-experiments > summary").press("Enter")
    assert not table.is_visible()
    tab.page.locator("#kept a.run").last.click()
    tab.page.locator("tbody.opened").wait_for()  # the browser tells of another address when it has time
    assert table.is_visible()
    assert tab.page.locator("tbody.opened").count() == 1


def download(tab: Tab) -> list[list[str]]:
    with tab.page.expect_download() as waiting:
        tab.page.locator("#download").click()
    text = Path(waiting.value.path()).read_text(encoding="utf-8-sig")
    return list(csv.reader(io.StringIO(text, newline="")))


def test_the_table_as_csv_has_what_is_shown_in_numbers(tab: Tab) -> None:
    tab.page.locator("#group-keep").click()
    tab.page.locator("#sort-effect").click()
    head, *rows = download(tab)
    assert [row[0] for row in rows] == tab.column("number")
    at = head.index("effect_at_decision, pp")
    assert [float(row[at]) for row in rows] == [pytest.approx(100 * float(v)) for v in tab.column("effect")]
    tab.page.locator("#group-crash").click()
    _, *rows = download(tab)
    assert {row[at] for row in rows} == {""}  # not measured is no 0


def test_no_cell_of_the_csv_is_a_formula(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    formulas = [
        *("=1+1", "+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", '"=1', "\uff1d1", "\u22121"),
        'plain, "quoted"\nline',
    ]
    ledger = build(tmp_path, len(formulas), num_examples=60, with_files=False)
    for record, text in zip(ledger.records(), formulas, strict=True):
        ledger.write(replace(record, description=text, diff=(f"{text} 1 -> 2",)))
    _, *rows = download(open_tab(written(tmp_path)))
    assert len(rows) == len(formulas)
    for row, text in zip(rows, formulas, strict=True):
        for cell in (row[3], row[4]):
            assert cell.lstrip()[:1] not in ("=", "+", "-", "@", "\uff1d", "\u2212", "\t"), (text, cell)
    assert rows[-1][3].startswith('plain, "quoted"')


def test_hostile_texts_run_nothing_and_are_searched_and_downloaded_as_text(open_tab, tmp_path):
    ledger = build(tmp_path, len(HOSTILE), num_examples=60, with_files=False)
    everything = " ".join(HOSTILE)
    for record, text in zip(ledger.records(), HOSTILE, strict=True):
        ledger.write(replace(record, description=text, lesson=everything, health=everything, git_action=everything))
    tab = open_tab(written(tmp_path), 390)
    for button in tab.page.query_selector_all("button.open"):
        button.click()
    assert tab.width() <= 390
    tab.page.locator("#search").fill("<script>document.title")
    assert tab.column("number") == ["1"]
    tab.page.locator("#search").fill("")
    rows = download(tab)[1:]
    assert rows[0][3] == HOSTILE[0]
    assert "\u202e" not in "".join(map("".join, rows))
    assert tab.page.locator("td.c-text img, td.c-text svg, td.c-text script").count() == 0
    assert "pwned" not in tab.page.title()
    assert [url.split(":")[0] for url in tab.asked if not url.startswith(("data:", "blob:"))] == ["file"]


# Two experiments beside each other


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
    assert re.search(r"effect_at_decision\s+\S?\d+\.\d ± \d+\.\d pp", text)
    before, after = (record.evaluation.example_scores for record in (one, other))
    fixed = sum(b > a for a, b in zip(before, after, strict=True))
    broken = sum(b < a for a, b in zip(before, after, strict=True))
    assert f"of 4,000 examples: {fixed} fixed, {broken} broken, net" in text
    assert f"± {1.96 * (fixed + broken) ** 0.5:.0f}" in text
    cards = tab.page.locator("#compared .rollout").all_inner_texts()
    assert [card.split("\n")[0] for card in cards] == ["fixed"] * 3 + ["broken"] * 3
    assert all("How many" in card and "Answer of A" in card and "Answer of B" in card for card in cards)
    _, *answers = tab.page.locator("#compared .rollout.fixed").first.locator("pre").all_inner_texts()
    for number, answer, score in zip(("0004", "0013"), answers, (0.0, 1.0), strict=True):
        lines = (path.parent / "runs" / number / "evaluation.jsonl").read_text().splitlines()
        assert {row["score"] for row in map(json.loads, lines) if row["completion"] == answer} == {score}
    keys = tab.page.locator("#compared .setting th").all_inner_texts()
    assert keys
    cells = tab.page.locator("#compared .setting td").all_inner_texts()
    assert all(a != b for a, b in zip(cells[::2], cells[1::2], strict=True))


def test_a_crash_is_compared_by_what_it_has(tab: Tab) -> None:
    tab.page.locator("#group-crash").click()
    text = choose(tab, 1, int(tab.column("number")[0]))
    assert "Flips of answers: not measured on the same examples." in text
    assert "NaN" not in text
    assert "undefined" not in text

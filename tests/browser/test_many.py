"""A page of 1,000 experiments in a browser: small, and as handy as one of ten."""

import time
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.report.page import render, view_of
from tests.browsing import NOW
from tests.integration.test_report import require_safe
from tests.stand_in_campaign import build

NUM = 1000


def page_of(root: Path, num_experiments: int) -> tuple[str, float]:
    """A campaign's page, and the CPU seconds it took."""
    build(root, num_experiments, num_examples=100, with_files=False)
    view_of(Ledger(root), "", NOW)  # what loads once, is loaded
    began = time.process_time()
    html = render(view_of(Ledger(root), "", NOW))
    return html, time.process_time() - began


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """benchmarks/overhead.py has the seconds; here only that they do not grow as a square would: 16 times."""
    _, seconds_of_a_quarter = page_of(tmp_path_factory.mktemp("quarter"), NUM // 4)
    root = tmp_path_factory.mktemp("many")
    html, seconds = page_of(root, NUM)
    assert seconds < 8 * seconds_of_a_quarter
    assert len(html.encode()) < 5_000_000
    assert "left out of a page of 1,000 experiments" in require_safe(html).text
    path = root / "report.html"
    path.write_text(html, encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_searched_sorted_compared_and_printed(open_tab, many, width, scheme):
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
    tab.page.emulate_media(media="print")
    tab.page.set_viewport_size({"width": 703, "height": 900})  # A4 within its margins, at 96 pixels an inch
    assert tab.width() <= 703
    assert tab.page.locator("#run-0999").is_visible()

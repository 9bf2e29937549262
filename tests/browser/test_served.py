"""The page while a night runs: it follows a ledger that grows, and leaves a reader where they were."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nightshift.report.serve import Live, Server
from tests.browsing import NOW, Tab, serving
from tests.stand_in_campaign import BRANCH, build

FIRST, ALL = 30, 33


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    build(root, ALL, num_examples=60)
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    """The ledger of a night that has made the first experiments."""
    root = tmp_path / "checkout"
    left_out = [f"{number:04d}" for number in range(FIRST + 1, ALL + 1)]
    shutil.copytree(whole / "runs", root / "runs", ignore=shutil.ignore_patterns(*left_out))
    return root


def live(root: Path, branch: str | None = BRANCH) -> Live:
    return Live(root, branch, lambda: NOW)


@pytest.fixture
def server(root: Path) -> Iterator[Server]:
    with serving(live(root)) as server:
        yield server


def grow(root: Path, whole: Path, number: int) -> None:
    """One more experiment is written, as the ledger does it: its folder appears whole."""
    name = f"{number:04d}"
    shutil.copytree(whole / "runs" / name, root / name)
    (root / name).rename(root / "runs" / name)


def test_it_follows_the_ledger_and_keeps_what_a_reader_did(open_tab, server, root, whole):
    tab = open_tab(server.address)
    page = tab.page
    page.locator("#group-discard").click()
    page.locator("#search").fill("curves")
    page.locator("#sort-effect").click()
    page.locator("#fold-columns summary").click()
    page.locator("#column-then").check()
    page.locator("#fold-compare > summary").click()
    numbers = tab.column("number")
    page.locator(f"#open-{int(numbers[3]):04d}").click()
    page.locator("#search").focus()
    page.evaluate("document.getElementById('search').setSelectionRange(2, 4)")
    page.evaluate("window.mine = 1")  # a page that was loaded anew has forgotten it
    place = f"document.getElementById('run-{int(numbers[3]):04d}').getBoundingClientRect().top"
    page.evaluate(f"scrollTo({{top: scrollY + {place} - 200, behavior: 'instant'}})")
    top = page.evaluate(place)
    for number in range(FIRST + 1, ALL + 1):
        grow(root, whole, number)
        page.locator(f"#run-{number:04d}").wait_for(state="attached")
    assert page.evaluate("window.mine") == 1
    assert page.evaluate(place) == pytest.approx(top, abs=2)
    assert set(numbers) <= set(tab.column("number"))
    assert set(tab.column("group")) == {"discard"}
    assert page.locator("#search").input_value() == "curves"
    assert page.evaluate("document.activeElement.id") == "search"
    assert page.evaluate("[document.activeElement.selectionStart, document.activeElement.selectionEnd]") == [2, 4]
    values = [float(value) for value in tab.column("effect") if value]
    assert values == sorted(values, reverse=True)
    assert page.locator("th.c-then").is_visible()
    assert page.locator(f"#detail-{int(numbers[3]):04d}").is_visible()
    assert not page.locator("#compared").is_visible()
    assert page.locator("#live").inner_text() == "live"
    asked = {url.removeprefix(server.address) for url in tab.asked if not url.startswith("data:")}
    assert asked == {"", "version"}


def test_it_begins_before_the_first_experiment(open_tab: Callable[..., Tab], root: Path, whole: Path) -> None:
    shutil.rmtree(root / "runs")
    (root / "runs").mkdir()
    with serving(live(root, None)) as server:
        tab = open_tab(server.address)
        assert tab.page.locator("h1").inner_text() == "Nothing has been run yet"
        grow(root, whole, 1)
        tab.page.locator("#run-0001").wait_for(state="attached")
        tab.page.locator("#open-0001").click()
        assert tab.page.locator("#detail-0001").is_visible()


def test_it_says_that_its_server_ended(open_tab: Callable[..., Tab], root: Path) -> None:
    with serving(live(root)) as server:
        tab = open_tab(server.address)
    tab.page.locator("#live", has_text="does not answer").wait_for()
    assert tab.page.locator("h1").is_visible()
    assert all("ERR_CONNECTION_REFUSED" in line for line in tab.said)  # chromium's own words
    tab.said.clear()


def test_a_page_as_a_file_asks_nobody(tab: Tab) -> None:
    tab.page.wait_for_timeout(2500)  # longer than it waits between two questions
    assert [url.split(":")[0] for url in tab.asked if not url.startswith("data:")] == ["file"]
    assert "connect-src" not in tab.page.content()
    assert tab.page.locator("#live").count() == 0

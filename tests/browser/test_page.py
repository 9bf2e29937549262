"""The morning page in a real headless Chromium: what a person does with it, wide and narrow, without scripts."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.report.page import render, view_of
from tests.campaigns import replace
from tests.integration.test_report import HOSTILE, NOW, require_safe
from tests.stand_in_campaign import build
from tests.waiting import HANG_SECONDS, assert_linear

pytestmark = pytest.mark.slow  # tests/integration/test_report.py reads the page as a browser would
ENVIRONMENTS = Path(__file__).parents[2] / "environments"


def written(root: Path) -> Path:
    """The page of the campaign in `root`, as a file there."""
    path = root / "report.html"
    path.write_text(render(view_of(Ledger(root), NOW)), encoding="utf-8")
    return path


class Tab:
    """One page, with everything that it said and asked for."""

    def __init__(self, browser: Any, address: Path | str, width: int = 1280, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.context.set_default_timeout(1000 * HANG_SECONDS)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address.as_uri() if isinstance(address, Path) else address)

    def drawn(self) -> "Tab":
        """Wait until the script has drawn everything."""
        self.page.wait_for_selector("html[data-drawn]", state="attached")
        return self

    def numbers(self) -> list[int]:
        """The experiments of the table, in order."""
        return [int(text) for text in self.page.locator("#table tr.run td:first-child").all_inner_texts()]

    def width(self) -> int:
        """Of everything, in pixels: more than the window's is scrolled sideways."""
        return int(self.page.evaluate("document.documentElement.scrollWidth"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium. While it lasts, no other test can run an event loop in this thread."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        args = ["--no-sandbox", "--disable-gpu"]  # root has no sandbox
        browser = driver.chromium.launch(executable_path=path, args=args, timeout=1000 * HANG_SECONDS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("campaign")
    build(root, 40, seed=7)
    (root / "environments").symlink_to(ENVIRONMENTS)
    (root / "rules.toml").touch()
    return written(root)


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Opens pages, as Tab does; none of them may complain."""
    tabs: list[Tab] = []

    def open_one(address: Path | str, width: int = 1280, **options: Any) -> Tab:
        tabs.append(Tab(browser, address, width, **options))
        return tabs[-1]

    yield open_one
    for each in tabs:
        assert each.said == []
        each.context.close()


@pytest.fixture
def tab(open_tab: Callable[..., Tab], path: Path) -> Tab:
    return open_tab(path).drawn()


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
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    assert tab.page.locator("#run-0002 + tr.open").is_visible()


def test_the_smoothed_curve_of_a_run_has_the_mean_of_its_own_values(tab: Tab) -> None:
    heights = tab.page.evaluate("""() => [...document.querySelectorAll("#curve-reward_mean .mark-line path")].map(
        (line) => line.getAttribute("d").match(/,[-\\d.]+/g).map((y) => +y.slice(1))
            .reduce((sum, y, i, all) => sum + y / all.length, 0))""")
    thin, smoothed = heights[: len(heights) // 2], heights[len(heights) // 2 :]
    assert smoothed == pytest.approx(thin, abs=1)
    assert max(thin) - min(thin) > 5


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
def test_nothing_scrolls_sideways_and_the_keyboard_chooses_what_is_compared(open_tab, path, width):
    tab = open_tab(path, width, color_scheme="dark").drawn()
    for row in ("0001", "0002", "0005"):
        tab.page.locator(f"#run-{row} button").click()
    before = tab.page.locator("#compared").inner_text()
    tab.page.locator("#compare-b").press("ArrowUp")
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


def test_a_page_of_a_thousand_experiments_is_small(tmp_path: Path) -> None:
    """The CPU time grows with the number of experiments, not with its square."""
    pages, ledgers = dict[int, str](), dict[int, Ledger]()
    for num in (250, 1000):
        ledgers[num] = build(tmp_path / str(num), num, num_examples=100, with_files=False)
    render(view_of(ledgers[250], NOW))  # what loads once, is loaded
    assert_linear(lambda num: pages.update({num: render(view_of(ledgers[num], NOW))}), 250, 1)
    assert len(pages[1000].encode()) < 4_000_000
    assert len(require_safe(pages[1000]).data["rows"]) == 1000

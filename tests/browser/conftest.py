"""The browser, and a page of 40 experiments, for all tests of the morning page."""

import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.report.page import render, view_of
from tests.stand_in_campaign import build
from tests.waiting import HANG_SECONDS

ENVIRONMENTS = Path(__file__).parents[2] / "environments"
NOW = datetime(2026, 11, 21, 7, tzinfo=UTC)


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


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Debian's chromium; Playwright's own download is not relied on.

    For this folder: while it lasts, Playwright's event loop counts as running in this thread, and no other test's can.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        # root has no sandbox
        browser = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"], timeout=1000 * HANG_SECONDS
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
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

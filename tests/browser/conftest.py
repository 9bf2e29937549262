"""The browser, and a page of 40 experiments, for all tests of the morning page."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browsing import Tab, written
from tests.stand_in_campaign import build
from tests.waiting import HANG_SECONDS

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


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
    return open_tab(path)

"""A headless Chromium, and what tests of the morning page do with it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nightshift.campaign.ledger import Ledger
from nightshift.report.page import render, view_of
from tests.waiting import HANG_SECONDS

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

    def column(self, name: str) -> list[str]:
        """One data attribute of the visible experiments, in order."""
        script = "(bodies, name) => bodies.filter(b => !b.hidden).map(b => b.dataset[name])"
        return list(self.page.eval_on_selector_all("table.experiments > tbody", script, name))

    def chart(self) -> Any:
        """The progress chart."""
        return self.page.query_selector("#progress svg.chart")

    def width(self) -> int:
        """Of everything, in pixels: more than the window's is scrolled sideways."""
        return int(self.page.evaluate("document.documentElement.scrollWidth"))

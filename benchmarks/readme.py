"""The chart, the table and the summary block of README.md and docs/using.md, made again from the recorded campaign.

    uv run benchmarks/readme.py              rewrite both pages, docs/progress.png and docs/example-report.html
    uv run benchmarks/readme.py --shoot      and docs/report.png, the top of that page, with a chromium
    uv run benchmarks/readme.py --check      say whether the pages are what the records say

What stands there between `<!-- NAME -->` and `<!-- end of NAME -->` is generated: edit this file, not that.
"""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click

from nightshift.campaign.ledger import Ledger
from nightshift.console import summary
from nightshift.report.markdown import kept_table
from nightshift.report.page import View, render, view_of
from nightshift.report.png import draw
from nightshift.report.text import certificate_line, duration
from nightshift.train_toml.values import shorten

ROOT = Path(__file__).resolve().parents[1]
PAGES, PICTURE = (ROOT / "README.md", ROOT / "docs" / "using.md"), ROOT / "docs" / "progress.png"
EXAMPLE, SCREENSHOT = ROOT / "docs" / "example-report.html", ROOT / "docs" / "report.png"
_MAX_LINE, _MAX_CHANGES = 150, 3
CAMPAIGN = ROOT / "benchmarks" / "campaigns" / "tpe-0"


def recorded(campaign: Path) -> View:
    """What the morning page of a recorded campaign shows."""
    return view_of(Ledger(campaign, campaign), "", datetime.now(UTC))


def campaign_section(view: View) -> str:
    """Verdict, certificate and counts."""
    morning, seconds = view.morning, sum(night.length_seconds for night in view.nights)
    told = f"{view.headline.title}.** {view.headline.sentence} {certificate_line(morning)}"
    return f"**{told} {morning.counts}, in {duration(seconds)}."


def kept_section(view: View) -> str:
    """The kept chain as Markdown."""
    return "\n".join(kept_table(view.morning, _MAX_CHANGES))


def summary_section(view: View) -> str:
    """The summary block of the last change that stands, as run.py printed it, but for the ends of long lines."""
    record = view.morning.chain[-1].record
    # Their ± were one standard error when this night was recorded.
    health = "\n".join(line for line in (record.health or "").splitlines() if "+-" not in line)
    lines = summary(replace(record, health=health), "").splitlines()
    return "\n".join(["```", *(shorten(line, _MAX_LINE) for line in lines), "```"])


SECTIONS = {"campaign": campaign_section, "kept": kept_section, "summary": summary_section}


def filled(text: str, name: str, content: str) -> str:
    """`text` with `content` between the marks of `name`. Raises ValueError where they are missing."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    head, found, rest = text.partition(begin)
    _, also_found, tail = rest.partition(end)
    if not found or not also_found:
        raise ValueError(f"there is no {begin.strip()} ... {end.strip()}")
    return f"{head}{begin}{content}{end}{tail}"


def written(page: Path, view: View) -> str:
    """A page as the records say."""
    text = page.read_text(encoding="utf-8")
    for name, section in SECTIONS.items():
        if f"<!-- {name} -->" in text:
            text = filled(text, name, section(view))
    return text


def shoot(page: Path, picture: Path) -> None:
    """The first screens of a page, 1280 pixels wide. Needs playwright and a chromium of the system."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 1860})
        tab.goto(page.as_uri())
        shot = Image.open(io.BytesIO(tab.screenshot()))
        browser.close()
    shot.quantize(128).save(picture, optimize=True)  # a third of the bytes


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Change nothing; exit code 1 if the README says something else.")
@click.option("--shoot", "is_shot", is_flag=True, help="Take the screenshot, too.")
def main(check: bool, is_shot: bool) -> None:
    """Make the sections, write or compare."""
    view = recorded(CAMPAIGN)
    pages = {page: written(page, view) for page in PAGES}
    if check:
        other = [page.name for page, text in pages.items() if text != page.read_text(encoding="utf-8")]
        sys.exit(f"{', '.join(other)}: not what the records say: uv run benchmarks/readme.py" if other else 0)
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    PICTURE.write_bytes(draw(view.charts[0], view.headline.title, dpi=150))
    EXAMPLE.write_text(render(view), encoding="utf-8")
    if is_shot:
        shoot(EXAMPLE, SCREENSHOT)
    names = ", ".join(path.name for path in (*PAGES, PICTURE, EXAMPLE))
    print(f"{names} from {CAMPAIGN.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""The README's chart, table and summary block, made again from the recorded campaign.

    uv run benchmarks/readme.py              rewrite README.md and docs/progress.png
    uv run benchmarks/readme.py --check      say whether the README is what the records say

What stands in the README between `<!-- campaign -->` and `<!-- end of campaign -->`, and between
`<!-- summary -->` and `<!-- end of summary -->`, is generated: edit this file, not that.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from nightshift.campaign.ledger import Ledger
from nightshift.console import summary
from nightshift.report.markdown import kept_table
from nightshift.report.page import View, view_of
from nightshift.report.png import draw
from nightshift.report.text import certificate_line, duration
from nightshift.train_toml.values import shorten

ROOT = Path(__file__).resolve().parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "progress.png"
_MAX_LINE, _MAX_CHANGES = 150, 3
CAMPAIGN = ROOT / "benchmarks" / "campaigns" / "tpe-0"


def recorded(campaign: Path) -> View:
    """What the morning page of a recorded campaign shows."""
    return view_of(Ledger(campaign, campaign), "", datetime.now(UTC))


def campaign_section(view: View) -> str:
    """Verdict, certificate, chart and kept chain as Markdown."""
    morning = view.morning
    seconds = sum(night.length_seconds for night in view.nights)
    back = f" ({len(morning.taken_back)} taken back)" if morning.taken_back else ""
    return "\n".join(
        [
            f"**{view.headline.title}.** {view.headline.sentence} {certificate_line(morning)}",
            "",
            f"{len(morning.experiments)} experiments in {duration(seconds)}: {len(morning.kept)} kept{back}, "
            f"{morning.count('discard')} discarded, {morning.count('crash')} crashed.",
            "",
            f"![Score of every experiment, and the incumbent's believed score]({PICTURE.relative_to(ROOT)})",
            "",
            *kept_table(morning, _MAX_CHANGES),
        ]
    )


def summary_section(view: View) -> str:
    """The summary block of the last change that stands, as run.py printed it, but for the ends of long lines."""
    lines = summary(view.morning.chain[-1].record, "").splitlines()
    return "\n".join(["```", *(shorten(line, _MAX_LINE) for line in lines), "```"])


def filled(text: str, name: str, content: str) -> str:
    """`text` with `content` between the marks of `name`. Raises ValueError where they are missing."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    head, found, rest = text.partition(begin)
    _, also_found, tail = rest.partition(end)
    if not found or not also_found:
        raise ValueError(f"the README has no {begin.strip()} ... {end.strip()}")
    return f"{head}{begin}{content}{end}{tail}"


def written(text: str, view: View) -> str:
    """The README as the records say."""
    return filled(filled(text, "campaign", campaign_section(view)), "summary", summary_section(view))


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Change nothing; exit code 1 if the README says something else.")
def main(check: bool) -> None:
    """Make the sections, write or compare."""
    view = recorded(CAMPAIGN)
    before = README.read_text(encoding="utf-8")
    after = written(before, view)
    if check:
        sys.exit(0 if before == after else "README.md is not what the records say: uv run benchmarks/readme.py")
    README.write_text(after, encoding="utf-8")
    PICTURE.write_bytes(draw(view.charts[0], view.headline.title, dpi=150))
    print(f"{README.name} and {PICTURE.relative_to(ROOT)} from {CAMPAIGN.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""report.md: the morning page's verdict, its kept chain and its table, for a README, an issue or a terminal."""

import re
from collections.abc import Sequence

from nightshift.report.data import Morning
from nightshift.report.text import (
    UNKNOWN,
    Headline,
    besides,
    certificate_line,
    cut,
    duration,
    elsewhere_lines,
    plus_minus,
    score,
    share,
    visible,
)
from nightshift.report.timing import Night

_LONGEST = 200  # characters of a cell
_MARKDOWN = re.compile(r"([\\`*\[\]<#|~$&!@]|(?<!\w)_|_(?!\w)|(?<=:)/|(?<=www)\.)", re.IGNORECASE)


def summary(morning: Morning, headline: Headline, nights: Sequence[Night], has_picture: bool) -> str:
    lines = [f"# {markdown(headline.title)}", "", markdown(headline.sentence, 1000), ""]
    missing = morning.uncommitted and f"Not in git: {morning.uncommitted}"
    isolation = morning.isolation and f"{morning.isolation}."
    notes = (certificate_line(morning), missing, isolation, *morning.night, *elsewhere_lines(morning))
    for line in filter(None, notes):
        lines += [markdown(line, 2000), ""]
    if morning.experiments:
        seconds = sum(night.length_seconds for night in nights)
        lines += [
            f"{morning.counts}, on {markdown(morning.story.branch) or 'no branch'}"
            + (f", in {duration(seconds)}, without certificates." if seconds else "; time not measured."),
            "",
            markdown(f"Spent, without certificates: {morning.cost}."),
            "",
        ]
    if has_picture:
        lines += ["![Score of every experiment, and the incumbent's estimated score](progress.svg)", ""]
    if morning.kept:
        lines += ["## What was kept", "", "| run | effect, pp | P(it helps) | | change |", "|---|---|---|---|---|"]
        lines += [
            f"| {kept.change.name} | {plus_minus(kept.effect)} | {share(kept.effect.p_helps)} "
            f"| {markdown(kept.support)} | {'<br>'.join(markdown_code(change.line) for change in kept.changes)} |"
            for kept in morning.kept
        ]
        lines.append("")
    if morning.user_decisions:
        lines += [f"- {markdown(line)}" for line in morning.user_decisions] + [""]
    if morning.experiments:
        lines += ["## Experiments", ""]
        lines += ["| run | verdict | now | score | strict | effect, pp | hypothesis |", f"|{'---|' * 7}"]
        lines += [
            f"| {e.number:04d} | {e.verdict} | {e.row.now} | {score(e.record.score, UNKNOWN)} "
            f"| {score(e.record.strict_score, UNKNOWN)} | {plus_minus(e.effect)} "
            f"| {markdown(e.record.proposal.description)}{words and f' ({words})'} |"
            for e in morning.experiments
            for words in [besides(e.record)]
        ]
        lines.append("")
    lines += [f"- {markdown(note, 600)}" for note in morning.story.notes]
    return "\n".join(lines).rstrip() + "\n"


def markdown(text: str, limit: int = _LONGEST) -> str:
    """Text as itself in a Markdown table: one line, no markup, no link."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text, limit))


def markdown_code(text: str) -> str:
    """Text in a code span of a Markdown table."""
    return "`" + _one_line(text).replace("`", "'").replace("|", "\\|") + "`"


def _one_line(text: str, limit: int = _LONGEST) -> str:
    return " ".join(str(visible(cut(text, limit))).split())

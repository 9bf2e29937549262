"""report.md: the morning page's headline, its kept changes and its table, for a README, an issue or a terminal."""

import re

from nightshift.campaign.records import PICTURE_NAME
from nightshift.report.text import (
    UNKNOWN,
    View,
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

_LONGEST = 200  # characters of a cell
_MARKDOWN = re.compile(r"([\\`*\[\]<#|~$&!@]|(?<!\w)_|_(?!\w)|(?<=:)/|(?<=www)\.)", re.IGNORECASE)


def summary(view: View, has_picture: bool) -> str:
    """Return the text of report.md."""
    morning, headline = view.morning, view.headline
    lines = [f"# {markdown(headline.title)}", "", markdown(headline.sentence, 1000), ""]
    if view.facts:
        lines += [markdown("; ".join(f"{name}: {value}" for name, value in view.facts), 2000) + ".", ""]
    missing = morning.uncommitted and f"Not in git: {morning.uncommitted}"
    for line in filter(None, (certificate_line(morning), missing, *morning.night, *elsewhere_lines(morning))):
        lines += [markdown(line, 2000), ""]
    if morning.experiments:
        seconds = sum(night.length_seconds for night in view.nights)
        lines += [
            f"{morning.counts}, on {markdown(morning.story.branch) or 'no branch'}"
            + (f", in {duration(seconds)}, without certificates." if seconds else "; time not measured."),
            "",
            markdown(f"Compute used, without certificates: {morning.cost}."),
            "",
        ]
        for title, steps in (("What to copy", view.copied), ("What next", view.next_steps)):
            if steps:
                lines += [f"## {title}", "", *(f"- {markdown(text)} {markdown_code(code)}" for text, code in steps), ""]
    if has_picture:
        lines += [f"![Score of every experiment, and the incumbent's estimated score]({PICTURE_NAME})", ""]
    if morning.kept:
        lines += ["## What was kept", "", "| run | effect now, pp | P(it helps) | | commit | change |"]
        lines.append(f"|{'---|' * 6}")
        lines += [
            f"| {kept.change.name} | {plus_minus(kept.effect)} | {share(kept.effect.p_helps)} "
            f"| {markdown(kept.support)} | {kept.commit or UNKNOWN} "
            f"| {'<br>'.join(map(markdown_code, [c.line for c in kept.changes] or [kept.change.settings]))} |"
            for kept in morning.kept
        ]
        lines.append("")
    if morning.user_decisions:
        lines += [f"- {markdown(line)}" for line in morning.user_decisions] + [""]
    if morning.experiments:
        lines += ["## Experiments", ""]
        lines += ["| run | verdict | now | score | strict | effect, pp | hypothesis |", f"|{'---|' * 7}"]
        lines += [
            f"| {e.number:04d} | {e.verdict} | {e.row.now} | {score(e.row.eval_score, UNKNOWN)} "
            f"| {score(e.row.strict_score, UNKNOWN)} | {plus_minus(e.effect)} "
            f"| {markdown(e.record.proposal.description)}{words and f' ({words})'} |"
            for e in morning.experiments
            for words in [besides(e.record)]
        ]
        lines.append("")
    lines += [f"- {markdown(note, 600)}" for note in morning.story.notes]
    return "\n".join(lines).rstrip() + "\n"


def markdown(text: str, limit: int = _LONGEST) -> str:
    """Return text as itself in a Markdown table: one line, no markup, no link."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text, limit))


def markdown_code(text: str) -> str:
    """Return text in a code span of a Markdown table."""
    return "`" + _one_line(text).replace("`", "'").replace("|", "\\|") + "`"


def _one_line(text: str, limit: int = _LONGEST) -> str:
    return " ".join(str(visible(cut(text, limit))).split())

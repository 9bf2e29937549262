"""report.md: what the morning page begins with, and its table, for a README, an issue or a terminal."""

import re

from nightshift.campaign.records import PICTURE_NAME
from nightshift.report.text import UNKNOWN, View, certificate_line, cut, elsewhere_lines, plus_minus, share, visible

_LONGEST = 200  # characters of a cell
_MARKDOWN = re.compile(r"([\\`*\[\]<#|~$&!@]|(?<!\w)_|_(?!\w)|(?<=:)/|(?<=www)\.)", re.IGNORECASE)


def summary(view: View) -> str:
    """Return the text of report.md."""
    morning, headline, data = view.morning, view.headline, view.data
    facts = view.facts and "; ".join(f"{name}: {value}" for name, value in view.facts) + "."
    missing = morning.uncommitted and f"Not in git: {morning.uncommitted}"
    paragraphs = [headline.sentence, facts, certificate_line(morning), missing, *morning.night]
    paragraphs += elsewhere_lines(morning)
    if morning.experiments:
        paragraphs += [f"Branch {morning.story.branch or 'none'}: {view.results}"]
        paragraphs += [f"Compute used, without certificates: {morning.cost}."]
    parts = [f"# {markdown(headline.title)}", *(markdown(words, 2000) for words in paragraphs if words)]
    for title, steps in (("What to copy", view.copied), ("What next", view.next_steps)):
        if morning.experiments and steps:
            parts += [f"## {title}", "\n".join(f"- {markdown(words)} {markdown_code(code)}" for words, code in steps)]
        if morning.kept and view.train_toml and title == "What to copy":
            source = "\n".join(f"    {line}".rstrip() for line in visible(view.train_toml).splitlines())
            parts += ["The incumbent's train.toml:", source]
    if data["specs"]["progress"]:
        parts += [f"![Score of every experiment, and the incumbent's estimated score]({PICTURE_NAME})"]
    if morning.kept:
        rows = [
            f"| {kept.change.name} | {plus_minus(kept.effect)} | {share(kept.effect.p_helps)} "
            f"| {markdown(kept.support)} | {kept.commit or UNKNOWN} "
            f"| {'<br>'.join(map(markdown_code, [c.line for c in kept.changes] or [kept.change.settings]))} |"
            for kept in morning.kept
        ]
        rows.insert(
            0, "| run | effect now, pp | P(it helps) | | commit | change, as it was tried |\n" + f"|{'---|' * 6}"
        )
        parts += ["## What was kept", "\n".join(rows)]
    if morning.user_decisions:
        parts += ["\n".join(f"- {markdown(line)}" for line in morning.user_decisions)]
    if morning.experiments:
        heads = ["run", "verdict", "now", *data["columns"].values(), "hypothesis", "change", "remark"]
        rows = [f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"]
        rows += [
            " | ".join(
                [
                    f"| {row['number']:04d}",
                    row["verdict"],
                    row["now"],
                    *(row["cells"][name] for name in data["columns"]),
                    markdown(row["title"]),
                    "<br>".join(map(markdown_code, e.row.changes)),
                    f"{markdown(row['note'])} |",
                ]
            )
            for e, row in zip(morning.experiments, data["rows"], strict=True)
        ]
        parts += ["## Experiments", "\n".join(rows)]
    parts += ["\n".join(f"- {markdown(note, 600)}" for note in morning.story.notes)]
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown(text: str, limit: int = _LONGEST) -> str:
    """Return text as itself in a Markdown table: one line, no markup, no link."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text, limit))


def markdown_code(text: str) -> str:
    """Return text in a code span of a Markdown table."""
    return "`" + _one_line(text).replace("`", "'").replace("|", "\\|") + "`"


def _one_line(text: str, limit: int = _LONGEST) -> str:
    return " ".join(str(visible(cut(text, limit))).split())

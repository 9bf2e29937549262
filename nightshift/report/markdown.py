"""report.md: the first sections of the page and its table, for a README, an issue or a terminal."""

import re
from collections.abc import Iterable, Sequence

from nightshift.campaign.records import PICTURE_NAME
from nightshift.report.text import (
    KEPT_TERMS,
    RUN_TERMS,
    UNKNOWN,
    View,
    certificate_line,
    cut,
    elsewhere_lines,
    gain_parts,
    plus_minus,
    share,
    visible,
)

_LONGEST = 200  # characters of a cell
_MARKDOWN = re.compile(r"([\\`*\[\]<#|~$&!@]|(?<!\w)_|_(?!\w)|(?<=:)/|(?<=www)\.)", re.IGNORECASE)


def summary(view: View) -> str:
    """Return the text of report.md."""
    morning, data = view.morning, view.data
    facts = view.facts and "; ".join(f"{name}: {value}" for name, value in view.facts) + "."
    missing = morning.uncommitted and f"Not in git: {morning.uncommitted}"
    paragraphs = [view.headline.sentence, facts, certificate_line(morning), missing, *morning.night]
    paragraphs += elsewhere_lines(morning)
    if morning.experiments:
        paragraphs += [f"Branch {morning.story.branch or 'none'}: {view.results}"]
        paragraphs += [f"Compute used, without certificates: {morning.cost}."]
    parts = [f"# {markdown(view.headline.title)}", *(markdown(words, 2000) for words in paragraphs if words)]
    if morning.experiments:
        parts += ["## What to copy", markdown(view.nothing_to_copy), _list(view.copied)]
        if view.train_toml:
            lines = [f"    {line}".rstrip() for line in visible(view.train_toml).splitlines()]
            parts += ["The incumbent's train.toml:", "\n".join(lines)]
        parts += ["## What next", _list(view.next_steps)]
    if data["specs"]["progress"]:
        parts += [f"![Score of every experiment, and the incumbent's estimated score]({PICTURE_NAME})"]
    if morning.kept:
        heads = ("run", "effect now, pp", "P(it helps)", "", "commit", "change, as it was tried")
        rows = [
            (kept.change.name, plus_minus(kept.effect), share(kept.effect.p_helps), markdown(kept.support),
             kept.commit or UNKNOWN, _codes([c.line for c in kept.changes] or [kept.change.settings]))
            for kept in morning.kept
        ]  # fmt: skip
        parts += [
            "## What was kept",
            markdown(KEPT_TERMS, 2000),
            _table(heads, rows),
            markdown(gain_parts(morning), 2000),
        ]
    parts += ["\n".join(f"- {markdown(line)}" for line in morning.user_decisions)]
    if morning.experiments:
        columns = data["columns"]
        rows = [
            (f"{row['number']:04d}", row["verdict"], row["now"], *(row["cells"][name] for name in columns),
             markdown(row["title"]), _codes(e.row.changes), markdown(row["note"]))
            for e, row in zip(morning.experiments, data["rows"], strict=True)
        ]  # fmt: skip
        heads = ("run", "verdict", "now", *columns.values(), "hypothesis", "change", "remark")
        parts += ["## Experiments", markdown(RUN_TERMS, 2000), _table(heads, rows)]
    parts += ["\n".join(f"- {markdown(note, 600)}" for note in morning.story.notes)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _list(steps: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {markdown(sentence, 600)} {markdown_code(command)}" for sentence, command in steps)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def _codes(lines: Iterable[str]) -> str:
    return "<br>".join(map(markdown_code, lines))


def markdown(text: str, limit: int = _LONGEST) -> str:
    """Return text as itself in a Markdown table: one line, no markup, no link."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text, limit))


def markdown_code(text: str) -> str:
    """Return text in a code span of a Markdown table."""
    return "`" + _one_line(text).replace("`", "'").replace("|", "\\|") + "`"


def _one_line(text: str, limit: int = _LONGEST) -> str:
    return " ".join(str(visible(cut(text, limit))).split())

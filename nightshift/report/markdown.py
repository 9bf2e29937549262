"""report.md: the sections of the page and its table, for a README, an issue or a terminal."""

import re
from collections.abc import Iterator

from nightshift.campaign.records import PICTURE_NAME
from nightshift.report.sections import RUN_TERMS, Cell, Section, View
from nightshift.report.text import cut, visible

_LONGEST = 200  # characters of a cell
_MARKDOWN = re.compile(r"([\\`*\[\]<#|~$&!@]|(?<!\w)_|_(?!\w)|(?<=:)/|(?<=www)\.)", re.IGNORECASE)


def summary(view: View) -> str:
    """Return the text of report.md."""
    columns = view.data["columns"]
    rows = [
        (f"{row['number']:04d}", row["verdict"], row["now"], *(row["cells"][name] for name in columns),
         row["title"], e.row.changes, row["note"])
        for e, row in zip(view.morning.experiments, view.data["rows"], strict=True)
    ]  # fmt: skip
    heads = ("run", "verdict", "now", *columns.values(), "hypothesis", "change", "remark")
    branch = f"Branch {view.morning.story.branch or 'none'}: {view.morning.counts}."
    sections = [Section("", [view.headline.sentence, branch])]
    sections += [section for name, section in view.sections.items() if name != "notebook"]
    parts = [f"# {markdown(view.headline.title)}", *(part for section in sections for part in _parts(section))]
    if view.data["specs"]["progress"]:
        parts.append(f"![Score of every experiment, and the incumbent's estimated score]({PICTURE_NAME})")
    parts += _parts(Section("Experiments", [RUN_TERMS], heads=heads, rows=rows)) if rows else ()
    return "\n\n".join(parts) + "\n"


def _parts(section: Section) -> Iterator[str]:
    """Yield the paragraphs, lists and tables of a section; nothing if the section is empty."""
    if not any((section.lines, section.steps, section.rows, section.source)):
        return
    if section.title:
        yield f"## {section.title}"
    yield from (markdown(line, 2000) for line in section.lines if line)
    if section.steps:
        yield "\n".join(f"- {markdown(words, 600)} {_cell([command])}" for words, command in section.steps)
    if section.rows:
        lines = [section.heads, ["---"] * len(section.heads), *(map(_cell, row) for row in section.rows)]
        yield "\n".join(f"| {' | '.join(line)} |" for line in lines)
    yield from (markdown(line, 2000) for line in section.notes)
    if section.source:
        yield f"{section.name}:"
        yield "\n".join(f"    {line}".rstrip() for line in visible(section.source, 20_000).splitlines())


def _cell(cell: Cell) -> str:
    return markdown(cell) if isinstance(cell, str) else "<br>".join(map(markdown_code, cell))


def markdown(text: str, limit: int = _LONGEST) -> str:
    """Return text as itself in a Markdown table: one line, no markup, no link."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text, limit))


def markdown_code(text: str) -> str:
    """Return text in a code span of a Markdown table."""
    return "`" + _one_line(text).replace("`", "'").replace("|", "\\|") + "`"


def _one_line(text: str, limit: int = _LONGEST) -> str:
    return " ".join(str(visible(cut(text, limit))).split())

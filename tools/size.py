"""Lines and tokens of the Python files in git, and their sums against the budget in pyproject.toml.

    uv run tools/size.py            print a row for each folder and each sum; exit code 1 if a sum exceeds its budget
    uv run tools/size.py --write    lower the budget to the sums; a budget is never raised

A token is a token of Python's tokenizer without comments and line ends. Count with Python 3.11: later versions divide
f-strings into more tokens. Environments, tools and docs are printed, and have no budget.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click

ROOT = Path(__file__).resolve().parents[1]
COUNTED_WITH = (3, 11)
_TABLE = "[tool.nightshift.budget]"
_NO_TOKENS = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Size(NamedTuple):
    """Lines and tokens of one or more files."""

    lines: int
    tokens: int


def size_of(source: str) -> Size:
    """Return the lines and tokens of one Python file."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return Size(source.count("\n"), sum(token.type not in _NO_TOKENS for token in tokens))


def sizes_of(root: Path) -> dict[str, Size]:
    """Return the size of every Python file that git lists in a checkout, by path."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.split("\0") if (root / path).is_file()]
    return {path: size_of((root / path).read_text(encoding="utf-8")) for path in paths}


def folders_of(sizes: Mapping[str, Size]) -> dict[str, Size]:
    """Return the size of each top-level folder, and of each folder of nightshift/."""
    lines, tokens = Counter[str](), Counter[str]()
    for path, size in sizes.items():
        parts = path.split("/")
        folders = {parts[0] if len(parts) > 1 else "."}
        if parts[0] == "nightshift" and len(parts) > 2:
            folders.add(f"nightshift/{parts[1]}")
        for folder in folders:
            lines[folder] += size.lines
            tokens[folder] += size.tokens
    return {folder: Size(lines[folder], tokens[folder]) for folder in sorted(lines)}


def sums_of(sizes: Mapping[str, Size]) -> dict[str, int]:
    """Return each sum that has a budget, by its key in pyproject.toml."""
    folders = folders_of(sizes)
    lines = {f"{name}_lines": folders[name].lines for name in ("nightshift", "tests", "benchmarks")}
    return lines | {"nightshift_tokens": folders["nightshift"].tokens}


def budget_of(project: str) -> dict[str, int]:
    """Return the budget from the text of pyproject.toml."""
    budget: dict[str, int] = tomllib.loads(project)["tool"]["nightshift"]["budget"]
    return budget


def excesses(sizes: Mapping[str, Size], budget: Mapping[str, int]) -> list[str]:
    """Return a message for each sum above its budget, with the largest files of that folder."""
    messages = []
    for key, total in sums_of(sizes).items():
        if total > budget[key]:
            folder, _, unit = key.partition("_")
            files = {path: getattr(size, unit) for path, size in sizes.items() if path.startswith(f"{folder}/")}
            largest = ", ".join(f"{path} {files[path]:,}" for path in sorted(files, key=files.__getitem__)[:-6:-1])
            messages.append(
                f"{folder}/ has {total:,} {unit}, {total - budget[key]:,} above its budget of {budget[key]:,}. "
                f"Delete something, or raise {key} in pyproject.toml and say why. The largest files: {largest}"
            )
    return messages


def lowered(project: str, sums: Mapping[str, int]) -> str:
    """Return the text of pyproject.toml with each budget lowered to its sum; all other text is kept."""
    before, table, rest = project.partition(f"{_TABLE}\n")
    budget, bracket, after = rest.partition("\n[")

    def lower(match: re.Match[str]) -> str:
        return f"{match[1]}{min(int(match[2]), sums[match[1].split()[0]])}"

    return before + table + re.sub(r"^(\w+ = )(\d+)", lower, budget, flags=re.MULTILINE) + bracket + after


@click.command(help=__doc__)
@click.option("--write", is_flag=True, help="Lower the budget to the sums.")
def main(write: bool) -> None:
    """Print the sizes; exit code 1 if a sum exceeds its budget."""
    if sys.version_info[:2] != COUNTED_WITH:
        sys.exit("tokens are counted with Python 3.11. Use: uv run --python 3.11 tools/size.py")
    path, sizes = ROOT / "pyproject.toml", sizes_of(ROOT)
    project = path.read_text(encoding="utf-8")
    if write:
        project = lowered(project, sums_of(sizes))
        path.write_text(project, encoding="utf-8")
    print(f"{'lines':>8} {'tokens':>8}")
    for folder, size in folders_of(sizes).items():
        print(f"{size.lines:8} {size.tokens:8} {folder}")
    print(f"\n{'sum':>8} {'budget':>8}")
    for key, total in sums_of(sizes).items():
        print(f"{total:8} {budget_of(project)[key]:8} {key}")
    sys.exit("\n".join(excesses(sizes, budget_of(project))) or 0)


if __name__ == "__main__":
    main()

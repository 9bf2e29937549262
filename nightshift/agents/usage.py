"""Read the output of a coding agent: its last words, and the tokens and dollars that it reports.

JSON rows are recognised by their fields, whichever program prints them. A cost is the running total of a conversation;
two kinds of rows report it: the last row (Claude Code and Gemini CLI: `result`, Codex: `turn.completed`), and
`stats.models` (Gemini CLI). The output is hostile: only its last megabyte is read, and a number that is absent or too
large is None.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nightshift.campaign.records import Cost, together
from nightshift.files import parse_json
from nightshift.text import ANSI, clean

MAX_LOG_BYTES = 1_000_000
MAX_TOKENS, MAX_DOLLARS = 10**10, 10_000.0  # of one process; larger numbers are ignored
# Uncached and cached input tokens. The `input_tokens` of Codex and Gemini CLI include both.
_TOKENS_IN = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
# Paths of the texts by the type of the row. Errors of tools and of single retries are not read.
_ERROR = "error.data.message error.message error"
_ERRORS = {"None": _ERROR, "error": f"{_ERROR} message", "result": _ERROR, "turn.failed": _ERROR}
# Of Gemini CLI, opencode, Claude Code (two) and Codex.
_ANSWERS = {
    "None": "response",
    "message": "content",
    "text": "part.text",
    "assistant": "message.content.text",
    "result": "result",
    "item.completed": "item.text",
}


class Summary(NamedTuple):
    """The last words of a program on one plain line, and the cost that it reported, without seconds."""

    words: str
    cost: Cost


def end_of(log_path: Path) -> str:
    """Return the last megabyte of a program's output."""
    with log_path.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - MAX_LOG_BYTES, 0))
        return file.read(MAX_LOG_BYTES).decode(errors="replace")


def read_output(output: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the JSON objects of an output, and its other lines without escape sequences. Of JSON objects that
    extend over several lines, only the last is read."""
    rows, lines = list[Mapping[str, Any]](), list[str]()
    output = f"\n{output[-MAX_LOG_BYTES:]}\n"
    for line in output.split("\n"):
        text = ANSI.sub("", line).rstrip("\r").rpartition("\r")[2].strip()
        if row := _decode(line):
            rows.append(row)
        elif text:
            lines.append(text)
    _, brace, rest = output.rpartition("\n{\n")
    last = _decode("{" + rest.partition("\n}\n")[0] + "}") if brace else {}
    return [*rows, last] if last else rows, lines


def summary_of(output: str) -> Summary:
    """Return the last words and the cost. Without JSON: the last line that is not blank, and no cost."""
    rows, lines = read_output(output)
    words, costs = "", dict[tuple[str, str], Cost]()  # by kind and conversation
    for row in rows:
        kind, (text, _), cost = row.get("type"), read_event(row), _read_cost(row)
        words = text or words
        if cost is not None:
            costs[str(kind), str(row.get("session_id"))] = cost
    words = words or (lines or [""])[-1]
    return Summary(clean(words, 300), together(costs.values()) or Cost())


def read_event(row: Mapping[str, Any]) -> tuple[str, bool]:
    """Return a text in a row, and whether it is an error of the program or its provider, not an answer by the model. ""
    for other rows."""
    kind = str(row.get("type"))
    paths = _ERRORS.get(kind, "")
    if kind == "result" and row.get("is_error") is True:
        paths += " result subtype"
    if text := _text_at(row, paths):
        return text, True
    if row.get("role", "assistant") != "assistant" or _at(row, "item.type") not in (None, "agent_message"):
        return "", False  # Gemini CLI: the prompt; Codex: the use of a tool
    return _text_at(row, _ANSWERS.get(kind, "")), False


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_cost(row: Mapping[str, Any]) -> Cost | None:
    """Return the cost in a row; None for other rows."""
    kind, stats = row.get("type"), mapping(row.get("stats"))
    models = [mapping(mapping(model).get("tokens")) for model in mapping(stats.get("models")).values()]
    if any(models) and kind in (None, "result"):
        return Cost(_sum(models, "prompt", "tool"), _sum(models, "candidates", "thoughts"))
    if kind not in ("result", "turn.completed"):
        return None
    usages = [mapping(row.get("usage")) or stats]
    dollars: Any = row.get("total_cost_usd")
    is_sane = type(dollars) in (int, float) and 0 <= dollars <= MAX_DOLLARS  # False for NaN
    return Cost(_sum(usages, *_TOKENS_IN), _sum(usages, "output_tokens"), abs(float(dollars)) if is_sane else None)


def _decode(text: str) -> Mapping[str, Any]:
    """Return the JSON object in a text; an empty mapping for any other text."""
    try:
        return mapping(parse_json(text, object)) if text.lstrip().startswith("{") else {}
    except ValueError:
        return {}


def _at(row: Any, path: str) -> Any:
    """Return the value at a path such as `error.message`, or None. Of a list, the texts are joined."""
    for name in path.split("."):
        if isinstance(row, list):
            return " ".join(filter(None, (_text_at(piece, name) for piece in row)))
        row = mapping(row).get(name)
    return row


def _text_at(row: Mapping[str, Any], paths: str) -> str:
    """Return the first text at the paths that is not blank, or ""."""
    values = (_at(row, path) for path in paths.split())
    return next((value for value in values if isinstance(value, str) and value.strip()), "")


def _sum(usages: Iterable[Mapping[str, Any]], *names: str) -> int | None:
    values = [usage.get(name) for usage in usages for name in names]
    numbers = [value for value in values if type(value) is int and 0 <= value <= MAX_TOKENS]
    return sum(numbers) if numbers else None

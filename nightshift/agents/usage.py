"""Read the output of a coding agent: its last words, and the tokens and dollars that it reports.

JSON rows are recognised by their fields, whichever program prints them. A cost is the running total of a conversation;
two kinds of rows report it: the last row (Claude Code and Gemini CLI: `result`, Codex: `turn.completed`), and
`stats.models` (Gemini CLI, Qwen Code). The output is hostile: only its last megabyte is read, and a number that is
absent or too large is None.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

from nightshift.campaign.records import Cost, together
from nightshift.files import parse_json
from nightshift.text import ANSI, clean

MAX_LOG_BYTES = 1_000_000
MAX_TOKENS, MAX_DOLLARS = 10**10, 10_000.0  # of one process; larger numbers are ignored
MAX_WORDS = 300  # characters
# Uncached and cached input tokens. The `input_tokens` of Codex and Gemini CLI include both.
_TOKENS_IN = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
# Paths of the error by the type of the row. Errors of tools and of single retries are not read.
_ERROR = "error.data.message error.message message.errorMessage"
_ERRORS = {"None": f"{_ERROR} error", "error": f"{_ERROR} message error", "result": f"{_ERROR} error"}
_ERRORS["turn.failed"] = _ERROR
_STATUSES = ("api_error_status", "error_status", "error.data.statusCode", "error.code")
_ANSWERS = {"result": "result response", "agent_message": "response message", "text": "response part.text"}
# Lines of a Node.js stack trace without a cause: a frame, a brace, the version.
_STACK = re.compile(r"\s+at |\s*(?:[{}\[\])^~|]{1,80}\s*$|Node\.js v\d|(?:code|errno|syscall|status|requireStack): )")


class Summary(NamedTuple):
    """The last words of a program on one plain line, and the cost that it reported, without seconds."""

    words: str
    cost: Cost


class Event(NamedTuple):
    """A text in the output: an error of the program or its provider, or an answer by the model."""

    text: str
    is_error: bool
    status: int | None = None  # HTTP


class Log:
    """The file with a program's output, cut to MAX_LOG_BYTES. The end of the output stays in memory."""

    def __init__(self, file: BinaryIO) -> None:
        """`file` is open for reading and writing. The program appends through a descriptor of its own."""
        self._file, self._held, self._end = file, 0, b""

    def cut(self) -> None:
        """Drop output beyond the limit, so that an endless output does not fill the disk. Call twice a second."""
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(max(self._held, size - MAX_LOG_BYTES))
        self._end = (self._end + self._file.read(MAX_LOG_BYTES))[-MAX_LOG_BYTES:]
        self._held = min(size, MAX_LOG_BYTES)
        if size > MAX_LOG_BYTES:
            self._file.truncate(MAX_LOG_BYTES)

    @property
    def end(self) -> str:
        """The last MAX_LOG_BYTES of the output before the last `cut`."""
        return self._end.decode(errors="replace")


def read_output(output: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the JSON objects of an output, and its other lines without escape sequences and stack traces.

    Of JSON objects that extend over several lines, only the last is read.
    """
    rows, lines = list[Mapping[str, Any]](), list[str]()
    output = f"\n{output[-MAX_LOG_BYTES:]}\n"
    for line in output.split("\n"):
        value = _decode(line) if line.lstrip().startswith(("{", "[")) else None
        objects = [row for row in (value if isinstance(value, list) else [value]) if isinstance(row, dict)]
        rows += [mapping(row.get("msg")) or row for row in objects]  # `msg`: Codex before 0.44
        text = ANSI.sub("", line).rstrip("\r").rpartition("\r")[2]
        if not objects and text.strip() and not _STACK.match(text):
            lines.append(text.strip())
    _, brace, rest = output.rpartition("\n{\n")
    value = _decode("{" + rest.partition("\n}\n")[0] + "}") if brace else None
    return [*rows, value] if isinstance(value, dict) else rows, lines


def summary_of(output: str) -> Summary:
    """Return the last words and the cost. Without JSON: the last line that is not blank, and no cost."""
    rows, lines = read_output(output)
    words, num_conversations, costs = "", 0, dict[tuple[str, str], Cost]()  # by kind and conversation
    for row in rows:
        kind, event, cost = row.get("type"), read_event(row), _read_cost(row)
        words = event.text if event else words
        num_conversations += kind in ("thread.started", "init")
        if cost is not None:
            costs[str(kind), str(row.get("session_id", num_conversations))] = cost
    words = words or next((line for line in reversed(lines) if clean(line, MAX_WORDS)), "")
    return Summary(clean(words, MAX_WORDS), together(costs.values()) or Cost())


def read_event(row: Mapping[str, Any]) -> Event | None:
    """Return the error or the answer in a row; None for other rows."""
    kind, message, errors = str(row.get("type")), mapping(row.get("message")), _ERRORS
    is_failure = row.get("is_error") is True or str(row.get("subtype")).startswith("error")
    if kind == "result" and (is_failure or str(row.get("result")).startswith("[API Error")):  # Qwen Code
        errors = {"result": f"{_ERROR} result subtype error"}
    text = _text_at(row, errors.get(kind, "message.errorMessage"))
    if row.get("subtype") == "api_retry":  # Claude Code
        text = f"{'retrying' if row.get('error_status') else 'connection error'}: {row.get('error')}"
    if text:
        statuses = (_at(row, path) for path in _STATUSES)
        status = next((value for value in statuses if type(value) is int and 400 <= value < 600), None)
        before, brace, rest = text.partition("{")  # some errors contain the JSON of a provider's error
        inner = _text_at(mapping(_decode(brace + rest)), "error.message message detail")
        return Event(f"{before}{inner}" if inner else text, True, status)
    answers = _ANSWERS.get(kind, "response")
    if mapping(row.get("item")).get("type") == "agent_message":
        answers = "response item.text"
    elif kind == "message" and row.get("role") == "assistant":
        answers = "response content"
    answer = _text_at(row, answers)
    if not answer and message.get("role") == "assistant" and kind in ("assistant", "message_end"):
        content = message.get("content")
        texts = [_text_at(mapping(piece), "text") for piece in content] if isinstance(content, list) else []
        answer = " ".join(filter(None, texts))
    return Event(answer, kind == "assistant" and isinstance(row.get("error"), str)) if answer.strip() else None


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


def _decode(text: str) -> Any:
    try:
        return parse_json(text, object)
    except ValueError:
        return None


def _at(row: Any, path: str) -> Any:
    """Return the value at a path such as `error.message`, or None."""
    for name in path.split("."):
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

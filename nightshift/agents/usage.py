"""Reads the output of a coding agent: its last words, and the tokens and dollars that it reports.

Rows of JSON are recognised by their fields, whichever program prints them. Two kinds of rows report a cost, a running
total of a conversation: its end (Claude Code, Gemini CLI: `result`, Codex: `turn.completed`), and `stats.models`
(Gemini CLI, Qwen Code). Of other programs no cost is read. The output is hostile: a bounded end of it is read, only
sane numbers are believed, and an absent figure is None.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

from nightshift.campaign.records import Cost, together
from nightshift.files import parse_json
from nightshift.text import ANSI, clean

MAX_LOG_BYTES = 1_000_000  # that a log keeps, and that are read of the end of an output
MAX_TOKENS, MAX_DOLLARS = 10**10, 10_000.0  # of one process; a larger number is not believed
MAX_WORDS = 300  # characters
# Input tokens that were not cached, and those that were. The `input_tokens` of Codex and Gemini CLI include both.
_TOKENS_IN = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
# By the kind of a row, the paths at which its error stands: that of a tool, or of one try, is not read.
_ERROR = "error.data.message error.message message.errorMessage"
_ERRORS = {"None": f"{_ERROR} error", "error": f"{_ERROR} message error", "result": f"{_ERROR} error"}
_ERRORS["turn.failed"] = _ERROR
_STATUSES = ("api_error_status", "error_status", "error.data.statusCode", "error.code")
_ANSWERS = {"result": "result response", "agent_message": "response message", "text": "response part.text"}
# A line of a Node.js stack trace that says nothing: a frame, a brace, the version.
_STACK = re.compile(r"\s+at |\s*(?:[{}\[\])^~|]{1,80}\s*$|Node\.js v\d|(?:code|errno|syscall|status|requireStack): )")


class Summary(NamedTuple):
    """The last words of a program, one plain line, and the cost that it reported, without seconds."""

    words: str
    cost: Cost


class Event(NamedTuple):
    """A text in the output: an error of the program or its provider, or an answer of the model."""

    text: str
    is_error: bool
    status: int | None = None  # HTTP


class Log:
    """The file that a program prints into, kept below MAX_LOG_BYTES; its end is known however much was printed."""

    def __init__(self, file: BinaryIO) -> None:
        """`file` is open for reading and changing. The program appends to it through its own descriptor."""
        self._file, self._held, self._end = file, 0, b""

    def cut(self) -> None:
        """Drop what exceeds the limit, so that an endless output does not fill the disk. Call about twice a second."""
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(max(self._held, size - MAX_LOG_BYTES))
        self._end = (self._end + self._file.read(MAX_LOG_BYTES))[-MAX_LOG_BYTES:]
        self._held = min(size, MAX_LOG_BYTES)
        if size > MAX_LOG_BYTES:
            self._file.truncate(MAX_LOG_BYTES)

    @property
    def end(self) -> str:
        """The last MAX_LOG_BYTES that were printed before the last `cut`."""
        return self._end.decode(errors="replace")


def read_output(output: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the JSON objects of an output in order, and its other lines without escape sequences and stack traces.

    Of objects on many lines only the last is read.
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
    """Return the last words and the cost. Without known JSON: the last line that tells something, and no cost."""
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
    """Return what a row says: the error, if it holds one, else the answer; None for rows about the work itself."""
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
        return Event(_unwrapped(text), True, status)
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
    """Return the cost that a row reports; None for other rows."""
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
    """Return the value of a JSON text; None for any other text."""
    try:
        return parse_json(text, object)
    except ValueError:
        return None


def _unwrapped(text: str) -> str:
    """Return an error message for people: the message in the JSON of a provider's error, if it holds one."""
    before, brace, rest = text.partition("{")
    inner = _text_at(mapping(_decode(brace + rest)), "error.message message detail")
    return f"{before}{inner}" if inner else text


def _at(row: Any, path: str) -> Any:
    """Return the value at a path such as `error.message`; None if there is none."""
    for name in path.split("."):
        row = mapping(row).get(name)
    return row


def _text_at(row: Mapping[str, Any], paths: str) -> str:
    """Return the first value at one of the paths that is a text and not blank; "" if none is."""
    values = (_at(row, path) for path in paths.split())
    return next((value for value in values if isinstance(value, str) and value.strip()), "")


def _sum(usages: Iterable[Mapping[str, Any]], *names: str) -> int | None:
    values = [usage.get(name) for usage in usages for name in names]
    numbers = [value for value in values if type(value) is int and 0 <= value <= MAX_TOKENS]
    return sum(numbers) if numbers else None

"""Reads the output of a coding agent: its last words, and the tokens and dollars that it reports.

The JSON formats are recognised by their fields, whichever program prints them:

    Claude Code  `stream-json`, and `json`, its last line: `type` "result" with `result`, `session_id`, `usage`
                 (`input_tokens` excludes cached tokens) and `total_cost_usd`, a running total of the session
    Qwen Code    the same as an array; `stats` as in Gemini CLI
    Codex        a line an event: `turn.completed` with the `usage` of the thread so far, cached tokens included;
                 `turn.failed` with the `error`; before 0.44 `msg.type` "token_count" and "error"
    Gemini CLI   one object on many lines: `response`, `error` and `stats.models.NAME.tokens`; its `stream-json` has
                 `stats.input_tokens`
    opencode     `step_finish` with the `part.tokens` and `part.cost` of one step; `error.data.message`
    pi           `message_end` with the `usage` of one message; `agent_end` repeats all messages

The output is hostile: a bounded end of it is read, only sane numbers are believed, and an absent figure is None.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, BinaryIO, NamedTuple

from nightshift.campaign.records import FIGURES, Cost, together
from nightshift.files import parse_json
from nightshift.text import ANSI, clean

MAX_LOG_BYTES = 1_000_000  # that a log keeps, and that are read of the end of an output
MAX_TOKENS, MAX_DOLLARS = 10**10, 10_000.0  # of one process; a larger number is not believed
MAX_WORDS = 300  # characters
_CLAUDE_INPUT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_STACK = re.compile(r"[{}\[\])^~|]{1,80}$|Node\.js v\d|(?:code|errno|syscall|status|requireStack): ")
_NODE_ERROR = re.compile(r"(?:Uncaught )?\w{0,60}Error(?: \[\w+\])?: ")


class Summary(NamedTuple):
    """The last words of a program, one plain line, and the cost that it reported, without seconds."""

    words: str
    cost: Cost


class Event(NamedTuple):
    """A text in the output: an error of the program or its provider, or an answer of the model."""

    text: str
    is_error: bool
    status: int | None = None  # HTTP
    details: str = ""  # more of the error, for programs rather than people
    retry_after: str = ""  # the HTTP header


class Output(NamedTuple):
    """What a program printed: its JSON objects in order, and its other lines without escape sequences."""

    rows: list[Mapping[str, Any]]
    lines: list[str]
    is_cut: bool  # its beginning is not known


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


def read_output(output: str) -> Output:
    """Separate the JSON objects of an output from its other lines. Of objects on many lines only the last is read."""
    rows, plain, lines = list[Mapping[str, Any]](), list[str](), output[-MAX_LOG_BYTES:].split("\n")
    for line in lines:
        text = line.strip(" \t\r")
        value = decode(text) if text.startswith(("{", "[")) else None
        objects = [row for row in (value if isinstance(value, list) else [value]) if isinstance(row, dict)]
        rows += objects
        if not objects:
            plain.append(ANSI.sub("", line).rstrip("\r").rpartition("\r")[2])
    begins = [number for number, line in enumerate(lines) if line.rstrip() == "{"][-1:]
    ends = [number for number, line in enumerate(lines) if line.rstrip() == "}" and begins and number > begins[0]]
    if ends and isinstance(value := decode("\n".join(lines[begins[0] : ends[0] + 1])), dict):
        rows.append(value)
    return Output(rows, plain, len(output) >= MAX_LOG_BYTES)


def summary_of(output: str) -> Summary:
    """Return the last words and the cost. Without known JSON: the last line that tells something, and no cost."""
    return summarize(read_output(output))


def summarize(printed: Output) -> Summary:
    """Do what `summary_of` does, with an output that was read."""
    rows, lines, is_cut = printed
    words, num_threads, costs = "", 0, dict[tuple[str, object], Cost]()  # by program and conversation
    for number, row in enumerate(rows):
        event = read_event(row)
        words = event.text if event else words
        num_threads += row.get("type") == "thread.started"
        program, cost = _read_cost(row)
        session = row.get("session_id")
        keys = {"claude": session if isinstance(session, str) else None, "codex": num_threads}
        if program == "pi":
            costs = {key: value for key, value in costs.items() if key[0] != "message"}
        if cost is not None:
            costs[program, keys.get(program, number)] = cost
    total = together(costs.values()) or Cost()
    if is_cut and any(program in ("opencode", "message") for program, _ in costs):
        total = replace(total, at_least=FIGURES)  # the steps before are not known
    return Summary(clean(words or last_line(lines), MAX_WORDS), total)


def read_event(row: Mapping[str, Any]) -> Event | None:
    """Return what a row says: the error, if it holds one, else the answer; None for rows about the work itself."""
    kind, inner = row.get("type"), mapping(row.get("msg")) or mapping(row.get("message"))
    item, part, error = (mapping(row.get(name)) for name in ("item", "part", "error"))
    data = mapping(error.get("data"))
    if kind not in (None, "error", "result", "turn.failed"):  # of a tool, or of one try
        error = data = {}
    is_failure = kind == "result" and (row.get("is_error") is True or str(row.get("subtype")).startswith("error"))
    text = _first_text(
        data.get("message"),
        error.get("message"),
        inner.get("errorMessage"),
        row.get("message") if kind == "error" else None,
        inner.get("message") if inner.get("type") == "error" else None,
        row.get("result") if is_failure else None,
        row.get("error") if kind in (None, "error", "result") else None,
        row.get("subtype") if is_failure else None,
        error.get("type"),
    )
    if text:
        details = (error.get("type"), error.get("name"), error.get("code"), data.get("responseBody"), text)
        return Event(
            _unwrapped(text),
            True,
            _status(row.get("api_error_status"), data.get("statusCode"), error.get("code")),
            " ".join(detail for detail in details if isinstance(detail, str)),
            str(mapping(data.get("responseHeaders")).get("retry-after", "")),
        )
    answer = _first_text(
        row.get("result") if kind == "result" else None,
        row.get("response"),
        item.get("text") if item.get("type") == "agent_message" else None,
        inner.get("message") if inner.get("type") == "agent_message" else None,
        part.get("text") if kind == "text" else None,
        row.get("content") if kind == "message" and row.get("role") == "assistant" else None,
        _content(inner) if inner.get("role") == "assistant" and kind in ("assistant", "message_end") else None,
    )
    return Event(answer, kind == "assistant" and isinstance(row.get("error"), str)) if answer else None


def decode(text: str) -> Any:
    """Return the value of a JSON text; None for any other text."""
    try:
        return parse_json(text, object)
    except ValueError:
        return None


def is_stack(line: str) -> bool:
    """Return True for a line of a Node.js stack trace that says nothing: a frame, a brace, the version."""
    text = line.strip()
    return (text.startswith("at ") and line[0].isspace()) or _STACK.match(text) is not None


def last_line(lines: list[str]) -> str:
    """Return the last line that says something: of a Node.js stack trace, the line with the error."""
    texts = [text for line in lines if (text := line.rstrip())]
    if texts and is_stack(texts[-1]):
        telling = next((text for text in reversed(texts) if _NODE_ERROR.match(text)), "")
        telling = telling or next((text for text in reversed(texts) if not is_stack(text)), "")
        texts.append(telling or texts[-1])
    return next((text for line in reversed(texts) if (text := clean(line, MAX_WORDS))), "")


def _read_cost(row: Mapping[str, Any]) -> tuple[str, Cost | None]:
    """Return the program that printed a row, and the cost that the row reports."""
    kind, inner = row.get("type"), mapping(row.get("msg")) or mapping(row.get("message"))
    stats, part = mapping(row.get("stats")), mapping(row.get("part"))
    models = [mapping(mapping(model).get("tokens")) for model in mapping(stats.get("models")).values()]
    if any(models):  # Gemini CLI, Qwen Code
        return "gemini", Cost(_sum(models, "prompt", "tool"), _sum(models, "candidates", "thoughts"))
    if "input_tokens" in stats:
        return "gemini", Cost(_sum([stats], "input_tokens"), _sum([stats], "output_tokens"))
    if kind == "result" and ("usage" in row or "total_cost_usd" in row):
        usage, dollars = mapping(row.get("usage")), _dollars(row.get("total_cost_usd"))
        return "claude", Cost(_sum([usage], *_CLAUDE_INPUT), _sum([usage], "output_tokens"), dollars)
    usage = mapping(row.get("usage")) or mapping(mapping(inner.get("info")).get("total_token_usage"))
    if kind == "turn.completed" or (inner.get("type") == "token_count" and usage):
        return "codex", Cost(_sum([usage], "input_tokens"), _sum([usage], "output_tokens"))
    if kind == "step_finish":
        tokens = mapping(part.get("tokens"))
        both = [tokens, mapping(tokens.get("cache"))]
        tokens_in, tokens_out = _sum(both, "input", "read", "write"), _sum(both, "output", "reasoning")
        return "opencode", Cost(tokens_in, tokens_out, _dollars(part.get("cost")))
    messages = row.get("messages") if kind == "agent_end" else [inner] if kind == "message_end" else []
    costs = []
    for message in messages if isinstance(messages, list) else []:
        if usage := mapping(mapping(message).get("usage")):
            tokens_in = _sum([usage], "input", "cacheRead", "cacheWrite")
            dollars = mapping(usage.get("cost")).get("total")
            costs.append(Cost(tokens_in, _sum([usage], "output"), _dollars(dollars)))
    return "pi" if kind == "agent_end" else "message", together(costs)


def _unwrapped(text: str) -> str:
    """Return an error message for people: the message in the JSON of a provider's error, if it holds one."""
    before, brace, rest = text.partition("{")
    value = decode(brace + rest)
    if isinstance(value, dict):
        inner = _first_text(mapping(value.get("error")).get("message"), value.get("message"), value.get("detail"))
        return f"{before}{inner}" if inner else text
    return text


def _first_text(*values: Any) -> str:
    """Return the first value that is a text and not blank; "" if none is."""
    return next((value for value in values if isinstance(value, str) and value.strip()), "")


def _status(*values: Any) -> int | None:
    return next((value for value in values if type(value) is int and 400 <= value < 600), None)


def _content(message: Mapping[str, Any]) -> str:
    parts = message.get("content")
    texts = [mapping(part).get("text") for part in parts] if isinstance(parts, list) else []
    return " ".join(text for text in texts if isinstance(text, str))


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _sum(usages: Iterable[Mapping[str, Any]], *names: str) -> int | None:
    values = [usage.get(name) for usage in usages for name in names]
    numbers = [value for value in values if type(value) is int and 0 <= value <= MAX_TOKENS]
    return sum(numbers) if numbers else None


def _dollars(value: Any) -> float | None:
    is_sane = type(value) in (int, float) and 0 <= value <= MAX_DOLLARS  # False for NaN
    return abs(float(value)) if is_sane else None  # -0.0 becomes 0.0

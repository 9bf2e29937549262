"""Reads the output of a coding agent: its last words, and the tokens and dollars that it reports.

Rows of JSON are recognised by their fields, whichever program prints them. Three kinds of rows report a cost:

    the end of a conversation   Claude Code and Gemini CLI (`result`), Codex (`turn.completed`; before 0.44
                                `msg.type` "token_count"): a running total, which replaces an earlier one
    one step                    opencode (`step_finish`), pi (`message_end`): the steps are added up; pi's
                                `agent_end` repeats all of them
    `stats.models`              Gemini CLI and Qwen Code, once for each process

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
# Input tokens that were not cached, and those that were. The `input_tokens` of Codex and Gemini CLI include both.
_TOKENS_IN = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_STEP_IN = ("input", "read", "write", "cacheRead", "cacheWrite")  # opencode, pi
_STEPS = ("step_finish", "message_end")
_TOTALS = ("result", "turn.completed", None)
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
    retry_after: str = ""  # the HTTP header


class Output(NamedTuple):
    """What a program printed: its JSON objects in order, and its other lines without escape sequences."""

    rows: list[Mapping[str, Any]]
    lines: list[str]


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
    return Output(rows, plain)


def summary_of(output: str) -> Summary:
    """Return the last words and the cost. Without known JSON: the last line that tells something, and no cost."""
    rows, lines = read_output(output)
    words, num_conversations, costs = "", 0, dict[tuple[str | None, str | int], Cost]()  # by kind and conversation
    for number, row in enumerate(rows):
        kind, session, event, cost = row.get("type"), row.get("session_id"), read_event(row), _read_cost(row)
        words = event.text if event else words
        num_conversations += kind in ("thread.started", "init")
        if kind == "agent_end":
            costs = {key: cost for key, cost in costs.items() if key[0] != "message_end"}
        if cost is not None:
            conversation = session if isinstance(session, str) else num_conversations
            costs[kind, conversation if kind in _TOTALS else number] = cost
    total = together(costs.values()) or Cost()
    if len(output) >= MAX_LOG_BYTES and any(kind in _STEPS for kind, _ in costs):
        total = replace(total, at_least=FIGURES)  # the steps before are not known
    return Summary(clean(words or last_line(lines), MAX_WORDS), total)


def read_event(row: Mapping[str, Any]) -> Event | None:
    """Return what a row says: the error, if it holds one, else the answer; None for rows about the work itself."""
    kind, inner = row.get("type"), _inner(row)
    item, part, error = (mapping(row.get(name)) for name in ("item", "part", "error"))
    if kind not in (None, "error", "result", "turn.failed"):  # of a tool, or of one try
        error = {}
    data = mapping(error.get("data"))
    is_failure = kind == "result" and (row.get("is_error") is True or str(row.get("subtype")).startswith("error"))
    text = _first_text(
        data.get("message"),
        error.get("message"),
        inner.get("errorMessage"),
        row.get("message") if kind == "error" else None,
        inner.get("message") if inner.get("type") == "error" else None,
        (row.get("result") or row.get("subtype")) if is_failure else None,
        row.get("error") if kind in (None, "error", "result") else None,
    )
    if text:
        statuses = (row.get("api_error_status"), data.get("statusCode"), error.get("code"))
        status = next((value for value in statuses if type(value) is int and 400 <= value < 600), None)
        retry_after = str(mapping(data.get("responseHeaders")).get("retry-after", ""))
        return Event(_unwrapped(text), True, status, retry_after)
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
    return _STACK.match(line) is not None


def last_line(lines: list[str]) -> str:
    """Return the last line that says something; a line of a stack trace only if there is no other line."""
    telling = [line for line in lines if line.strip() and not is_stack(line)] or lines
    return next((text for line in reversed(telling) if (text := clean(line, MAX_WORDS))), "")


def _read_cost(row: Mapping[str, Any]) -> Cost | None:
    """Return the cost that a row reports; None for other rows."""
    kind, inner, part, stats = row.get("type"), _inner(row), mapping(row.get("part")), mapping(row.get("stats"))
    if kind in _STEPS:
        tokens = mapping(part.get("tokens")) or mapping(inner.get("usage"))
        both = [tokens, mapping(tokens.get("cache"))]
        dollars = part.get("cost", mapping(tokens.get("cost")).get("total"))
        cost = Cost(_sum(both, *_STEP_IN), _sum(both, "output", "reasoning"), _dollars(dollars))
        return cost if part or tokens else None
    if kind == "agent_end" and isinstance(messages := row.get("messages"), list):
        return together(_read_cost({"type": "message_end", "message": message}) for message in messages)
    models = [mapping(mapping(model).get("tokens")) for model in mapping(stats.get("models")).values()]
    if any(models) and kind in (None, "result"):
        return Cost(_sum(models, "prompt", "tool"), _sum(models, "candidates", "thoughts"))
    usage = mapping(row.get("usage")) or stats or mapping(mapping(inner.get("info")).get("total_token_usage"))
    if kind in ("result", "turn.completed") or (kind is None and inner.get("type") == "token_count" and usage):
        dollars = _dollars(row.get("total_cost_usd"))
        return Cost(_sum([usage], *_TOKENS_IN), _sum([usage], "output_tokens"), dollars)
    return None


def _inner(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(row.get("msg")) or mapping(row.get("message"))


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

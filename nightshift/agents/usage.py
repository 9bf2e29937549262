"""What a coding agent printed: its last words, and what it says that its work cost.

Read are the JSON formats that the presets ask for, whatever the program is called that prints them:

    Claude Code  `--output-format json`, and the last line of `stream-json`: one object: `type` "result", `result`,
                 `session_id`, `usage` with `input_tokens` (less the cached ones, which have names of their own), and
                 `total_cost_usd`, which is of the process so far: of one session the last counts
    Codex        `--json`: a line an event; of `turn.completed` the `usage`, which is of the whole thread and whose
                 `input_tokens` hold the cached ones, of `turn.failed` the `error`
    Gemini CLI   `--output-format json`: one object on many lines: `response`, `stats.models.NAME.tokens` with `prompt`
                 (the cached ones too), `tool`, `candidates` and `thoughts`

The text is hostile: of a bounded end of it only what is a sane number is believed, and what is absent is None.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import msgspec

from nightshift.campaign.records import Cost, together
from nightshift.text import clean

MAX_LOG_BYTES = 1_000_000
MAX_READ_BYTES = 256 * 1024  # of the end: the answers of programs have some thousand
MAX_TOKENS, MAX_DOLLARS = 10**10, 10_000.0  # of one process; more is no figure
MAX_WORDS = 120  # characters
_GEMINI = (("prompt", "tool"), ("candidates", "thoughts"))
_CLAUDE_INPUT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


class Said(NamedTuple):
    """The last words of a program, one plain line; what it told of its cost, seconds aside."""

    words: str
    cost: Cost


class Log:
    """The file that a program prints into. It is held at MAX_LOG_BYTES, and its end known however much came."""

    def __init__(self, file: BinaryIO) -> None:
        """`file`: opened to be read and changed. Whoever prints adds to it by a descriptor of its own."""
        self._file, self._held, self._end = file, 0, b""

    def cut(self) -> None:
        """Drop what is too much: a program that prints for ever does not fill the disk. Call about twice a second."""
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(max(self._held, size - MAX_READ_BYTES))
        self._end = (self._end + self._file.read(MAX_READ_BYTES))[-MAX_READ_BYTES:]
        self._held = min(size, MAX_LOG_BYTES)
        if size > MAX_LOG_BYTES:
            self._file.truncate(MAX_LOG_BYTES)

    @property
    def end(self) -> str:
        """The last that was printed before the last `cut`, at most MAX_READ_BYTES."""
        return self._end.decode(errors="replace")


def said(output: str) -> Said:
    """What the end of a program's output says. Where no line of it is known JSON: its last line, and no cost."""
    words, num_threads, told = "", 0, dict[tuple[str, object], Cost]()  # by program and conversation
    for number, row in enumerate(_objects(output[-MAX_READ_BYTES:])):
        words = _words(row) or words
        num_threads += row.get("type") == "thread.started"
        if (cost := _of_codex(row)) is not None:
            told["codex", num_threads] = cost
        elif (cost := _of_claude(row)) is not None:
            session = row.get("session_id")
            told["claude", session if isinstance(session, str) else None] = cost
        elif (cost := _of_gemini(row)) is not None:
            told["gemini", number] = cost
    return Said(clean(words or _last_line(output), MAX_WORDS), together(told.values()) or Cost())


def _objects(output: str) -> Iterator[Mapping[str, Any]]:
    """The JSON objects among the lines, in order; one on many lines only if it is the last of these."""
    lines = output.split("\n")
    for line in lines:
        if (line := line.lstrip(" \t")).startswith(("{", "[")):
            found = _decoded(line)
            yield from (row for row in (found if isinstance(found, list) else [found]) if isinstance(row, dict))
    begins = [number for number, line in enumerate(lines) if line.rstrip() == "{"][-1:]
    ends = [number for number, line in enumerate(lines) if line.rstrip() == "}" and begins and number > begins[0]]
    if ends and isinstance(found := _decoded("\n".join(lines[begins[0] : ends[0] + 1])), dict):
        yield found


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None


def _of_claude(row: Mapping[str, Any]) -> Cost | None:
    if row.get("type") != "result" or ("usage" not in row and "total_cost_usd" not in row):
        return None
    usage = _mapping(row.get("usage"))
    tokens_in = _total(_tokens(usage.get(name)) for name in _CLAUDE_INPUT)
    return Cost(tokens_in, _tokens(usage.get("output_tokens")), _dollars(row.get("total_cost_usd")))


def _of_codex(row: Mapping[str, Any]) -> Cost | None:
    if row.get("type") != "turn.completed":
        return None
    usage = _mapping(row.get("usage"))
    return Cost(_tokens(usage.get("input_tokens")), _tokens(usage.get("output_tokens")))


def _of_gemini(row: Mapping[str, Any]) -> Cost | None:
    stats = _mapping(row.get("stats"))
    models = [_mapping(_mapping(each).get("tokens")) for each in _mapping(stats.get("models")).values()]
    tokens_in, tokens_out = (_total(_tokens(m.get(name)) for m in models for name in names) for names in _GEMINI)
    return Cost(tokens_in, tokens_out) if models else None


def _words(row: Mapping[str, Any]) -> str:
    """The answer, or the error, of whoever printed this."""
    item = _mapping(row.get("item"))
    answer = item.get("text") if row.get("type") == "item.completed" and item.get("type") == "agent_message" else None
    error = row.get("error")
    about = _mapping(error).get("message") or (row.get("message") if row.get("type") == "error" else error)
    texts: Sequence[Any] = (about, row.get("result"), row.get("response"), answer, row.get("subtype"))
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def _last_line(output: str) -> str:
    lines = (clean(line.rstrip("\r").rpartition("\r")[2], 200) for line in reversed(output.split("\n")))
    return next(filter(None, lines), "")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _tokens(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def _dollars(value: Any) -> float | None:
    is_number = type(value) in (int, float) and 0 <= value <= MAX_DOLLARS  # not for NaN
    return abs(float(value)) if is_number else None  # -0.0 is no less than 0


def _total(numbers: Iterable[int | None]) -> int | None:
    told = [number for number in numbers if number is not None]
    return sum(told) if told else None

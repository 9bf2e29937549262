"""Decide from the output of an agent program why it made no proposal.

Exit codes do not help: Claude Code exits with 1 for every error, pi and Qwen Code with 0 on a wrong key, and Gemini CLI
with the HTTP status modulo 256. So the errors in the JSON output are read first, then, if the program failed, the
other lines. A model's answer is not read as an error if the program succeeded. The output is hostile; the night asks
the agent again in any case (night/proposals.py).
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from nightshift.agents.usage import Event, mapping, read_event, read_output, summary_of
from nightshift.text import clean

MAX_SHOWN = 300  # characters of a message
_MAX_TEXT = 4_000  # characters that are read of an error
_MAX_LINES = 40  # that are read of an output without JSON
_LIVE_CHARACTERS = 64 * 1024


class Meaning(StrEnum):
    """Why an agent made no proposal, in words for the user. OK: it made a proposal."""

    OK = "ok"
    LIMIT = "usage limit"
    LOGIN = "login"
    BILLING = "billing"
    MODEL = "model"
    OVERLOADED = "overloaded"
    NETWORK = "no answer"
    PROGRAM = "program"
    CONTEXT = "context too long"
    REFUSED = "refused"
    NO_EDIT = "no proposal"


_ENDS_BY_ITSELF = (Meaning.LIMIT, Meaning.OVERLOADED, Meaning.NETWORK)
AWAY = (*_ENDS_BY_ITSELF, Meaning.LOGIN, Meaning.BILLING, Meaning.MODEL, Meaning.PROGRAM)  # the last four need the user


@dataclass(frozen=True, slots=True)
class Availability:
    """The meaning of the end of an agent's process. `text`: the program's own words on one clean line."""

    meaning: Meaning
    text: str

    @property
    def waits(self) -> bool:
        """True if the agent may be available later without action by the user."""
        return self.meaning in _ENDS_BY_ITSELF

    @property
    def is_away(self) -> bool:
        """True if the model was not reached, so that an edited file is no proposal."""
        return self.meaning in AWAY


_ERRORS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("errors.toml").read_text("utf-8"))
_STATUSES = {401: Meaning.LOGIN, 402: Meaning.BILLING, 403: Meaning.LOGIN, 404: Meaning.MODEL, 408: Meaning.NETWORK}
_STATUSES |= {413: Meaning.CONTEXT, 429: Meaning.LIMIT}
_STATUS = re.compile(r"(?:(?:status|code|http|error)\D{1,40}|\(|^)([45]\d\d)\b", re.IGNORECASE)
_WORK = ("assistant", "tool_use", "tool_execution_start", "item.started", "item.completed", "text")  # rows of a model
_MAX_RETRIES = 6  # errors in a row, after which Nightshift waits instead of the program
_SLEEP = re.compile(r'Retrying after \d{6,}ms|"retry_delay_ms": ?\d{6,}')  # 100 s or more
_ATTEMPT = re.compile(r"^Attempt (\d{1,3}) failed", re.MULTILINE)  # Gemini CLI


def read_ending(output: str, exit_code: int | None, *, is_edited: bool = False) -> Availability:
    """Return why a process made no acceptable proposal. `output`: stdout and stderr. `exit_code`: None if Nightshift
    stopped the process. `is_edited`: the process changed train.toml."""
    (rows, lines), (words, cost) = read_output(output), summary_of(output)
    is_working, error = _read_course(rows)
    if exit_code in (126, 127):
        return Availability(Meaning.PROGRAM, words)
    if error is None and exit_code == 0:
        if is_edited:
            return Availability(Meaning.OK, words)
        if cost.tokens_out and not any(map(read_event, rows)):  # Codex with a provider's content filter
            return Availability(Meaning.REFUSED, "the model ended without an answer")
        return Availability(Meaning.NO_EDIT, words)
    result = None
    if error is not None:
        result = classify(error.text, error.status)
    elif exit_code is not None or not is_working:
        result = _of_lines(lines)
    if result is not None:
        return result
    if exit_code is None and not is_working:
        return Availability(Meaning.NETWORK, "the model did not answer before the time limit")
    # A report of 0 output tokens: the model was not reached.
    return Availability(Meaning.OVERLOADED if error and cost.tokens_out == 0 else Meaning.NO_EDIT, words)


def read_live(output: str) -> Availability | None:
    """Return the condition that a running program waits for, so that the night waits instead; None if it works.

    Gemini CLI sleeps until a limit ends, Codex waits for the network forever, Claude Code retries for minutes.
    """
    tail = output[-_LIVE_CHARACTERS:]
    events = [read_event(row) for row in read_output(tail)[0][-_MAX_RETRIES:]]
    attempts = _ATTEMPT.findall(tail)
    is_retrying = len(events) == _MAX_RETRIES and all(event and event.is_error for event in events)
    if is_retrying or _SLEEP.search(tail) or (attempts and int(attempts[-1]) >= _MAX_RETRIES):
        return read_ending(tail, None)
    return None


def classify(text: str, status: int | None = None) -> Availability | None:
    """Return the meaning of an error; None if its text belongs to no family. `status`: HTTP."""
    plain = " ".join(text[:_MAX_TEXT].replace("\u2019", "'").split())
    families = (Meaning[family["meaning"]] for family in _ERRORS["family"] if _matches(family["patterns"], plain))
    meaning = next(families, None)
    ends = _matches(_ERRORS["limit_with_end"], plain) and not _matches(_ERRORS["money_without_end"], plain)
    if ends and meaning in (None, Meaning.BILLING):
        meaning = Meaning.LIMIT
    if meaning is None:
        match = _STATUS.search(plain)
        number = status or (int(match[1]) if match else 0)
        meaning = Meaning.OVERLOADED if number >= 500 else _STATUSES.get(number)
    return Availability(meaning, clean(text[:_MAX_TEXT], MAX_SHOWN)) if meaning else None


def _matches(patterns: Sequence[str], plain: str) -> bool:
    """Return True if any pattern matches. Python caches the compiled patterns."""
    return re.search("|".join(patterns), plain, re.IGNORECASE) is not None


def _read_course(rows: Sequence[Mapping[str, Any]]) -> tuple[bool, Event | None]:
    """Return whether the model worked, and the last error if no work followed."""
    is_working, error = False, None
    for row in rows:
        event = read_event(row)
        if event is not None and event.is_error:
            error = event
        elif event is not None or (row.get("type") in _WORK and mapping(row.get("item")).get("type") != "error"):
            is_working, error = True, None
    return is_working, error


def _of_lines(lines: Sequence[str]) -> Availability | None:
    """Return the meaning of the last line that belongs to a known family, with the line before it."""
    for before, text in reversed([*pairwise(["", *lines[-_MAX_LINES:]])]):
        result = None if text.lower().startswith("warning") else classify(text)
        if result is not None:
            return classify(f"{before} {text}") if before != text and classify(before) else result
    return None

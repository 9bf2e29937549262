"""Decides from an agent program's output why it left no proposal, and when to ask it again.

Exit codes separate nothing: Claude Code ends every error with 1, pi and Qwen Code end a wrong key with 0, Gemini CLI
ends with the HTTP status modulo 256. So the errors in the JSON output are read first, then, if the program failed, the
lines that it printed. The answer of a model that ended ordinarily is not read as an error, whatever it says. The output
is hostile: a forged error costs a wait that `next_question` bounds, or a needless call of the user, and no more.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from nightshift.agents.usage import Event, Output, is_stack, mapping, read_event, read_output, summary_of
from nightshift.files import read_file
from nightshift.text import clean

MAX_SHOWN = 300  # characters of a text for people
_MAX_TEXT = 4_000  # characters of an error that are read
_MAX_LINES = 40  # of the end of an output without JSON
_MAX_ROLLOUTS = 5  # of Codex's session files
_RETRIES = 5  # in a row; from then on nightshift waits instead of the program

SHORT_WAITS = (60.0, 300.0, 900.0)  # seconds, by the number of failures in a row: a refused question costs no tokens
MAX_WAIT = 6 * 3600.0  # seconds; a later end is asked for again, since it may be forged
AFTER_END = 60.0  # seconds; programs cut the seconds


class Meaning(StrEnum):
    OK = "ok"
    LIMIT = "usage limit"
    LOGIN = "login"
    BILLING = "billing"
    MODEL = "model"
    OVERLOADED = "overloaded"
    NETWORK = "network"
    PROGRAM = "program"
    CONTEXT = "context too long"
    REFUSED = "refused"
    NO_EDIT = "no edit"


@dataclass(frozen=True, slots=True)
class Availability:
    """What the end of an agent's process means."""

    meaning: Meaning
    text: str  # one clean line, the program's own words
    ends_at: datetime | None = None  # UTC; the end of a limit, if the program reports it as a number

    @property
    def waits(self) -> bool:
        """True if asking again later helps."""
        return self.meaning in (Meaning.LIMIT, Meaning.OVERLOADED, Meaning.NETWORK)

    @property
    def needs_user(self) -> bool:
        """True if only the user can help."""
        return self.meaning in (Meaning.LOGIN, Meaning.BILLING, Meaning.MODEL, Meaning.PROGRAM)


_STATUSES = {401: Meaning.LOGIN, 402: Meaning.BILLING, 403: Meaning.LOGIN, 404: Meaning.MODEL, 408: Meaning.NETWORK}
_STATUSES |= {413: Meaning.CONTEXT, 429: Meaning.LIMIT}
_STATUS = re.compile(r"(?:status|code|http|error)\D{1,40}([45]\d\d)\b|\(([45]\d\d)\b|^([45]\d\d)\b", re.IGNORECASE)
_WORK = ("assistant", "tool_use", "tool_execution_start", "item.started", "item.completed", "text")  # a model's rows
_LIVE = re.compile(r"Retrying after \d|waiting for network|api_retry|Attempt \d+ failed")
_SLEEPS = (r"Retrying after (\d{1,12})ms", r"(?m)^Attempt (\d{1,3}) failed")  # Gemini CLI
_LIVE_CHARACTERS = 64 * 1024


def read_ending(output: str, exit_code: int | None, now: datetime, *, is_edited: bool = False) -> Availability:
    """Say why a process left no acceptable proposal.

    Args:
        output: stdout and stderr in one text, as the log holds them.
        exit_code: None if nightshift stopped the process.
        is_edited: the process changed train.toml.
    """
    printed, (words, cost) = read_output(output), summary_of(output)
    is_working, error = _read_course(printed, cost.tokens_out)
    if exit_code in (126, 127):
        return Availability(Meaning.PROGRAM, words)
    if error is None and exit_code == 0:
        return _of_answer(printed, words, bool(cost.tokens_out), is_edited)
    result, rejection = None, _rejection(printed)
    if error is not None:
        result = classify(error.text, error.status)
    elif exit_code is not None or not is_working:
        result = _of_lines(printed.lines)
    if result is None and rejection is not None:
        result = Availability(Meaning.LIMIT, words)
    if result is None and exit_code is None and not is_working:
        return Availability(Meaning.NETWORK, "the model did not answer before the time limit")
    if result is None:  # a report of no tokens at all: the model was not reached
        return Availability(Meaning.OVERLOADED if error and cost.tokens_out == 0 else Meaning.NO_EDIT, words)
    if result.meaning is Meaning.LIMIT and error is not None:
        seconds = error.retry_after
        retry_at = now.timestamp() + int(seconds) if re.fullmatch("[0-9]{1,9}", seconds) else None
        return replace(result, ends_at=_moment(mapping(rejection).get("resetsAt"), now) or _moment(retry_at, now))
    return result


def read_live(output: str, seconds_left: float) -> Availability | None:
    """Say why a running program cannot end within `seconds_left`; None if it may. Call it about twice a second.

    Gemini CLI sleeps until a limit ends, Codex waits for the network without end, Claude Code retries for minutes.
    """
    tail = output[-_LIVE_CHARACTERS:]
    if not _LIVE.search(tail):
        return None
    printed = read_output(tail)
    retries = list(takewhile(bool, map(_retry, reversed(printed.rows))))
    delay = printed.rows[-1].get("retry_delay_ms") if retries else None
    if len(retries) >= _RETRIES or (isinstance(delay, int | float) and delay > 1000 * seconds_left):
        return classify(retries[0]) or Availability(Meaning.NETWORK, clean(retries[0], MAX_SHOWN))
    sleeps, attempts = (re.findall(pattern, tail) for pattern in _SLEEPS)
    is_asleep = bool(sleeps) and int(sleeps[-1]) / 1000 > seconds_left
    if is_asleep or (attempts and int(attempts[-1]) >= _RETRIES):
        return _of_lines(printed.lines)
    return None


def next_question(
    availability: Availability, num_in_row: int, now: datetime, seconds_left: float | None = None
) -> datetime:
    """Return when to ask the agent again.

    Args:
        availability: of the last answer.
        num_in_row: how often in a row, this time included, the agent was unavailable.
        now: with a zone.
        seconds_left: of the night; the moment is never after its end. None: the night has no end.
    """
    seconds = SHORT_WAITS[max(0, min(num_in_row, len(SHORT_WAITS)) - 1)]
    until_end = 0.0 if availability.ends_at is None else (availability.ends_at - now).total_seconds()
    if until_end > SHORT_WAITS[0]:
        seconds = min(until_end + AFTER_END, MAX_WAIT)
    if seconds_left is not None:
        seconds = min(seconds, max(seconds_left, 0.0))
    return now + timedelta(seconds=seconds)


def codex_reset(home: Path, now: datetime) -> datetime | None:
    """Return when the limit of a ChatGPT plan ends, by what Codex wrote below `home`; None if no limit is reached."""
    for path in sorted(home.glob(".codex/sessions/*/*/*/rollout-*.jsonl"), reverse=True)[:_MAX_ROLLOUTS]:
        with suppress(OSError):
            for row in reversed(read_output(read_file(path).decode(errors="replace")).rows):
                limits = mapping(mapping(row.get("payload")).get("rate_limits"))
                windows = [mapping(limits.get(name)) for name in ("primary", "secondary")]
                ends = [_moment(w.get("resets_at"), now) for w in windows if w.get("used_percent") == 100]
                if limits:
                    return max((end for end in ends if end is not None), default=None)
    return None


def classify(text: str, status: int | None = None) -> Availability | None:
    """Say what the text of one error means; None if it belongs to no family.

    Args:
        text: the sentence for people, read up to _MAX_TEXT characters.
        status: HTTP.
    """
    plain = " ".join(text[:_MAX_TEXT].replace("\u2019", "'").split())
    meaning, shown = _family(plain), clean(text[:_MAX_TEXT], MAX_SHOWN)
    ends = _matches(_errors()["limit_with_end"], plain) and not _matches(_errors()["money_without_end"], plain)
    if ends and meaning in (None, Meaning.BILLING):
        return Availability(Meaning.LIMIT, shown)
    match = _STATUS.search(plain)
    number = status or (int(next(filter(None, match.groups()))) if match else 0)
    by_number = Meaning.OVERLOADED if number >= 500 else _STATUSES.get(number)
    meaning = meaning or by_number
    return Availability(meaning, shown) if meaning else None


def _moment(value: Any, now: datetime) -> datetime | None:
    """Return the moment of a Unix time; None if it is no number within a year after `now`."""
    seconds = now.timestamp()
    is_sane = type(value) in (int, float) and seconds <= value <= seconds + 366 * 86_400
    return datetime.fromtimestamp(value, UTC) if is_sane else None


def _rejection(printed: Output) -> Mapping[str, Any] | None:
    """Return the last `rate_limit_info` of Claude Code if it rejected the request."""
    infos = [mapping(row.get("rate_limit_info")) for row in printed.rows if row.get("type") == "rate_limit_event"]
    return infos[-1] if infos and infos[-1].get("status") == "rejected" else None


def _retry(row: Mapping[str, Any]) -> str:
    """Return what a row says of one more try; "" for other rows."""
    if row.get("subtype") == "api_retry":
        return f"retrying: {row.get('error')} (status {row.get('error_status')})"
    text = row.get("message") if row.get("type") == "error" else None
    return text if isinstance(text, str) and "waiting for network" in text else ""


@cache
def _errors() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("errors.toml").read_text("utf-8"))


def _matches(patterns: Sequence[str], plain: str) -> bool:
    """Return True if one of the patterns is in the text. Python caches the compiled patterns."""
    return re.search("|".join(patterns), plain, re.IGNORECASE) is not None


def _family(plain: str) -> Meaning | None:
    """Return the meaning of the first family with a pattern in the text."""
    families = _errors()["family"]
    return next((Meaning(row["meaning"]) for row in families if _matches(row["patterns"], plain)), None)


def _read_course(printed: Output, tokens_out: int | None) -> tuple[bool, Event | None]:
    """Return whether the model ever worked, and the error after which it did nothing more."""
    is_working, error = False, None
    for row in printed.rows:
        event = read_event(row)
        if event is not None and tokens_out == 0 and event.text.startswith("[API Error"):  # Qwen Code
            event = event._replace(is_error=True)
        if event is not None and event.is_error:
            error = event
        elif event is not None or (row.get("type") in _WORK and mapping(row.get("item")).get("type") != "error"):
            is_working, error = True, None
    return is_working, error


def _of_answer(printed: Output, words: str, is_answered: bool, is_edited: bool) -> Availability:
    """Read the end of a process that ended with 0 and without an error in its JSON: its text is the model's."""
    if is_edited:
        return Availability(Meaning.OK, words)
    if is_answered and not any(read_event(row) for row in printed.rows):  # Codex, when the provider's filter steps in
        return Availability(Meaning.REFUSED, "the model ended without an answer")
    return Availability(Meaning.NO_EDIT, words)


def _of_lines(lines: list[str]) -> Availability | None:
    """Say what the last lines of a failed program mean: the last line of a known family, with the line before it."""
    texts = [line.strip() for line in lines if line.strip() and not is_stack(line)][-_MAX_LINES:]
    for before, text in reversed([*pairwise(["", *texts])]):
        if text.lower().startswith("warning"):
            continue
        result = classify(text)
        if result is not None and before != text and classify(before) is not None:
            return classify(f"{before} {text}")
        if result is not None:
            return result
    return None

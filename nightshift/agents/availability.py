"""Decides from an agent program's output why it left no proposal, and when to ask it again.

Exit codes separate nothing: Claude Code ends every error with 1, pi and Qwen Code end a wrong key with 0, Gemini CLI
ends with the HTTP status modulo 256. So the errors in the JSON output are read first, then, if the program failed, the
lines that it printed. The answer of a model that ended ordinarily is not read as an error, whatever it says. The output
is hostile: a forged error costs a wait that `next_question` bounds, or a needless call of the user, and no more.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from functools import cache
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from nightshift.agents.usage import (
    MAX_LOG_BYTES,
    Event,
    Output,
    is_stack,
    mapping,
    read_event,
    read_output,
    summarize,
)
from nightshift.files import open_regular
from nightshift.text import clean

MAX_SHOWN = 300  # characters of a text for people
_MAX_TEXT = 4_000  # characters of an error that are read
_MAX_LINES = 40  # of the end of an output without JSON
_MAX_AHEAD = timedelta(days=366)  # an end later than this is not believed
_MAX_ENTRIES, _MAX_ROLLOUTS = 500, 5  # of Codex's session files
_TOLERANCE = timedelta(minutes=5)  # programs cut the seconds, and may have retried since they heard of the limit
_RETRIES = 5  # in a row; from then on nightshift waits instead of the program

SHORT_WAITS = (60.0, 300.0, 900.0, 1800.0)  # seconds, by the number of failures in a row
USER_WAIT = 1800.0  # seconds between two questions while the user has to act
MAX_WAIT = 6 * 3600.0  # seconds; a later end is asked for again, since it may be forged or misread
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
    ends_at: datetime | None = None  # UTC; the end of a limit, if the program told it

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
_OWN_LINE = re.compile(r"(?:error|fatal)\b|\[?api error", re.IGNORECASE)  # a line of the program, not of its model
_WORK = ("assistant", "tool_use", "tool_execution_start", "item.started", "item.completed", "text")  # a model's rows

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MONTH = rf"(?P<month>{'|'.join(_MONTHS)})[a-z]{{0,6}}\.?"
_US_ZONES = {"p": "America/Los_Angeles", "m": "America/Denver", "c": "America/Chicago", "e": "America/New_York"}
# The end of a limit stands within _REACH characters after one of these words, in the same sentence.
_ANCHOR = re.compile(
    r"reset\w*|renew\w*|refill\w*|refresh\w*|retry(?:ing)?(?:[-_ ]after)?|again|continue at|wait\w*|available"
    r"|regain|until|restored|unlock\w*|lifted|opens|\bback\b|\|(?=\d{10})",
    re.I,
)
_REACH, _MAX_ANCHORS = 80, 20
_SENTENCE = re.compile(r"(?<![ap]\.m)[.!?] ", re.I)
_EPOCH = re.compile(r"(?<!\d)([12]\d{9})(?:\d{3})?(?!\d)")
_DATES = tuple(
    re.compile(pattern, re.I)
    for pattern in (
        r"(?<!\d)(?P<year>\d{4})-(?P<number>\d\d)-(?P<day>\d\d)",
        rf"\b{_MONTH} (?P<day>\d{{1,2}})(?:st|nd|rd|th)?\b(?:,? (?P<year>\d{{4}}))?",
        rf"\b(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? {_MONTH}(?:,? (?P<year>\d{{4}}))?",
        rf"\b(?P<weekday>{'|'.join(_DAYS)}|today|tomorrow)(?:s|rs|nes|ur)?(?:day)?\b",
    )
)
_CLOCK = re.compile(
    r"(?<![\d.:])(?:(?P<hour>\d{1,2})(?::(?P<minute>\d\d)(?::(?P<second>\d\d)(?:\.\d+)?)?)? ?(?P<half>[ap]\.?m\b)?"
    r"|(?P<word>midnight|noon))"
    r"(?:\.?,? ?\(?(?P<zone>[+-]\d\d:?\d\d|[a-z]+(?:/[a-z_+-]+\d*)+|[a-z]+))?",
    re.I,
)
_LIVE = re.compile(r"Retrying after \d|waiting for network|api_retry|Attempt \d+ failed")
_SLEEPS = (r"Retrying after (\d{1,12})ms", r"(?m)^Attempt (\d{1,3}) failed")  # Gemini CLI
_LIVE_CHARACTERS = 64 * 1024
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_UNIT = r"(ms|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?|w|weeks?)(?![a-z])"
_PART = rf"(?:(\d{{1,9}}(?:\.\d{{1,6}})?) ?|\b(?:an?|one) ){_UNIT}"
_DURATION = re.compile(rf"{_PART}(?:[, ]{{0,2}}(?:and )?{_PART}){{0,5}}", re.I)
_BARE_SECONDS = re.compile(r"(?:[-_ ]?(?:after|in|seconds)){0,2}[\"':= ]{1,4}(\d{1,9}(?:\.\d+)?)(?! ?[\da-z:/-])", re.I)


def read_ending(
    output: str, exit_code: int | None, now: datetime, *, is_edited: bool = False, zone: tzinfo = UTC
) -> Availability:
    """Say why a process left no acceptable proposal.

    Args:
        output: stdout and stderr in one text, as the log holds them.
        exit_code: None if nightshift stopped the process.
        is_edited: the process changed train.toml.
        zone: the process's zone, for clock times without one.
    """
    printed = read_output(output)
    words, cost = summarize(printed)
    is_working, error = _read_course(printed, cost.tokens_out)
    if exit_code in (126, 127):
        return Availability(Meaning.PROGRAM, words)
    if error is None and exit_code == 0:
        return _of_answer(printed, words, bool(cost.tokens_out), is_edited, now, zone)
    result, reset = None, _rejected_until(printed, now)
    if error is not None:
        result = classify(error.text, now, error.status, error.details, zone)
    elif exit_code is not None or not is_working:
        result = _of_lines(printed.lines, now, zone)
    if result is None and reset is not None:
        result = Availability(Meaning.LIMIT, words)
    if result is None and exit_code is None and not is_working:
        return Availability(Meaning.NETWORK, "the model did not answer before the time limit")
    if result is None:  # a report of no tokens at all: the model was not reached
        return Availability(Meaning.OVERLOADED if error and cost.tokens_out == 0 else Meaning.NO_EDIT, words)
    if result.meaning is Meaning.LIMIT and error is not None:
        return replace(result, ends_at=reset or result.ends_at or _retry_after(error.retry_after, now))
    return result


def read_live(output: str, seconds_left: float, now: datetime, *, zone: tzinfo = UTC) -> Availability | None:
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
        return classify(retries[0], now, zone=zone) or Availability(Meaning.NETWORK, clean(retries[0], MAX_SHOWN))
    sleeps, attempts = (re.findall(pattern, tail) for pattern in _SLEEPS)
    is_asleep = bool(sleeps) and int(sleeps[-1]) / 1000 > seconds_left
    if is_asleep or (attempts and int(attempts[-1]) >= _RETRIES):
        return _of_lines(printed.lines, now, zone)
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
    if availability.needs_user:
        seconds = USER_WAIT
    elif availability.ends_at is not None and availability.ends_at > now - _TOLERANCE:
        seconds = min(max((availability.ends_at - now).total_seconds() + AFTER_END, SHORT_WAITS[0]), MAX_WAIT)
    if seconds_left is not None:
        seconds = min(seconds, max(seconds_left, 0.0))
    return now + timedelta(seconds=seconds)


def codex_reset(home: Path, since: float) -> datetime | None:
    """Return when the limit of a ChatGPT plan ends, by what Codex wrote below `home` since the Unix time `since`.

    The folder was the agent's: no link is followed, and few files and folders are read.
    """
    folders, files = [home / ".codex" / "sessions"], list[tuple[float, Path]]()
    if folders[0].is_symlink() or folders[0].parent.is_symlink():
        return None
    for folder in folders:  # the list grows: year, month and day are folders
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in islice(entries, _MAX_ENTRIES):
                if entry.is_dir(follow_symlinks=False) and len(folders) < _MAX_ENTRIES:
                    folders.append(Path(entry.path))
                elif entry.name.startswith("rollout-") and entry.name.endswith(".jsonl"):
                    files.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
    recent = sorted((changed_at, path) for changed_at, path in files if changed_at >= since)[-_MAX_ROLLOUTS:]
    for _, path in reversed(recent):
        with suppress(OSError), open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
            for row in reversed(read_output(file.read(MAX_LOG_BYTES).decode(errors="replace")).rows):
                limits = mapping(mapping(row.get("payload")).get("rate_limits"))
                windows = [mapping(limits.get(name)) for name in ("primary", "secondary")]
                full = [window for window in windows if window.get("used_percent") == 100]
                ends = [_of_epoch(window.get("resets_at"), since) for window in full]
                if limits:
                    return max((end for end in ends if end is not None), default=None)
    return None


def classify(
    text: str, now: datetime, status: int | None = None, details: str = "", zone: tzinfo = UTC
) -> Availability | None:
    """Say what the text of one error means; None if it belongs to no family.

    Args:
        text: the sentence for people, read up to _MAX_TEXT characters.
        status: HTTP.
        details: codes and bodies, which decide only if the sentence does not.
    """
    plain = " ".join(text[:_MAX_TEXT].replace("\u2019", "'").split())
    meaning, shown = _family(plain), clean(text[:_MAX_TEXT], MAX_SHOWN)
    ends_at = None if _matches("money_without_end", plain) else find_end(plain, now, zone)
    if ends_at is not None and (meaning in (None, Meaning.BILLING, Meaning.MODEL) or _matches(Meaning.LIMIT, plain)):
        return Availability(Meaning.LIMIT, shown, ends_at)
    if meaning is Meaning.BILLING and _matches("limit_despite_money", plain):
        return Availability(Meaning.LIMIT, shown)
    match = _STATUS.search(plain)
    number = status or (int(next(filter(None, match.groups()))) if match else 0)
    by_number = Meaning.OVERLOADED if number >= 500 else _STATUSES.get(number)
    meaning = meaning or _family(" ".join(details[:_MAX_TEXT].split())) or by_number
    return None if meaning is None else Availability(meaning, shown)


def find_end(plain: str, now: datetime, zone: tzinfo) -> datetime | None:
    """Return the moment, in UTC, at which a text says that a limit ends; None if it names none, or no sane one."""
    for anchor in islice(_ANCHOR.finditer(plain), _MAX_ANCHORS):
        window = _SENTENCE.split(plain[anchor.end() : anchor.end() + _REACH])[0]
        try:
            moment = _moment(window, anchor[0], now, zone)
        except (ValueError, OverflowError):
            continue
        if moment is not None and -timedelta(days=1) <= moment - now <= _MAX_AHEAD:
            return moment.astimezone(UTC)
    return None


def _moment(window: str, anchor: str, now: datetime, zone: tzinfo) -> datetime | None:
    if match := _EPOCH.search(window):
        return datetime.fromtimestamp(int(match[1]), UTC)
    dates = [match for pattern in _DATES if (match := pattern.search(window))]
    date = next(iter(dates), None)
    clocks = [match for match in _CLOCK.finditer(window) if match["minute"] or match["half"] or match["word"]]
    duration = _DURATION.search(window)
    starts = [match.start() for match in (*dates, *clocks)]
    is_first = duration is not None and all(duration.start() < start for start in starts)
    if duration is not None and is_first and not window[: duration.start()].endswith("every "):
        return now + timedelta(seconds=_seconds(duration[0]))
    if not starts:
        bare = _BARE_SECONDS.match(window) if anchor.lower().startswith("retry") else None
        return now + timedelta(seconds=float(bare[1])) if bare else None
    before = clocks[0] if clocks else None
    clock = next((match for match in clocks if date is None or match.start() >= date.end()), before)
    return _at(date, clock, now, zone)


def _seconds(duration: str) -> float:
    parts = re.findall(_PART, duration, re.IGNORECASE)
    factors = [0.001 if unit.lower().startswith(("ms", "mil")) else _SECONDS[unit[0].lower()] for _, unit in parts]
    return sum(float(number or 1) * factor for (number, _), factor in zip(parts, factors, strict=True))


def _at(date: re.Match[str] | None, clock: re.Match[str] | None, now: datetime, zone: tzinfo) -> datetime:
    """Return the moment of a date, of a clock time, or of both: the next one if the text names no day or year."""
    hour = minute = second = 0
    if clock is not None:
        zone = _zone(clock["zone"] or "") or zone
        hour, minute, second = (int(clock[name] or 0) for name in ("hour", "minute", "second"))
        if (clock["word"] or "").lower() == "noon":
            hour = 12
        if clock["half"]:
            hour = hour % 12 + 12 * clock["half"].lower().startswith("p")
    local = now.astimezone(zone)
    moment = local.replace(hour=hour, minute=minute, second=second, microsecond=0)
    if date is None:
        return moment if moment >= local - _TOLERANCE else moment + timedelta(days=1)
    fields = date.groupdict()
    if word := (fields.get("weekday") or "").lower():
        if word in ("today", "tomorrow"):
            return moment + timedelta(days=word == "tomorrow")
        moment += timedelta(days=(_DAYS.index(word) - local.weekday()) % 7)
        return moment if moment >= local - _TOLERANCE else moment + timedelta(days=7)
    month = int(fields.get("number") or 0) or _MONTHS.index(fields["month"].lower()) + 1
    moment = moment.replace(year=int(fields["year"] or local.year), month=month, day=int(fields["day"]))
    if fields["year"] is None and moment < local - timedelta(days=1):
        moment = moment.replace(year=local.year + 1)
    return moment


def _zone(name: str) -> tzinfo | None:
    """Return the time zone of an offset, an abbreviation or a name of the IANA; None if it is none."""
    with suppress(ValueError, OSError, KeyError):
        if name.startswith(("+", "-")):
            return datetime.strptime(name, "%z").tzinfo
        if re.fullmatch(r"[pmce][ds]?t|pacific|mountain|central|eastern", name.lower()):
            return ZoneInfo(_US_ZONES[name[0].lower()])
        return ZoneInfo(name if "/" in name else "UTC" if name in ("z", "Z") else name.upper().replace("CEST", "CET"))
    return None


def _of_epoch(value: Any, near: float) -> datetime | None:
    """Return the moment of a Unix time; None if it is no number within a year of `near`."""
    reach = _MAX_AHEAD.total_seconds()
    is_sane = type(value) in (int, float) and near - reach <= value <= near + reach
    return datetime.fromtimestamp(value, UTC) if is_sane else None


def _rejected_until(printed: Output, now: datetime) -> datetime | None:
    """Return the end of the limit by the last `rate_limit_event` of Claude Code, if that rejected the request."""
    infos = [mapping(row.get("rate_limit_info")) for row in printed.rows if row.get("type") == "rate_limit_event"]
    is_rejected = bool(infos) and infos[-1].get("status") == "rejected"
    return _of_epoch(infos[-1].get("resetsAt"), now.timestamp()) if is_rejected else None


def _retry(row: Mapping[str, Any]) -> str:
    """Return what a row says of one more try; "" for other rows."""
    if row.get("subtype") == "api_retry":
        return f"retrying: {row.get('error')} (status {row.get('error_status')})"
    text = row.get("message") if row.get("type") == "error" else None
    return text if isinstance(text, str) and "waiting for network" in text else ""


def _retry_after(header: str, now: datetime) -> datetime | None:
    """Return the moment of an HTTP header Retry-After; None if it is within the shortest wait anyway."""
    moment = find_end(f"retry after {header}", now, UTC) if header else None
    return moment if moment is not None and (moment - now).total_seconds() >= SHORT_WAITS[0] else None


@cache
def _error_patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Read errors.toml. Returns the name and the pattern of each family in order, then of the two lists about money."""
    table = tomllib.loads(Path(__file__).with_name("errors.toml").read_text("utf-8"))
    lists = [(row["meaning"], row["patterns"]) for row in table.pop("family")]
    return [(name, re.compile("|".join(patterns), re.IGNORECASE)) for name, patterns in (*lists, *table.items())]


def _matches(name: str, plain: str) -> bool:
    """Return True if a pattern of this name is in the text."""
    return any(pattern.search(plain) for other, pattern in _error_patterns() if other == name)


def _family(plain: str) -> Meaning | None:
    """Return the meaning of the first family with a pattern in the text."""
    families = _error_patterns()[:-2]
    return next((Meaning(name) for name, pattern in families if pattern.search(plain)), None)


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


def _of_answer(
    printed: Output, words: str, is_answered: bool, is_edited: bool, now: datetime, zone: tzinfo
) -> Availability:
    """Read the end of a process that ended with 0 and without an error in its JSON: its text is the model's."""
    last = next((line.strip() for line in reversed(printed.lines) if line.strip()), "")
    if is_edited:
        return Availability(Meaning.OK, words)
    if not printed.rows and _OWN_LINE.match(last):  # may be forged: it may cost a wait, and never a call of the user
        result = classify(last, now, zone=zone)
        if result is not None and result.waits:
            return result
    if is_answered and not any(read_event(row) for row in printed.rows):  # Codex, when the provider's filter steps in
        return Availability(Meaning.REFUSED, "the model ended without an answer")
    return Availability(Meaning.NO_EDIT, words)


def _of_lines(lines: list[str], now: datetime, zone: tzinfo) -> Availability | None:
    """Say what the last lines of a failed program mean: the last line of a known family, with the line before it."""
    texts = [line.strip() for line in lines if line.strip() and not is_stack(line)][-_MAX_LINES:]
    for before, text in reversed([*pairwise(["", *texts])]):
        if text.lower().startswith("warning"):
            continue
        result = classify(text, now, zone=zone)
        if result is not None and before != text and classify(before, now, zone=zone) is not None:
            return classify(f"{before} {text}", now, zone=zone)
        if result is not None:
            return result
    return None

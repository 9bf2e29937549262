"""Decide from the output of an agent program why it made no proposal.

Exit codes do not help: Claude Code exits with 1 for every error, and some programs with 0 on a wrong key. So the errors
in the JSON output are read first, then, if the program failed, the other lines. A model's answer is not read as an
error if the program succeeded. The output is hostile; the night asks the agent again in any case (night/proposals.py).
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from nightshift.agents.usage import mapping, read_event, read_output, summary_of
from nightshift.text import clean

MAX_SHOWN = 300  # characters of a message
_MAX_TEXT = 4_000  # characters that are read of an error


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


@dataclass(frozen=True)
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
_WORK = ("assistant", "tool_use", "item.started", "item.completed", "text")  # types of rows of a model


def read_ending(output: str, exit_code: int | None, *, is_edited: bool = False) -> Availability:
    """Return why a process made no acceptable proposal. `output`: stdout and stderr. `exit_code`: None if Nightshift
    stopped the process. `is_edited`: the process changed train.toml."""
    (rows, lines), words = read_output(output), summary_of(output).words
    is_working, error = False, ""  # whether the model worked; the last error, if no work followed
    for row in rows:
        text, is_error = read_event(row)
        if is_error:
            error = text
        elif text or (row.get("type") in _WORK and mapping(row.get("item")).get("type") != "error"):
            is_working, error = True, ""
    result = classify(error) if error else None
    if not error and exit_code == 0:
        result = Availability(Meaning.OK if is_edited else Meaning.NO_EDIT, words)
    elif not error and (exit_code is not None or not is_working):
        result = next(filter(None, map(classify, reversed(lines[-40:]))), None)
    if result is None and exit_code is None and not is_working:
        result = Availability(Meaning.NETWORK, "the model did not answer before the time limit")
    return result or Availability(Meaning.NO_EDIT, words)


def classify(text: str) -> Availability | None:
    """Return the meaning of an error; None if its text belongs to no family."""
    plain = " ".join(text[:_MAX_TEXT].replace("\u2019", "'").split())
    families = (Meaning[family["meaning"]] for family in _ERRORS["family"] if _matches(family["patterns"], plain))
    meaning = next(families, None)
    ends = _matches(_ERRORS["limit_with_end"], plain) and not _matches(_ERRORS["money_without_end"], plain)
    if ends and meaning in (None, Meaning.BILLING):
        meaning = Meaning.LIMIT
    return Availability(meaning, clean(text[:_MAX_TEXT], MAX_SHOWN)) if meaning else None


def _matches(patterns: Sequence[str], plain: str) -> bool:
    """Return True if any pattern matches. Python caches the compiled patterns."""
    return re.search("|".join(patterns), plain, re.IGNORECASE) is not None

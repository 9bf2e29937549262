"""Stub for the merge."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path


class Meaning(StrEnum):
    OK = "ok"
    LIMIT = "usage limit"
    LOGIN = "not logged in"
    BILLING = "no credit"
    MODEL = "no such model"
    PROGRAM = "the program does not work"
    OVERLOADED = "overloaded"


@dataclass(frozen=True, slots=True)
class Availability:
    meaning: Meaning
    text: str
    ends_at: datetime | None = None

    @property
    def waits(self) -> bool:
        return self.meaning is Meaning.LIMIT

    @property
    def needs_user(self) -> bool:
        return self.meaning is Meaning.LOGIN


def read_ending(output: str, exit_code: int | None, now: datetime, *, is_edited: bool = False) -> Availability:
    return Availability(Meaning.OK, "")


def read_live(output: str, seconds_left: float) -> Availability | None:
    return None


def codex_reset(home: Path, since: float) -> datetime | None:
    return None


def next_question(availability: Availability, num_times: int, now: datetime, end: datetime | None) -> datetime:
    return now + timedelta(minutes=5)

"""Tells how a night goes: the summary and the page to who looks, notices (notices.py) to who does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from nightshift.campaign.counts import Counts
from nightshift.campaign.expected import expected_then
from nightshift.errors import Interrupted, NightshiftError
from nightshift.night.notices import END, KEEP, REPEATED_CRASH, Notices
from nightshift.night.state import NightState, by_end
from nightshift.night.text import write_summary
from nightshift.records import Failure, Record, Verdict
from nightshift.setup import Setup
from nightshift.text import clean

VERSION = 1  # of the messages


class Herald:
    """Of one night. `tell` gets the summary."""

    def __init__(self, tell: Callable[[str], None], setup: Setup, notices: Notices) -> None:
        self._tell, self._setup, self._notices = tell, setup, notices
        self._has_news = False  # since the summary was told
        self._is_over = False
        self._failures = list[str | None]()  # of the machinery: the causes of the last in a row

    def concluded(self, record: Record, state: NightState) -> None:
        """An experiment has its verdict: the summary waits until there is time for it."""
        self._has_news = True
        with self._going_on("no notice"):
            if (event := event_of(record, state.own(self._setup.ledger.records()))) is not None:
                self._send(event, state, record.judgement.why if record.judgement else "", record)

    def failed(self, cause: str, num_failures: int, state: NightState) -> None:
        """The machinery failed so many times in a row, before there was an experiment."""
        self._failures = [*(self._failures[-2:] if num_failures > 1 else ()), _plain(cause)]
        if _is_second(self._failures):
            self._send(REPEATED_CRASH, state, cause)

    def tell_news(self, state: NightState) -> None:
        """Say what is new, if anything; it takes a second."""
        self.look()
        if self._has_news:
            self.tell(state)
        self._has_news = False

    def tell(self, state: NightState) -> None:
        """The summary and the page, as it stands."""
        self._tell(write_summary(state, self._setup))

    def look(self) -> None:
        """Start the notice that waits, if none runs."""
        self._notices.look()

    def leave(self, *traces: Callable[[], None]) -> None:
        """Have the last traces of a night written, each of them though another cannot be."""
        for trace in traces:
            try:
                trace()
            except (NightshiftError, OSError) as error:
                self._setup.reporter.note(f"the night's last traces are not whole: {error}")

    def over(self, state: NightState, cause: str) -> None:
        """Who sleeps is told, once, that the night is over: nothing on the disk can prevent it."""
        if not self._is_over:
            self._send(END, state, cause)
            self._is_over = True

    @contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """What fails inside is a line of news: why there is this instead of what there should be."""
        try:
            yield
        except Interrupted:
            raise
        except (NightshiftError, OSError, ValueError) as error:
            self._setup.reporter.note(f"{what}: {error}")

    def _send(self, event: str, state: NightState, why: str, record: Record | None = None) -> None:
        ledger, counts = self._setup.ledger, None
        then = expected_then(record) if record is not None else None
        with self._going_on("a notice without counts"):  # of records that cannot be read
            campaign = self._setup.campaign(state.branch)
            counts = Counts.of(state.own(ledger.records()), {each.number for each in campaign.taken_back})
        message: dict[str, Any] = {
            "version": VERSION,
            "event": event,
            "campaign": state.branch,
            "experiment": None if record is None else record.number,
            "verdict": None if record is None else record.status,
            "expected_then": None if then is None else then.mean,
            "why": clean(why),
            "counts": None if counts is None else {"line": str(counts), **asdict(counts)},
            "page": str((ledger.runs_dir / "report.html").absolute()),
        }
        self._notices.send(event, message)


def event_of(record: Record, own: Sequence[Record]) -> str | None:
    """What a verdict is to who sleeps: a keep; the second crash in a row that has the cause of the first, numbers
    aside; else nothing. `own`: the night's closed experiments, this one among them."""
    if record.is_keep:
        return KEEP if record.parent is not None else None
    ended = [r for r in by_end(own) if r.failure is not Failure.INTERRUPTED]
    whys = [r.judgement.why if r.judgement else "" for r in ended[-3:]]
    causes = [_plain(why) if r.status == Verdict.CRASH else None for r, why in zip(ended[-3:], whys, strict=True)]
    return REPEATED_CRASH if _is_second(causes) and ended[-1].number == record.number else None


def _plain(cause: str) -> str:
    """Numbers aside."""
    return re.sub(r"\d+", "#", cause)


def _is_second(causes: Sequence[str | None]) -> bool:
    """Whether the last of these is the second in a row with one cause; None: no crash."""
    return len(causes) > 1 and causes[-1] == causes[-2] is not None and causes[-3:-2] != causes[-1:]

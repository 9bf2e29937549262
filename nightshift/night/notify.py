"""`nightshift night --notify COMMAND`: run your command with one JSON object on its stdin.

A notification can neither stop nor delay a night. The command is not stored: a resumed night runs its own --notify.
"""

import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from subprocess import TimeoutExpired
from typing import Any

from msgspec.structs import asdict

from nightshift.agents.availability import AWAY
from nightshift.agents.presets import program_words
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.records import PAGE_NAME, Record, Verdict
from nightshift.campaign.results import Counts, verdict_of
from nightshift.campaign.waits import LONG_SECONDS
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.executors.process import mark
from nightshift.executors.watchdog import MARKER_NAME, ProcessTree
from nightshift.files import as_json
from nightshift.night.desk import Desk, Event, Kind
from nightshift.night.state import by_end
from nightshift.text import clean
from nightshift.waiting import waiting

KEEP, REPEATED_CRASH, AGENT, PAUSED, END = "keep", "repeated crash", "agent unavailable", "paused", "end"
MESSAGE_VERSION = 2  # of what the command gets
_GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL


class Notifier:
    """Runs the command for each notification, inside of `running`."""

    def __init__(self, command: str | None, note: Callable[[str], None], limit_seconds: float = 30.0) -> None:
        """`command` None: nothing is sent. `note` prints a line. UsageError if the program does not exist."""
        fix = "Install it, give its path, or leave --notify out."
        self._words = program_words("--notify", command, fix) if command is not None else ()
        self._note, self._limit_seconds = note, limit_seconds
        self._marker = f"notify-{uuid.uuid4().hex}"
        self._processes = list[tuple[str, subprocess.Popen[bytes]]]()  # with their events

    def send(self, event: str, message: Mapping[str, Any]) -> None:
        """Start the command and return at once."""
        self._report()
        if not self._words:
            return
        env = {**os.environ, MARKER_NAME: self._marker, **mark()}
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:  # in a process group of its own: Ctrl-C in the terminal is not for the command
            process = subprocess.Popen(self._words, stdin=pipe, stdout=null, stderr=null, env=env, process_group=0)
        except OSError as error:
            self._note(f"--notify: the notification of {event} failed: {error}")
            return
        self._processes.append((event, process))
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # of a command that reads nothing
            process.stdin.write(as_json(message))  # it does not wait: the buffer of a pipe is larger than a message

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wait at the end for the commands that still run, after Ctrl-C briefly. Leave no process."""
        seconds = self._limit_seconds
        try:
            yield
        except Interrupted:
            seconds = min(3.0, seconds)
            raise
        finally:
            try:
                ends_at = time.monotonic() + seconds
                with waiting("waiting for the last notification of the night", seconds), suppress(TimeoutExpired):
                    for _, process in self._processes:
                        process.wait(max(ends_at - time.monotonic(), 0.0))
            finally:
                tree = ProcessTree(None, lambda process: False)
                tree.markers.add(self._marker)
                if self._words and (left := tree.end(_GRACE_SECONDS)):
                    self._note(f"--notify: could not be ended: {', '.join(left)}")
                self._report()

    def _report(self) -> None:
        """Print a line for each command that has failed since the last call."""
        for event, process in self._processes:
            if process.poll():
                self._note(f"--notify: the notification of {event} failed: exit code {process.returncode}")
        self._processes = [(event, process) for event, process in self._processes if process.returncode is None]


class Notifications:
    """An observer that tells the user of keeps, repeated crashes, waits and the end of a night."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._waits = set[tuple[str, str]]()  # of which the user was notified

    def __call__(self, desk: Desk, event: Event) -> None:
        if event.kind is Kind.OVER:
            self._notifier.send(END, message(END, desk, event.why))
        record, now = event.record, desk.controller.now()
        if record is not None and (name := event_of(record, desk.own())) is not None:
            self._notifier.send(name, message(name, desk, record.why, record))
        waits = {(wait.kind, wait.meaning): wait for wait in desk.state.waits if wait.ended is None}
        self._waits &= waits.keys()
        for key, wait in waits.items():
            name = AGENT if wait.kind == "agent" else PAUSED
            # The user can end the wait, or it is long.
            is_users = wait.kind == "disk" or wait.meaning in AWAY or (wait.kind == "machine" and wait.num_checks > 1)
            if key not in self._waits and (is_users or wait.seconds(now) >= LONG_SECONDS):
                self._waits.add(key)
                self._notifier.send(name, message(name, desk, wait.describe()))


def event_of(record: Record, own: Sequence[Record]) -> str | None:
    """Return KEEP, REPEATED_CRASH, or None for a closed experiment. `own`: the night's closed experiments.

    A crash is repeated if it is the second in a row with one cause, numbers aside.
    """
    if record.is_keep:
        return KEEP if record.parent is not None else None
    ended = by_end(own)[-3:]
    causes = [re.sub(r"\d+", "#", r.why) if r.status == Verdict.CRASH else "" for r in ended]
    is_second = causes[-1:] != [""] and causes[-2:-1] == causes[-1:] != causes[-3:-2]
    return REPEATED_CRASH if is_second and ended[-1].number == record.number else None


def message(event: str, desk: Desk, why: str, record: Record | None = None) -> dict[str, Any]:
    """Return what the command gets. `counts` is None if records cannot be read, which is noted."""
    counts, state, ledger = None, desk.state, desk.ledger
    try:
        records = ledger.records()
        counts = Counts.of(Campaign.read(ledger, records, state.branch, state.rules_hash).rows(state.own(records)))
    except (UsageError, EngineError, OSError, ValueError) as error:
        desk.note(f"a notification without counts: {error}")
    effect = record.decision.estimate if record and record.decision else None
    return {
        "version": MESSAGE_VERSION,
        "event": event,
        "campaign": state.branch,
        "experiment": record.number if record else None,
        "verdict": verdict_of(record) if record else None,
        "effect_at_decision": effect.mean if effect else None,
        "why": clean(why),
        "counts": None if counts is None else {"line": str(counts), **asdict(counts)},
        "page": str((ledger.runs_dir / PAGE_NAME).absolute()),
    }

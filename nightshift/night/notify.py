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
from typing import Any

from nightshift.agents.availability import AWAY
from nightshift.agents.presets import program_words
from nightshift.campaign.records import Record, Verdict
from nightshift.campaign.waits import LONG_SECONDS, Wait
from nightshift.errors import Interrupted
from nightshift.executors.process import mark
from nightshift.executors.watchdog import MARKER_NAME, ProcessTree
from nightshift.files import as_json
from nightshift.night.desk import Desk, Event, Kind
from nightshift.night.state import by_end
from nightshift.night.summary import message
from nightshift.waiting import waiting

KEEP, REPEATED_CRASH, AGENT, PAUSED, END = "keep", "repeated crash", "agent unavailable", "paused", "end"
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
                with waiting("waiting for the last notification of the night", seconds):
                    while time.monotonic() < ends_at and any(process.poll() is None for _, process in self._processes):
                        time.sleep(0.1)
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
        self._notifier, self._is_end_sent = notifier, False
        self._waits = set[tuple[str, str]]()  # of which the user was notified

    def __call__(self, desk: Desk, event: Event) -> None:
        name = END if event.kind is Kind.OVER and not self._is_end_sent else None
        if event.record is not None:
            name = event_of(event.record, desk.own())
        if name is not None:
            self._send(desk, name, event.why, event.record)
            self._is_end_sent |= name == END
        waits = {(wait.kind, wait.meaning): wait for wait in desk.state.waits if wait.ended is None}
        self._waits &= waits.keys()
        for key in [key for key, wait in waits.items() if key not in self._waits and _is_news(wait, desk)]:
            self._waits.add(key)
            self._send(desk, AGENT if key[0] == "agent" else PAUSED, waits[key].describe())

    def _send(self, desk: Desk, name: str, why: str, record: Record | None = None) -> None:
        self._notifier.send(name, message(name, desk.state, desk.controller, why, record))


def _is_news(wait: Wait, desk: Desk) -> bool:
    """Return True if the user can end the wait, or if the wait is long."""
    is_users = wait.kind == "disk" or wait.meaning in AWAY or (wait.kind == "machine" and wait.num_checks > 1)
    return is_users or wait.seconds(desk.controller.now()) >= LONG_SECONDS


def event_of(record: Record, own: Sequence[Record]) -> str | None:
    """Return KEEP, REPEATED_CRASH, or None for a closed experiment. `own`: the night's closed experiments."""
    if record.is_keep:
        return KEEP if record.parent is not None else None
    ended = by_end(own)[-3:]
    causes = [r.why if r.status == Verdict.CRASH else None for r in ended]
    return REPEATED_CRASH if is_second(causes) and ended[-1].number == record.number else None


def is_second(causes: Sequence[str | None]) -> bool:
    """Return True if the last cause is the second in a row that is the same, numbers aside. None: no crash."""
    plain = [None if cause is None else re.sub(r"\d+", "#", cause) for cause in causes[-3:]]
    return len(plain) > 1 and plain[-1] == plain[-2] is not None and plain[-3:-2] != plain[-1:]

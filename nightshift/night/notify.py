"""`nightshift night --notify COMMAND`: run your command with one JSON object on its stdin.

Each notification has a thread, which can neither stop nor delay a night: a failure is a line of news. The command is
not stored: a resumed night runs the command of its own flag.
"""

import os
import re
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

from nightshift.agents.presets import program_words
from nightshift.campaign.records import Record, Verdict
from nightshift.errors import Interrupted
from nightshift.executors import leftovers
from nightshift.executors.watchdog import MARKER_NAME, ProcessTree
from nightshift.files import as_json
from nightshift.night.state import by_end
from nightshift.waiting import waiting

KEEP, REPEATED_CRASH, AGENT, END = "keep", "repeated crash", "agent unavailable", "end"
_GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL


class Notifier:
    """Sends the notifications of one night, inside of `running`."""

    def __init__(self, command: str | None, note: Callable[[str], None], limit_seconds: float = 30.0) -> None:
        """`command` None: nothing is sent. `note` takes a line of news. UsageError if the program does not exist."""
        fix = "Install it, give its path, or leave --notify out."
        self._words = program_words("--notify", command, fix) if command is not None else ()
        self._note, self._limit_seconds = note, limit_seconds
        self._threads = dict[str, Thread]()  # by the markers of their processes

    def send(self, event: str, message: Mapping[str, Any]) -> None:
        """Run the command beside the night and return at once."""
        if self._words:
            marker = f"notify-{uuid.uuid4().hex}"
            arguments = event, as_json(message), marker
            self._threads[marker] = Thread(target=self._run, args=arguments, name="notify", daemon=True)
            self._threads[marker].start()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wait at the end for the last notifications, after Ctrl-C briefly. Leave no process."""
        seconds = self._limit_seconds
        try:
            yield
        except Interrupted:
            seconds = min(3.0, seconds)
            raise
        finally:
            try:
                with waiting("waiting for the last notification of the night", seconds):
                    for thread in self._threads.values():
                        thread.join(seconds)
            finally:
                if hanging := [marker for marker, thread in self._threads.items() if thread.is_alive()]:
                    _end(hanging)
                for thread in self._threads.values():
                    thread.join(2 * _GRACE_SECONDS)

    def _run(self, event: str, message: bytes, marker: str) -> None:
        """Run the command, then end all that it started."""
        try:
            code = subprocess.run(
                self._words,
                input=message,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, MARKER_NAME: marker, **leftovers.mark()},
                process_group=0,  # Ctrl-C in the terminal is not for the command
                timeout=self._limit_seconds,
            ).returncode
            problem = f"exit code {code}" if code else ""
        except (OSError, ValueError) as error:
            problem = str(error)
        except subprocess.TimeoutExpired:
            problem = f"no end after {self._limit_seconds:g} s"
        if left := _end([marker]):
            problem = f"could not be ended: {', '.join(left)}"
        if problem:
            self._note(f"--notify: the notification of {event} failed: {problem}")


def _end(markers: Iterable[str]) -> list[str]:
    """End the processes with these markers. Returns those that cannot be ended."""
    tree = ProcessTree(None, lambda process: False)
    tree.markers.update(markers)
    return tree.end(_GRACE_SECONDS)


def event_of(record: Record, own: Sequence[Record]) -> str | None:
    """Return the event of a closed experiment: KEEP, REPEATED_CRASH, or None. `own`: the closed experiments of the
    night."""
    if record.is_keep:
        return KEEP if record.parent is not None else None
    ended = by_end(own)[-3:]
    causes = [r.why if r.status == Verdict.CRASH else None for r in ended]
    return REPEATED_CRASH if is_second(causes) and ended[-1].number == record.number else None


def is_second(causes: Sequence[str | None]) -> bool:
    """Return True if the last cause is the second in a row that is the same, numbers aside. None: no crash."""
    plain = [None if cause is None else re.sub(r"\d+", "#", cause) for cause in causes[-3:]]
    return len(plain) > 1 and plain[-1] == plain[-2] is not None and plain[-3:-2] != plain[-1:]

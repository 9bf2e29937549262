"""`nightshift night --notify COMMAND`: run your command with one JSON object on its stdin.

Each notification has a thread, which can neither stop nor delay a night: a failure is a line of news. The command is
not stored: a resumed night runs the command of its own flag.
"""

import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import psutil

from nightshift.agents.presets import program_words
from nightshift.campaign.records import Record, Verdict
from nightshift.errors import Interrupted
from nightshift.executors import leftovers
from nightshift.executors.watchdog import MARKER_NAME, ProcessTree
from nightshift.files import as_json
from nightshift.night.state import by_end
from nightshift.text import clean
from nightshift.waiting import waiting

KEEP, REPEATED_CRASH, AGENT, END = "keep", "repeated crash", "agent unavailable", "end"
_GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
_READ_BYTES = 64 * 1024  # of its output, as much as a pipe holds: a command that floods waits until its end


class Notifier:
    """Sends the notifications of one night, inside of `running`."""

    def __init__(self, command: str | None, note: Callable[[str], None], limit_seconds: float = 30.0) -> None:
        """`command` None: nothing is sent. `note` takes a line of news. UsageError if the program does not exist."""
        fix = "Install it, give its path, or leave --notify out."
        self._words = program_words("--notify", command, fix) if command is not None else ()
        self._note, self._limit_seconds = note, limit_seconds
        self._threads, self._is_over = list[Thread](), Event()

    def send(self, event: str, message: Mapping[str, Any]) -> None:
        """Run the command beside the night and return at once."""
        if self._words:
            self._threads.append(Thread(target=self._run, args=(event, as_json(message)), name="notify", daemon=True))
            self._threads[-1].start()

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
                    for thread in self._threads:
                        thread.join(seconds)
            finally:
                self._is_over.set()
                for thread in self._threads:
                    thread.join(4 * _GRACE_SECONDS)

    def _run(self, event: str, message: bytes) -> None:
        if problem := self._problem(message):
            self._note(f"--notify: the notification of {event} failed: {problem}")

    def _problem(self, message: bytes) -> str | None:
        """Run the command, then end all that it started. Returns what went wrong in one line."""
        ends_at, marker = time.monotonic() + self._limit_seconds, f"notify-{uuid.uuid4().hex}"
        environment = {**os.environ, MARKER_NAME: marker, **leftovers.mark()}
        pipe, errors = subprocess.PIPE, subprocess.STDOUT
        try:  # in a process group of its own: Ctrl-C in the terminal is not for the command
            child = subprocess.Popen(
                self._words, stdin=pipe, stdout=pipe, stderr=errors, env=environment, process_group=0
            )
        except (OSError, ValueError) as error:
            return str(error)
        assert child.stdin is not None
        assert child.stdout is not None
        tree = ProcessTree(None, lambda process: False)
        tree.markers.add(marker)
        tree.seen.add(psutil.Process(child.pid))
        with suppress(BrokenPipeError), child.stdin:  # a few kilobytes: a pipe holds them, read or not
            child.stdin.write(message)
        while child.poll() is None and time.monotonic() < ends_at:
            if self._is_over.wait(0.1):
                break
        code = child.returncode
        left = tree.end(_GRACE_SECONDS)
        child.poll()
        if left:
            return f"could not be ended: {', '.join(left)}"
        with child.stdout:
            output = child.stdout.read(_READ_BYTES).decode(errors="replace")
        if code == 0:
            return None
        problem = f"exit code {code}" if code is not None else "it took too long and was ended"
        words = [line for line in (clean(line, 200) for line in output.splitlines()) if line]
        return "; its last words: ".join([problem, *words[-1:]])


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

"""`nightshift night --notify COMMAND`: run your command at a keep, at a crash that repeats, when the agent
cannot be asked, and at the end.

The command gets one JSON object on stdin. It runs in a thread and can neither stop nor delay a night: a failure is a
line of news. The command is not stored: a resumed night runs the command of its own flag.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Any

import psutil

from nightshift.agents.presets import program_words
from nightshift.campaign.records import Record, Verdict
from nightshift.errors import Interrupted
from nightshift.executors import leftovers
from nightshift.executors.watchdog import MARKER_NAME, ProcessTree
from nightshift.files import as_json
from nightshift.night.state import by_end
from nightshift.signals import blocked
from nightshift.text import clean
from nightshift.waiting import waiting

KEEP, REPEATED_CRASH, AGENT, END = "keep", "repeated crash", "agent unavailable", "end"
LIMIT_SECONDS = 30.0  # of one run of the command
GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
MAX_WAITING = 4  # notifications
_LASTING = (REPEATED_CRASH, AGENT, END)  # events that are worth a wait when the night is over
_STOPPING_SECONDS = 3.0  # for the last notification after Ctrl-C
_SAMPLE_SECONDS = 0.5  # between two looks at the command's processes
_READ_BYTES = 64 * 1024  # of its output, as much as a pipe holds: a command that floods waits until its end


class Notifier:
    """Sends the notifications of one night. Use it as a context manager: on leaving, the last one is waited for."""

    def __init__(self, command: str | None, note: Callable[[str], None], limit_seconds: float = LIMIT_SECONDS) -> None:
        """`command` None: nothing is sent. `note` takes a line of news. UsageError if the program does not exist."""
        fix = "Install it, give its path, or leave --notify out."
        self._words = program_words("--notify", command, fix) if command is not None else ()
        self._note, self._limit_seconds = note, limit_seconds
        self._queue = SimpleQueue[tuple[str, bytes] | None]()
        self._last: tuple[str, bytes] | None = None  # that was sent
        self._is_over, self._cancelled = Event(), Event()
        self._thread = Thread(target=self._work, name="notify", daemon=True)

    def send(self, event: str, message: Mapping[str, Any]) -> None:
        """Queue a notification and return at once. The oldest is dropped when too many wait."""
        if not self._words:
            return
        while self._queue.qsize() >= MAX_WAITING:
            with suppress(Empty):
                if (dropped := self._queue.get_nowait()) is not None:
                    self._drop(dropped[0], f"{MAX_WAITING} others wait")
        self._last = event, as_json(message)
        self._queue.put(self._last)

    def __enter__(self) -> Notifier:
        with blocked():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for a bounded time for the last notification if it matters. Drop the others and leave no process."""
        self._is_over.set()
        self._queue.put(None)
        at_most_seconds = 2 * (self._limit_seconds + GRACE_SECONDS)
        if self._last is None or self._last[0] not in _LASTING:
            at_most_seconds = 0.0
        elif isinstance(error, Interrupted):
            at_most_seconds = _STOPPING_SECONDS
        try:
            with waiting("waiting for the last notification of the night", at_most_seconds):
                self._thread.join(at_most_seconds)
        finally:
            self._cancelled.set()
            self._thread.join(4 * GRACE_SECONDS)

    def _work(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread has to answer signals
        while (item := self._queue.get()) is not None:
            event, message = item
            if self._cancelled.is_set() or (self._is_over.is_set() and item is not self._last):
                self._drop(event, "the night is over")
            elif problem := run(self._words, message, self._limit_seconds, self._cancelled):
                self._note(f"--notify: the notification of {event} failed: {problem}")

    def _drop(self, event: str, why: str) -> None:
        self._note(f"--notify: the notification of {event} is dropped: {why}")


def run(words: Sequence[str], message: bytes, limit_seconds: float, cancelled: Event) -> str | None:
    """Run the command with `message` on stdin, then end all that it started. Returns what went wrong in one line."""
    marker = f"notify-{uuid.uuid4().hex}"
    environment = {**os.environ, MARKER_NAME: marker, **leftovers.mark()}
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the command inherits the mask of this thread
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,  # Ctrl-C in the terminal is not for the command
        )
    except (OSError, ValueError) as error:
        return str(error)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert child.stdin is not None
    assert child.stdout is not None
    tree = ProcessTree(None, lambda process: False)
    tree.markers.add(marker)
    tree.seen.add(psutil.Process(child.pid))
    output, problem, ends_at = b"", None, time.monotonic() + limit_seconds
    try:
        with suppress(BrokenPipeError):  # the command does not read its stdin
            child.stdin.write(message)  # a few kilobytes: a pipe holds them, read or not
            child.stdin.close()
        while child.poll() is None and problem is None:
            tree.sample()
            if cancelled.is_set():
                problem = "the night is over: ended"
            elif time.monotonic() >= ends_at:
                problem = f"no end after {limit_seconds:g} s: ended"
            else:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_SAMPLE_SECONDS)
        os.set_blocking(child.stdout.fileno(), False)  # what the command started may hold it open
        with suppress(BlockingIOError):
            output = os.read(child.stdout.fileno(), _READ_BYTES)
        if problem is None and child.returncode != 0:
            problem = f"exit code {child.returncode}"
    finally:
        left = tree.end(GRACE_SECONDS)
        child.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
    if left:
        problem = f"could not be ended: {', '.join(left)}"
    if problem is None:
        return None
    lines = [clean(line, 200) for line in output.decode(errors="replace").splitlines()]
    return "; its last words: ".join([problem, *[line for line in lines if line][-1:]])


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

"""`nightshift night --notify COMMAND`: a word to who is not there, at a keep, at a crash that repeats, at the end.

The command is the person's, and comes from the flag of this very start: nothing of it is stored, so nobody who writes
in the checkout can have a resumed night run another one. It runs with the head's environment and beside the night, one
at a time (messenger.py). It can neither stop nor delay a night: what fails is a line of news, and who comes while too
many wait is dropped.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from nightshift.entry import isolated
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.files import as_json, read_file
from nightshift.night.messenger import GRACE_SECONDS, LATE_SECONDS, Errand
from nightshift.processes.child import Child
from nightshift.processes.supervise import ProcessGroup
from nightshift.waiting import waiting

LIMIT_SECONDS = 30.0  # of a command
MAX_WAITING = 4  # notices
KEEP, REPEATED_CRASH, END = "keep", "repeated crash", "end"
_LASTING = (REPEATED_CRASH, END)  # what is worth a wait when the night is over
_PROGRAM = str(Path(__file__).with_name("messenger.py"))
_STOPPING_SECONDS = 3.0  # for the last one, where a person wants to stop now
_POLL_SECONDS = 0.05
_MAX_BYTES = 256 * 1024 * 1024  # of a program that is compared


class _Running(NamedTuple):
    event: str
    group: ProcessGroup
    child: Child
    hangs_at: float  # on the monotonic clock: after that it hangs itself


class Notices:
    """Those of one night. Enter it in the main thread; on leaving, the notice of the end is waited for."""

    def __init__(self, command: str | None, note: Callable[[str], None], limit_seconds: float = LIMIT_SECONDS) -> None:
        """UsageError where `command` names no program here. None: nobody is told anything. `note` takes a line of news;
        `limit_seconds`: of one run of the command."""
        self._words = words_of(command) if command is not None else ()
        self._files = {path: _digest(path) for path in map(_file, self._words) if path is not None}
        self._note, self._limit = note, limit_seconds
        self._waiting = deque[tuple[str, bytes]]()
        self._running: _Running | None = None

    def send(self, event: str, message: Mapping[str, Any]) -> None:
        """Have the person told; returns at once. What is dropped is a line of news."""
        if not self._words:
            return
        while len(self._waiting) >= MAX_WAITING:
            self._drop(self._waiting.popleft()[0], f"{MAX_WAITING} others wait")
        self._waiting.append((event, as_json(message)))
        self.look()

    def look(self) -> None:
        """Take note of what has ended, and start the next one. Call it now and then."""
        if self._running is not None:
            event, _, child, hangs_at = self._running
            if child.poll() is None and time.monotonic() < hangs_at:
                return
            cause = "its messenger hung" if child.poll() is None else (child.tail(1) or [child.exit_cause()])[0]
            is_well = child.poll() == 0
            self._end(self._running)
            if not is_well:
                self._note(f"--notify: the notice of {event} failed: {cause}")
        if self._waiting and self._running is None:
            self._start(*self._waiting.popleft())

    def _start(self, event: str, message: bytes) -> None:
        changed = [str(path) for path, digest in self._files.items() if _digest(path) != digest]
        if changed:
            self._note(f"--notify: {changed[0]} is not what it was when the night began: nothing of it is run")
            return
        try:
            self._running = self._started(event, message)
        except (EngineError, OSError, ValueError) as error:  # no process, no temporary folder, no current one
            self._note(f"--notify: the notice of {event} failed: {error}")

    def _started(self, event: str, message: bytes) -> _Running:
        descriptor, log = tempfile.mkstemp(prefix="nightshift-notice-")
        os.close(descriptor)
        group = ProcessGroup(f"notice-{uuid.uuid4().hex}", GRACE_SECONDS + 1.0, outlives=True)
        try:
            child = group.start(
                "notice",
                isolated(_PROGRAM),
                log_path=Path(log),
                env=os.environ,
                cwd=Path.cwd(),
                stdin=subprocess.PIPE,
            )
            assert child.stdin is not None
            words = tuple(map(os.fsencode, self._words))
            with suppress(BrokenPipeError):  # it is dead already, which `look` says
                child.stdin.write(as_json(Errand(words, message, os.fsencode(log), self._limit)))
                child.stdin.close()
        except BaseException:
            group.stop()
            _remove(Path(log))
            raise
        return _Running(event, group, child, time.monotonic() + self._limit + GRACE_SECONDS + 2 * LATE_SECONDS)

    def _end(self, running: _Running) -> None:
        self._running = None
        left = running.group.stop()
        _remove(running.child.log_path)
        if left:
            self._note(f"--notify: not to be ended: {', '.join(left)}")

    def _drop(self, event: str, why: str) -> None:
        self._note(f"--notify: the notice of {event} is dropped: {why}")

    def __enter__(self) -> Notices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The last word is waited for, the end's or else that of a repeated crash: as long as it may take, where nobody
        stops now. What waits besides is dropped. Nothing is left running."""
        last = [each for each in self._waiting if each[0] in _LASTING][-1:]
        for each in self._waiting:
            if each not in last:
                self._drop(each[0], "the night is over")
        self._waiting = deque(last)
        is_last = bool(last) or (self._running is not None and self._running.event in _LASTING)
        at_most = _STOPPING_SECONDS if isinstance(error, Interrupted) else 2 * (self._limit + GRACE_SECONDS)
        ends_at = time.monotonic() + at_most
        try:
            with waiting("waiting for the last notice of the night", at_most):
                while is_last and (self._running or self._waiting) and time.monotonic() < ends_at:
                    self.look()
                    time.sleep(_POLL_SECONDS)
        finally:
            if (running := self._running) is not None:
                self._end(running)
                self._note(f"--notify: the notice of {running.event} was not finished")
            for event, _ in self._waiting:
                self._drop(event, "there was no time left for it")


def words_of(command: str) -> tuple[str, ...]:
    """The words of a command, the program by its path; no shell sees them. UsageError where it is not there."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--notify {command!r} is no command ({error})", "Close its quotes.") from None
    program = shutil.which(words[0]) if words else None
    if program is None:
        cause = f"--notify {command!r}: no program {words[0] if words else ''!r} on PATH"
        raise UsageError(cause, "Install it, give its path, or leave --notify out.")
    return (str(Path(program).absolute()), *words[1:])


def _file(word: str) -> Path | None:
    """The file that a word names, if it does: it may be anything, a script of a thousand characters too."""
    with suppress(OSError):
        return path if (path := Path(word).absolute()).is_file() else None
    return None


def _remove(path: Path) -> None:
    with suppress(OSError):  # its folder is gone, or not ours any more
        path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    """Of the bytes of a file that the command names; empty where it cannot be read, or is too large for that: nobody is
    kept waiting by what was put in its place."""
    try:
        return hashlib.sha256(read_file(os.path.realpath(path), _MAX_BYTES)).hexdigest()
    except OSError:
        return ""

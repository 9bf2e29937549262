"""What people see while they wait: on a terminal one live line, in a pipe a plain line every few seconds.

A thread draws it, whatever the main thread waits for. The thread reads what the runs in flight leave in their folders
and what `waiting` was told. It takes no signal: those are the main thread's.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from queue import Empty

from nightshift.campaign.records import RESULT_NAME, Phase, Progress
from nightshift.cli import output
from nightshift.signals import blocked
from nightshift.waiting import Wait, innermost, news

_FIRST_SECONDS, _TICK_SECONDS = 0.1, 0.5  # before the first word, and between two looks
_PLAIN_SECONDS = 9.0  # between two plain lines: with a tick and a scheduler's delay, less than ten
_LEAST_WIDTH = 20  # columns: of less a line says nothing


class TerminalReporter:
    """Tells on stderr how it goes, from its making until it is closed. One at a time."""

    def __init__(self, what: str = "starting") -> None:
        """`what` is done where nothing says what is waited for."""
        self._what = what
        self._base: Wait | None = None
        self._runs: Mapping[Path, Progress | None] = {}
        self._spoke, self._failed = time.monotonic(), ""
        self._told: set[tuple[Path, Phase | None]] = set()
        while not news.empty():  # of an earlier one
            news.get()
        self._ticker = threading.Thread(target=self._tick, name="live line", daemon=True)
        with blocked():
            self._ticker.start()

    def note(self, text: str) -> None:
        output.print_error(" ".join(text.split("\n")))
        self._spoke = time.monotonic()

    def show(self, readings: Mapping[Path, Progress | None]) -> None:
        """Which runs are in flight, by their folders, and how far they are; None: it waits for its turn."""
        self._what = "looking at what came of it"
        self._runs = readings  # another one each time: the ticker goes through the old one

    def close(self) -> None:
        """End the ticker, and the live line with it. Safe to call twice."""
        news.put(None)
        self._ticker.join()
        output.draw("")

    def _tick(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # else the main thread would sleep on
        seconds = _FIRST_SECONDS
        while True:
            try:
                told = news.get(timeout=seconds)
            except Empty:
                try:
                    self._draw()
                except Exception as error:  # it reads folders where agents can write; signals are answered all the same
                    self._runs = {}
                    if self._failed != (failed := f"the live line cannot be drawn: {type(error).__name__}: {error}"):
                        self._failed = failed
                        self.note(failed)
                seconds = _TICK_SECONDS
            else:
                if told is None:
                    return
                self.note(told)

    def _draw(self) -> None:
        wait = innermost()
        runs = {folder: reading for folder, reading in self._runs.items() if not (folder / RESULT_NAME).exists()}
        if wait is not None or runs:
            self._base = None
        else:
            wait = self._base = self._base or Wait(lambda: self._what)
        if output.is_terminal() and (width := output.terminal_columns("stderr") or 0) >= _LEAST_WIDTH:
            output.draw(live_line(wait, runs, width - 1))
            return
        # In a pipe: what a run began, and every few seconds how far all is. A refusal stays one line.
        is_due = time.monotonic() - self._spoke >= _PLAIN_SECONDS
        if wait is not None and is_due:
            self.note(str(wait))
        for folder, reading in runs.items():
            if is_due or (folder, reading and reading.phase) not in self._told:
                self.note(_in_words(folder, reading))
        self._told = {(folder, reading.phase if reading else None) for folder, reading in runs.items()}


def _in_words(folder: Path, reading: Progress | None, *, is_short: bool = False) -> str:
    from nightshift.cli.running import describe_run, short_name

    return describe_run(folder, reading, short_name(folder) if is_short else "")


def live_line(wait: Wait | None, runs: Mapping[Path, Progress | None], width: int) -> str:
    """One line of at most `width` cells: what is waited for first, then the runs."""
    line = "  |  ".join(_in_words(*run) for run in runs.items()) if wait is None else ""
    if not line or len(line) > width:
        line = "  |  ".join(
            [*map(str, filter(None, [wait])), *(_in_words(*run, is_short=True) for run in runs.items())]
        )
    plain = line.encode("ascii", "replace").decode()  # a foreign name may be two cells wide, or more
    return plain if len(plain) <= width else plain[: max(width - 3, 0)] + "..."


@contextmanager
def reporting(what: str = "starting", told: str | None = None) -> Iterator[TerminalReporter]:
    """Show progress, and raise Interrupted on a signal that stops; `told`: what is said then."""
    from nightshift.executors.process import STOPPING, interruptible

    with closing(TerminalReporter(what)) as reporter, interruptible(told or STOPPING):
        yield reporter


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """For a command that takes its time and says nothing meanwhile: the live line says it."""
    with reporting(what, "it only looked; nothing was changed"):
        yield

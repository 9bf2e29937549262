"""How a person stops a night: once to let the run in flight finish, twice to stop now."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import FrameType

from nightshift.engines import ProgressCallback
from nightshift.errors import Interrupted
from nightshift.processes.supervise import STOP_SIGNALS
from nightshift.records import Progress, Record, Side
from nightshift.setup import Lab, Reporter

FAR = datetime(9000, 1, 1, tzinfo=UTC)  # later than any --until


class Brake:
    """Two-stage Ctrl-C. `asked`: the first one came, so nothing new is to be started."""

    def __init__(self) -> None:
        self.asked = False
        self._raised = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take over SIGINT, SIGTERM and SIGHUP; those that the caller ignores (nohup) stay ignored.

        The second SIGINT, or the first of the others, raises Interrupted in the main thread; what comes after
        that is ignored, so that it cannot cut short the clean-up.
        """
        handled = [number for number in STOP_SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        previous = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def applied_to(self, lab: Lab) -> Lab:
        """The lab as an experiment sees it: once asked to stop, there is no time for another run after this one."""
        watched = _Watched(lab.reporter, self)
        return replace(lab, reporter=watched, now=lambda: FAR if self.asked and watched.has_begun else lab.now())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raised:
            return
        if number == signal.SIGINT and not self.asked:
            self.asked = True  # nothing is printed here: the signal may have cut into a print
            return
        self._raised = True
        raise Interrupted(f"stopped by {signal.Signals(number).name}")


class _Watched:
    """A reporter that knows whether a run has begun, and tells on the live line that a stop was asked for."""

    def __init__(self, reporter: Reporter, brake: Brake) -> None:
        self.has_begun = False
        self._reporter = reporter
        self._brake = brake
        self._has_told = False

    def note(self, text: str) -> None:
        self._reporter.note(text)

    def progress(self, record: Record, run_index: int, side: Side) -> ProgressCallback:
        self.has_begun = True
        inner = self._reporter.progress(record, run_index, side)

        def report(reading: Progress) -> None:
            if self._brake.asked and not self._has_told:
                self._has_told = True
                self._reporter.note("Ctrl-C: the run in flight is the last one; once more to stop now")
            inner(reading)

        return report

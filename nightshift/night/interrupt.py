"""How a person stops a night: once to let the run in flight finish, twice to stop now."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from nightshift.errors import Interrupted
from nightshift.processes.supervise import handling


class Interrupt:
    """Two-stage Ctrl-C. `asked`: the first one came, so nothing new is to be started."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.asked = False
        self._note = note
        self._has_told = False
        self._raised = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take over SIGINT, SIGTERM and SIGHUP.

        The second SIGINT, or the first of the others, raises Interrupted in the main thread; what comes after
        that is ignored, so that it cannot cut short the clean-up.
        """
        with handling(self._handle):
            yield

    def tell(self) -> bool:
        """`asked`; says so on the live line, once, while a run is in flight."""
        if self.asked and not self._has_told:
            self._has_told = True
            self._note("Ctrl-C: the run in flight is the last one; once more to stop now")
        return self.asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raised:
            return
        if number == signal.SIGINT and not self.asked:
            self.asked = True  # nothing is printed here: the signal may have cut into a print
            return
        self._raised = True
        raise Interrupted(f"stopped by {signal.Signals(number).name}")

"""How a person stops a night: once to let the run in flight finish, twice to stop now."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager

from nightshift.processes.supervise import interruptible


class Interrupt:
    """Two-stage Ctrl-C. `asked`: the first one came, so nothing new is to be started."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.asked = False
        self._note = note
        self._has_told = False

    def installed(self) -> AbstractContextManager[None]:
        """The second SIGINT, or the first of the other signals that stop, raises Interrupted in the main thread."""
        return interruptible(self._is_first)

    def tell(self) -> bool:
        """`asked`; says so on the live line, once, while a run is in flight."""
        if self.asked and not self._has_told:
            self._has_told = True
            self._note("Ctrl-C: the run in flight is the last one; once more to stop now")
        return self.asked

    def _is_first(self, number: int) -> bool:
        is_first = number == signal.SIGINT and not self.asked
        self.asked |= is_first  # nothing is printed here: the signal may have cut into a print
        return is_first

"""How a person stops a night: once to let the run in flight finish, twice to stop now."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager

from nightshift.processes.supervise import interruptible
from nightshift.waiting import news


class Interrupt:
    """Two-stage Ctrl-C. `asked`: the first one came, so nothing new is to be started."""

    def __init__(self) -> None:
        self.asked = False

    def installed(self) -> AbstractContextManager[None]:
        """The second SIGINT, or the first of the other signals that stop, raises Interrupted in the main thread."""
        return interruptible(is_noted=self._is_first)

    def _is_first(self, number: int) -> bool:
        is_first = number == signal.SIGINT and not self.asked
        self.asked |= is_first
        if is_first:
            news.put("Ctrl-C: nothing new is begun, and what is in flight is finished; once more to stop now")
        return is_first

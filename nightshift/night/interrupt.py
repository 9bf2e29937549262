"""How a person stops a night: once to let the run in flight finish, twice to stop now."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from pathlib import Path

from nightshift.processes.supervise import interruptible
from nightshift.waiting import news


class Interrupt:
    """Two-stage Ctrl-C. `asked`: the first one came, so nothing new is to be started. A `stop_file` says the same."""

    def __init__(self, stop_file: Path) -> None:
        self.asked, self._stop_file = False, stop_file

    @property
    def has_file(self) -> bool:
        """Whether the file lies there now."""
        return self._stop_file.exists()

    @property
    def signs(self) -> tuple[bool, bool]:
        """What a night that waits has to look at anew when it changes."""
        return self.asked, self.has_file

    def installed(self) -> AbstractContextManager[None]:
        """The second SIGINT, or the first of the other signals that stop, raises Interrupted in the main thread."""
        return interruptible(is_noted=self._is_first)

    def _is_first(self, number: int) -> bool:
        is_first = number == signal.SIGINT and not self.asked
        self.asked |= is_first
        if is_first:
            news.put("Ctrl-C: nothing new is begun, and what is in flight is finished; once more to stop now")
        return is_first

"""A process that somebody here started, how it ended, and the last words of its log."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from nightshift.files import open_regular
from nightshift.text import ANSI, clean

TAIL_BYTES = 64 * 1024
TAIL_LINE_LENGTH = 200


class Child(subprocess.Popen[bytes]):
    """A process that a group started: as Popen, with the name and the log that `start` gave it."""

    name: str
    log_path: Path

    def exit_cause(self) -> str:
        """How it ended, for an error line: `exit code 1`, `killed by SIGKILL`, `still running`."""
        code = self.poll()
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        return f"killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"

    def tail(self, num_lines: int, line_length: int = TAIL_LINE_LENGTH, num_bytes: int = TAIL_BYTES) -> list[str]:
        """As `tail` of its log."""
        return tail(self.log_path, num_lines, line_length, num_bytes)


def tail(log_path: Path, num_lines: int, line_length: int = TAIL_LINE_LENGTH, num_bytes: int = TAIL_BYTES) -> list[str]:
    """The last lines that say something in the last `num_bytes` of a log, as plain text of so many characters.

    Of a line that was overwritten (progress bars) the last state. Empty if there is no log.
    """
    try:
        with open_regular(log_path) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - num_bytes))
            text = log.read(num_bytes).decode(errors="replace")
    except OSError:
        return []
    shown = (ANSI.sub("", line).rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    lines = (clean(line, line_length) for line in shown)
    return [line for line in lines if line][-num_lines:]

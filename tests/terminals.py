"""A real terminal for whole processes: a pseudo-terminal of 80 columns, and what was written on it."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

from tests.waiting import HANG_SECONDS

CONTROLS = {chr(code) for code in (*range(32), *range(127, 160))} - {"\r", "\n"}


class Terminal:
    """A command in front of a person: its three streams are the terminal."""

    def __init__(self, command: list[str], cwd: Path, **variables: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        self.process = subprocess.Popen(
            command, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**environment, "TERM": "xterm-256color", "TZ": "Europe/Berlin", **variables},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self.said = ""

    def look(self, seconds: float = 0.1) -> bool:
        """Read what comes within so many seconds; False at the end of the process."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # Linux: nobody has it open any more
            data = b""
        text = data.decode(errors="replace")
        self.said += text
        return bool(data)

    def until(self, is_there: Callable[[], object], what: str) -> None:
        """Read on until that is true. AssertionError if it hangs, or ends before."""
        ends_at = time.monotonic() + 4 * HANG_SECONDS
        while not is_there():
            assert self.look(), f"ended before {what}: {self.said!r}"
            assert time.monotonic() < ends_at, f"{what} did not come: {self.said!r}"

    def shows(self, words: str) -> None:
        """Read on until it has said these words."""
        self.until(lambda: words in " ".join(self.said.split()), words)

    def press(self, key: bytes) -> None:
        """As a person does: b"\\x03" is Ctrl-C."""
        os.write(self._ours, key)

    def finish(self) -> int:
        """Read to the end; the exit code."""
        while self.look():
            pass
        os.close(self._ours)
        return self.process.wait()

"""What people see while they wait, on a real terminal: a display that is redrawn, and no code but its own."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.errors import ExitCode
from tests.stand_ins import fault
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[2]
BASELINE = b"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 3e-6\n"
TICKS = 3  # so often a line has to come anew, each time with more seconds
# The codes of the live display and its bar: erase a line, go up, show the cursor, colours.
CODES = re.compile(r"\x1b\[(?:\?25[hl]|2K|1A|(?:0|1|38;5;\d+)m)")
CONTROLS = {chr(code) for code in (*range(32), *range(127, 160))} - {"\r", "\n"}


class Terminal:
    """A command in front of a person: its three streams are the terminal."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        environment |= {"PYTHONIOENCODING": "utf-8"}
        self.process = subprocess.Popen(
            command, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**environment, "TERM": "xterm-256color"},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self.said = ""

    @property
    def text(self) -> str:
        """What it said, without the codes of the live display."""
        return CODES.sub("", self.said)

    def look(self) -> bool:
        """Read what comes within a moment; False at the end of the process."""
        if not select.select([self._ours], [], [], 0.1)[0]:
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
        self.until(lambda: words in " ".join(self.text.split()), words)

    def press_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def finish(self) -> int:
        """Read to the end; the exit code. No code but those of the live display came, and no line of it wrapped."""
        while self.look():
            pass
        os.close(self._ours)
        assert not {*self.text} & CONTROLS
        assert self.said.count("\x1b[?25h") >= self.said.count("\x1b[?25l")
        text = self.text.replace("^C", "").replace("\r\n", "\n")  # the terminal's echo lands on a line
        drawn = [line.split("\r")[1:-1] for line in text.split("\n")]
        assert max((len(part.rstrip()) for parts in drawn for part in parts), default=0) <= 80
        return self.process.wait()


def run_py(root: Path) -> Terminal:
    command = [sys.executable, str(ROOT / "tests" / "stand_in_run.py"), str(root), "--engine", "trl"]
    return Terminal([*command, "--budget-seconds", "2"], root)


def ticks(terminal: Terminal, words: str) -> None:
    """Read until the line with these words has come several times, with growing seconds."""

    def seconds() -> list[int]:
        return [int(text) for text in re.findall(rf"\r[━╸╺ ]*{re.escape(words)}[^\r]*?(\d+) s\b", terminal.text)]

    terminal.until(lambda: len({*seconds()}) >= TICKS, f"ticks of {words!r}")
    assert seconds() == sorted(seconds())


@pytest.mark.slow
def test_a_run_and_wait_tick_and_ctrl_c_ends_only_what_it_is_for(root: Path) -> None:
    assert run_py(root).finish() == ExitCode.MEASURED
    fault(root, "hold", once=False)
    (root / "train.toml").write_bytes(BASELINE.replace(b"3e-6", b"4e-6"))
    terminal = run_py(root)
    ticks(terminal, "experiment 0002: training, step")
    assert re.search(r"━ experiment 0002: training, step \d+, reward 0\.\d\d, \d+ s, \d+ CPU s left", terminal.text)
    wait = Terminal(["nightshift", "wait"], root)
    ticks(wait, "experiment 0002: training, step")
    wait.press_ctrl_c()
    wait.shows("stopped by SIGINT. The run continues.")
    assert (wait.finish(), terminal.process.poll()) == (ExitCode.INTERRUPTED, None)
    terminal.press_ctrl_c()
    terminal.shows("ending 1 run (Ctrl-\\ does not wait)")
    (root / "stand-in.json").unlink()
    assert terminal.finish() == ExitCode.INTERRUPTED
    assert " ".join(terminal.text.split()).endswith("stopped by SIGINT")

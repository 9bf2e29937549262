"""What people see while they wait: on a terminal a line that is rewritten, in a pipe a plain line every 30 seconds.

It is looked at anew when something else is waited for, and by the loops that wait for runs.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from nightshift.campaign.records import JOB_NAME, Job, Phase, Progress
from nightshift.cli import output
from nightshift.errors import UsageError
from nightshift.files import read_json
from nightshift.text import clean
from nightshift.waiting import lasted, waits, watchers

_PLAIN_SECONDS = 30.0  # between two plain lines


class TerminalReporter:
    """Shows progress on stderr until it is closed. One at a time."""

    def __init__(self, what: str = "starting") -> None:
        """`what` is shown while nothing is waited for."""
        self._what, self._spoke = what, time.monotonic()
        self._runs: Mapping[Path, Progress | None] = {}
        watchers[:] = [self._look]
        self._look()

    def note(self, text: str) -> None:
        output.print_error(" ".join(text.split("\n")))
        self._spoke = time.monotonic()

    def show(self, readings: Mapping[Path, Progress | None]) -> None:
        """Show the progress of the runs in flight, by their folders; None: it waits for its turn."""
        self._what, self._runs = "looking at what came of it", readings
        self._look()

    def close(self) -> None:
        """End the live line. Safe to call twice."""
        watchers.clear()
        output.draw("")

    def _look(self) -> None:
        parts = [wait() for wait in waits[-1:]] + [describe_run(*run) for run in self._runs.items()]
        line = "  |  ".join(parts or [self._what])
        if output.is_terminal():
            output.draw(line)
        elif time.monotonic() - self._spoke >= _PLAIN_SECONDS:
            self.note(line)


def describe_run(folder: Path, reading: Progress | None, name: str = "") -> str:
    """What a run does, for how long it has run, and what is left of its budget. `reading`: how far it is."""
    job, began = None, time.time()
    with suppress(UsageError, OSError):  # damaged: less is shown
        began = (folder / JOB_NAME).stat().st_mtime
        job = read_json(folder / JOB_NAME, Job, "")
    name = name or ("experiment " if folder.name.isdigit() else "") + folder.name.replace("-", " ")
    place = f"{clean(reading.slot, 40)}: " if reading and reading.slot else ""
    lasts, left = lasted(time.time() - began), ""
    if reading is None:
        what = "waiting to start"
    elif reading.phase is Phase.STARTING:
        what = "starting"
    elif reading.phase is Phase.EVALUATING:
        environments = job.rules.scored if job else ()
        num = 0 if any(e.is_game for e in environments) else sum(e.num_validation for e in environments)
        what = f"evaluating {reading.num_done or 0:,}{f' of {num:,}' if num else ' examples'}"
    else:
        what = f"training, step {reading.num_steps}"
        what += "" if reading.reward is None else f", reward {reading.reward:.2f}"
        left = "" if reading.seconds_left is None else f", {max(reading.seconds_left, 0.0):.0f} s of the budget left"
    note = f", {clean(reading.note, 80)}" if reading and reading.note else ""
    return f"{name}: {place}{what}, {lasts}{left}{note}"


@contextmanager
def reporting(what: str = "starting", told: str = "") -> Iterator[TerminalReporter]:
    """Show progress, and raise Interrupted on a signal that stops; `told`: a sentence on what the signal leaves."""
    from nightshift.executors.process import interruptible

    with closing(TerminalReporter(what)) as reporter, interruptible(told):
        yield reporter

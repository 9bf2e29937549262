"""The progress of runs and waits: on a terminal a display with a bar per run, in a pipe a plain line every 30 seconds.
It is updated when a wait begins or ends, and by the loops that wait for runs."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from nightshift.campaign.records import JOB_NAME, Job, Phase, Progress
from nightshift.cli import output
from nightshift.cli.output import Line
from nightshift.errors import UsageError
from nightshift.files import read_json
from nightshift.text import clean
from nightshift.waiting import lasted, waits, watchers

_PLAIN_SECONDS = 30.0  # between two plain lines


class TerminalReporter:
    """Shows progress on stderr until it is closed. One at a time."""

    def __init__(self, what: str = "starting") -> None:
        """`what` is shown while there is neither a wait nor a run."""
        self._what, self._spoke = what, time.monotonic()
        self._runs: Mapping[Path, Progress | None] = {}
        watchers[:] = [self._look]
        self._look()

    def note(self, text: str) -> None:
        output.print_error(" ".join(text.split("\n")))
        self._spoke = time.monotonic()

    def show(self, readings: Mapping[Path, Progress | None], idle: str = "reading the result and deciding") -> None:
        """Show the progress of the runs in flight, by their folders. None: the run waits for its turn. `idle`: what is
        shown if no run is in flight."""
        self._what, self._runs = idle, readings
        self._look()

    def close(self) -> None:
        """End the live display. Safe to call twice."""
        watchers.clear()
        output.draw()

    def _look(self) -> None:
        lines: list[Line] = [(wait(), None) for wait in waits[-1:]]
        for folder, reading in self._runs.items():
            text, share = describe_run(folder, reading)
            name = f"experiment {folder.name}" if folder.name.isdigit() else folder.name.replace("-", ", seed ")
            lines.append((f"{name}: {text}", share))
        lines = lines or [(self._what, None)]
        if output.is_terminal():
            output.draw(lines)
        elif time.monotonic() - self._spoke >= _PLAIN_SECONDS:
            self.note("  |  ".join(text for text, _ in lines))


def describe_run(folder: Path, reading: Progress | None) -> Line:
    """Return a line with what a run does, for how long it has run, and how much of its budget is left; and the finished
    share of its budget or its evaluation. `reading`: the run's own report."""
    job, began, share = None, time.time(), None
    with suppress(UsageError, OSError):  # of a damaged job less is shown
        began = (folder / JOB_NAME).stat().st_mtime
        job = read_json(folder / JOB_NAME, Job, "")
    place = f"{clean(reading.slot, 40)}: " if reading and reading.slot else ""
    lasts, left = lasted(time.time() - began), ""
    if reading is None:
        what = "not started yet"
    elif reading.phase is Phase.STARTING:
        what = "starting"
        left = f" of at most {lasted(job.deadline_seconds)} for the whole run" if job else ""
    elif reading.phase is Phase.EVALUATING:
        environments, num_done = job.rules.scored if job else (), reading.num_done or 0
        num = 0 if any(e.is_game for e in environments) else sum(e.num_validation for e in environments)
        what = f"evaluating {num_done:,}{f' of {num:,}' if num else ' examples'}"
        share = num_done / num if num else None
    else:
        what = f"training, step {reading.num_steps}"
        what += "" if reading.reward is None else f", reward {reading.reward:.2f}"
        if reading.seconds_left is not None:
            seconds_left = max(reading.seconds_left, 0.0)
            left = f", {seconds_left:.0f}{' CPU' if job and job.rules.budget_clock == 'cpu' else ''} s left"
            share = 1 - seconds_left / job.rules.budget_seconds if job else None
    note = f", {clean(reading.note, 80)}" if reading and reading.note else ""
    return f"{place}{what}, {lasts}{left}{note}", share


@contextmanager
def reporting(what: str = "starting", after_stop: str = "") -> Iterator[TerminalReporter]:
    """Show progress, and raise Interrupted on a signal that stops. `after_stop`: a sentence on what still runs then."""
    from nightshift.executors.process import interruptible

    with closing(TerminalReporter(what)) as reporter, interruptible(after_stop):
        yield reporter

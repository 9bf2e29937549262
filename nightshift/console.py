"""The only module that prints: the summary block on stdout, everything else on stderr.

On a terminal the live line is rich's; in a pipe it is a plain line every few seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from nightshift.campaign.results import figures
from nightshift.engines import ProgressCallback
from nightshift.errors import NightshiftError
from nightshift.files import write_atomically
from nightshift.records import Phase, Progress, Record, Side

_PLAIN_INTERVAL_SECONDS = 10.0
_STATUS_INTERVAL_SECONDS = 1.0


class TerminalReporter:
    """Tells on stderr how an experiment goes, and leaves the last reading in `runs/NNNN/progress.json`."""

    def __init__(self, run_dir: Callable[[int], Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._run_dir = run_dir
        self._clock = clock
        self._live_line = False

    def note(self, text: str) -> None:
        """One line of news on stderr."""
        self._end_line()
        self._console.print(printable(text), markup=False, soft_wrap=True)

    def progress(self, record: Record, run_index: int, side: Side) -> ProgressCallback:
        """A callback for the live line of one run; also writes progress.json for `nightshift status`."""
        started = self._clock()
        last_plain, last_status, last_phase = float("-inf"), float("-inf"), None
        head = f"{record.number:04d} run {run_index} ({side})"
        self.note(f"{head}: starting")

        def report(reading: Progress) -> None:
            nonlocal last_plain, last_status, last_phase
            now = self._clock()
            line = f"{head}: {_reading(reading)}"
            if self._console.is_terminal:
                self._console.file.write(f"\r\x1b[2K{line[: self._console.width - 1]}")
                self._console.file.flush()
                self._live_line = True
            elif reading.phase is not last_phase or now - last_plain >= _PLAIN_INTERVAL_SECONDS:
                self._console.file.write(line + "\n")
                self._console.file.flush()
                last_plain = now
            if reading.phase is not last_phase or now - last_status >= _STATUS_INTERVAL_SECONDS:
                status = {"run": run_index, "side": side, "line": _reading(reading), "seconds": now - started}
                with suppress(OSError):  # a full disk ends the run where it matters, not here
                    write_atomically(self._run_dir(record.number) / "progress.json", json.dumps(status).encode())
                last_status = now
            last_phase = reading.phase

        return report

    def close(self) -> None:
        """End the live line."""
        self._end_line()

    def _end_line(self) -> None:
        if self._live_line:
            self._console.file.write("\n")
            self._live_line = False


def _reading(p: Progress) -> str:
    parts = [p.phase.value]
    if p.phase is Phase.EVALUATING:
        parts.append(f"{p.num_done or 0} examples done")
    else:
        parts.append(f"step {p.num_steps}")
        if p.reward is not None:
            parts.append(f"reward {p.reward:.3f}")
    if p.seconds_left is not None:
        parts.append(f"{max(p.seconds_left, 0):.0f} s left")
    return "  ".join(parts)


def summary(record: Record) -> str:
    """The block that agents grep: `key: value` lines; not measured is an empty value."""
    values = figures(record)
    metric = f"{record.rules_name.split('-')[0]}_pass1"
    lines = (
        ("eval_score", _number(values["eval_score"], ".6f")),
        ("eval_stderr", _number(values["eval_stderr"], ".6f")),
        (metric, _number(values["eval_score"], ".6f")),
        ("incumbent_score", _number(values["incumbent_score"], ".6f")),
        ("delta", _number(values["delta"], "+.6f")),
        ("p_better", _number(values["p_better"], ".2f")),
        ("decision", record.status),
        ("why", values["why"] or ""),
        ("reward_mean", _number(values["reward_mean"], ".6f")),
        ("num_steps", _number(values["num_steps"], ".0f")),
        ("num_runs", str(values["num_runs"])),
        ("training_seconds", _number(values["training_seconds"], ".1f")),
        ("total_seconds", _number(values["total_seconds"], ".1f")),
        ("peak_memory_gb", _number(values["memory_gb"], ".2f")),
        ("run", values["run"]),
        ("changes", "; ".join(record.diff)),
        ("unused_keys", ", ".join(record.unused_keys)),
        ("settled", record.settled or ""),
        *(("health", finding) for finding in (record.health or "").splitlines()),
    )
    return "---\n" + "".join(f"{key + ':':18}{printable(value)}".rstrip() + "\n" for key, value in lines)


def dry_run(record: Record, rules_name: str, starts: Sequence[str]) -> str:
    """What an experiment would run, without running it; `starts` is what the engine would start."""
    lines = [f"rules:    {rules_name} {record.rules_hash}", f"against:  {_against(record)}"]
    lines += [f"change:   {line}" for line in record.diff] or ["change:   none"]
    lines += [f"unused:   {key}" for key in record.unused_keys]
    return "\n".join(printable(line) for line in (*lines, *starts))


def _against(record: Record) -> str:
    return "nothing: this is the baseline" if record.parent is None else f"experiment {record.parent:04d}"


def print_summary(record: Record) -> None:
    """The summary block on stdout."""
    print(summary(record), end="", flush=True)


def print_text(text: str) -> None:
    """Plain text on stdout."""
    print(text, flush=True)


def print_error(error: NightshiftError) -> None:
    """One line on stderr: cause, then fix."""
    try:
        Console(stderr=True, highlight=False).print(printable(str(error)), markup=False, soft_wrap=True)
    except OSError:
        # stderr is a file on the very disk that is full: the exit code has to say it, and the flush at the
        # interpreter's end must not replace that by 120.
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def printable(text: str) -> str:
    """Hostile text cannot move the cursor, forge lines or end the block."""
    return "".join(character if character.isprintable() else " " for character in text).rstrip()

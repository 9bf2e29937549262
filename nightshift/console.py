"""The only module that prints: the summary block on stdout, everything else on stderr.

On a terminal there is a live line; in a pipe it is a plain line every few seconds.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nightshift.campaign.results import column_of, figures
from nightshift.errors import ExitCode, NightshiftError
from nightshift.records import Phase, Progress, Record
from nightshift.text import clean

_PLAIN_INTERVAL_SECONDS = 10.0
_MAX_PLACE = 40  # characters
_deaf: set[str] = set()  # stdout and stderr, once they did not take what was said


class TerminalReporter:
    """Tells on stderr how an experiment goes."""

    def __init__(self) -> None:
        self._has_live_line = False
        self._last: dict[Path, tuple[Phase, float]] = {}  # what was shown of each run in flight, and when

    def note(self, text: str) -> None:
        """One line of news on stderr."""
        self.close()
        _say("stderr", printable(text))

    def show(self, readings: Mapping[Path, Progress]) -> None:
        """How far the runs in these folders are: on a terminal the live line, in a pipe a line now and then."""
        lines = {f: f"{f.parent.name} {f.name.replace('-', ' ')}: {reading_text(p)}" for f, p in readings.items()}
        if lines and sys.stderr is not None and sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            _say("stderr", f"\r\x1b[2K{'  |  '.join(lines.values())[: width - 1]}", end="")
            self._has_live_line = True
            return
        for folder, reading in readings.items():
            phase, when = self._last.get(folder, (None, 0.0))
            if reading.phase is not phase or time.monotonic() - when >= _PLAIN_INTERVAL_SECONDS:
                _say("stderr", lines[folder])
                self._last[folder] = reading.phase, time.monotonic()

    def close(self) -> None:
        """End the live line."""
        if self._has_live_line:
            _say("stderr", "")
            self._has_live_line = False


def reading_text(p: Progress) -> str:
    """One reading of the live line in words."""
    parts = [*([clean(p.place, _MAX_PLACE)] if p.place else []), p.phase.value]
    if p.phase is Phase.EVALUATING:
        parts.append(f"{p.num_done or 0} examples done")
    elif p.phase is Phase.TRAINING:
        parts.append(f"step {p.num_steps}")
        if p.reward is not None:
            parts.append(f"reward {p.reward:.3f}")
    if p.seconds_left is not None:
        parts.append(f"{max(p.seconds_left, 0):.0f} s left")
    return "  ".join(parts)


def summary(record: Record, chain: str) -> str:
    """The block that agents grep: `key: value` lines; not measured is an empty value. `chain`: its head."""
    values = figures(record)
    scores = record.environment_scores or dict.fromkeys(record.environments[:1], values["eval_score"])
    games = record.evaluations[-1].figures if record.evaluations else {}
    lines = (
        ("eval_score", _number(values["eval_score"], ".6f")),
        ("eval_stderr", _number(values["eval_stderr"], ".6f")),
        *((column_of(name), _number(score, ".6f")) for name, score in scores.items()),
        ("strict_score", _number(values["strict_score"], ".6f")),
        *((f"{name}_{what}", f"{value:.4g}") for name, game in games.items() for what, value in game.items()),
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
        *([("base", ", ".join(f"{number:04d}" for number in record.base))] if record.base else []),
        *(("scaled", line) for line in record.scaled),
        ("unused_keys", f"{len(record.unused_keys)}: {', '.join(record.unused_keys)}" if record.unused_keys else ""),
        ("settled", record.settled or ""),
        *([("chain", chain)] if chain else []),
        *(("health", finding) for finding in (record.health or "").splitlines()),
    )
    return "\n".join(["---", *(f"{key + ': ':18}{printable(value)}".rstrip() for key, value in lines)])


def dry_run(record: Record, starts: Sequence[str]) -> str:
    """What an experiment would run, without running it; `starts` is what the engine would start."""
    against = "nothing: this is the baseline" if record.parent is None else f"experiment {record.parent:04d}"
    lines = [f"rules:    {record.rules_name} {record.rules_hash}", f"against:  {against}"]
    lines += [f"change:   {line}" for line in record.diff] or ["change:   none"]
    lines += [f"scaled:   {line}" for line in record.scaled]
    lines += [f"unused:   {key}" for key in record.unused_keys]
    return "\n".join(printable(line) for line in (*lines, *starts))


def print_text(text: str) -> None:
    """Plain text on stdout."""
    _say("stdout", text)


def print_error(error: NightshiftError | str) -> None:
    """One line on stderr: cause, then fix; or what another process said there."""
    _say("stderr", str(error))


def told(code: Any) -> Any:
    """The exit code, but UNSAID for a success of which stdout or stderr did not take all that was said."""
    return ExitCode.UNSAID if _deaf and code in (None, ExitCode.MEASURED) else code


def _say(name: str, text: str, end: str = "\n") -> None:
    """Print on stdout or stderr, whatever they are: closed, a pipe without a reader, on a full disk, of few characters.

    What one has refused once is given nothing more: the flush at the interpreter's end would make the exit code 120.
    """
    stream = getattr(sys, name)
    try:
        if stream is None:  # it was closed when this process began
            raise BrokenPipeError
        encoding = stream.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, end=end, flush=True)
    except (OSError, ValueError):
        _deaf.add(name)
        setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def printable(text: str) -> str:
    """Hostile text cannot move the cursor, forge lines or end the block."""
    return "".join(character if character.isprintable() else " " for character in text).rstrip()

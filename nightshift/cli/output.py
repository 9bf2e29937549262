"""The only module that prints: results on stdout, everything else on stderr.

Nothing here has an escape code or a colour. The live line is drawn by a carriage return and blanks, on terminals only.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from nightshift.agents.notebook import compare_prediction
from nightshift.campaign.records import NOT_ISOLATED, Outcome, Record, percent
from nightshift.campaign.results import UNDECIDED, column_of, decisions_text, row
from nightshift.errors import NightshiftError
from nightshift.text import ANSI

_NO_GRADIENT = f"{Outcome.NO_GRADIENT}: training ended early, because no gradient was left; its weights were scored"
_NEXT = 'edit train.toml, then: uv run run.py -m "<hypothesis>: <prediction>"; or: uv run nightshift night --agent NAME'
_OPTIONAL = ("outcome", "prediction", "starts", "rider", "agent", "next", "train.toml")  # no line if there is none
_drawn = ""  # what stands on the live line


def summary(record: Record) -> str:
    """The block that agents grep: `key: value` lines; not measured is an empty value."""
    values = row(record, {}).cells
    scores = record.environment_scores or dict.fromkeys(record.environments[:1], record.score)
    games = record.evaluation.figures if record.evaluation else {}
    outcome = record.result.training.outcome if record.result else None

    def figures(*names: str, spec: str = ".6f") -> list[tuple[str, str]]:
        return [(name, _number(values[name], spec)) for name in names]

    lines = (
        *figures("eval_score", "eval_stderr"),
        *((column_of(name), _number(score, ".6f")) for name, score in scores.items()),
        *figures("strict_score"),
        *((f"{name}_{what}", f"{value:.4g}") for name, game in games.items() for what, value in game.items()),
        *figures("incumbent_score"),
        *figures("effect_at_decision", spec="+.6f"),
        ("p_helps", "" if values["p_helps"] is None else f"{percent(values['p_helps']) / 100:.2f}"),
        ("verdict", values["verdict"] or UNDECIDED),
        ("outcome", _NO_GRADIENT if outcome is Outcome.NO_GRADIENT else ""),
        ("why", record.why),
        ("prediction", compare_prediction(record) if record.proposal.prediction else ""),
        *figures("reward_mean"),
        *figures("num_steps", spec=".0f"),
        *figures("training_seconds", "total_seconds", spec=".1f"),
        ("peak_memory_gb", _number(values["memory_gb"], ".2f")),
        ("run", f"{record.number:04d}"),
        ("starts", record.starts),
        ("changes", values["changes"]),
        ("rider", values["rider"]),
        *(("scaled", line) for line in record.scaled),
        ("unused_keys", f"{len(record.unused_keys)}: {', '.join(record.unused_keys)}" if record.unused_keys else ""),
        ("git", record.git_action or ""),
        ("agent", "" if record.proposal.is_isolated else NOT_ISOLATED),
        *(("health", finding) for finding in (record.health or "").splitlines()),
        ("next", _NEXT if record.is_keep and record.parent is None else ""),
        ("train.toml", decisions_text(d for d in record.moved if f"{d.action} {d.change.name}" in record.commits)),
    )
    shown = [(key, value) for key, value in lines if value or key not in _OPTIONAL]
    return "\n".join(["---", *(printable(f"{key + ': ':18}{value}") for key, value in shown)])


def print_text(*lines: str) -> None:
    """Print on stdout: results."""
    draw("")
    _write("stdout", "\n".join(map(printable, "\n".join(lines).split("\n"))))


def print_error(error: NightshiftError | str) -> None:
    """Print on stderr: an error, progress, or the output of another process."""
    draw("")
    _write("stderr", "\n".join(map(printable, str(error).split("\n"))))


def print_found(document: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print what a command found: with --json `document`, a Struct or mapping, as one line of ASCII, in which null
    replaces what is no finite number; else lines for people."""
    if as_json:
        plain = json.dumps(msgspec.to_builtins(document, enc_hook=_plain))
        lines = [json.dumps(json.loads(plain, parse_constant=lambda name: None))]
    print_text(*lines)


def _plain(value: Any) -> Any:
    """JSON that was kept as it was read; of an error its line."""
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else str(value)


def draw(text: str) -> None:
    """Have the live line say as much of this as fits; empty: no live line. Call on a terminal only (`is_terminal`)."""
    global _drawn
    text = text.encode("ascii", "replace").decode()[: shutil.get_terminal_size().columns - 1]
    if text != _drawn:
        before, _drawn = _drawn, text  # a signal may cut in
        _write("stderr", f"\r{text.ljust(len(before))}\r", end="")  # its echo of Ctrl-C lands on the line itself


def is_terminal() -> bool:
    """Whether there is a live line: stderr is a terminal that knows what a carriage return is."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _write(name: str, text: str, end: str = "\n") -> None:
    """Write to stdout or stderr, unless the stream is closed."""
    if (stream := getattr(sys, name)) is None:
        return
    try:
        stream.reconfigure(errors="backslashreplace")  # of an encoding that lacks a character
        print(text, file=stream, end=end, flush=True)
    except OSError:
        if name == "stdout":
            raise  # a terminal that went away must not end a night, which prints its progress to stderr


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def printable(text: str) -> str:
    """Hostile text cannot move the cursor, forge lines, turn round what follows or end the block."""
    plain = text if text.isprintable() else ANSI.sub(" ", text)  # an escape sequence whole, not what follows its ESC
    return "".join(character if character.isprintable() else " " for character in plain).rstrip()

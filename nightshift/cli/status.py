"""What goes on in a checkout, for who only looks: `nightshift status`, and `nightshift wait` until it is over."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from nightshift.campaign.ledger import STARTED, Ledger, read_progress
from nightshift.campaign.records import Record
from nightshift.cli.output import print_lines, print_text, summary
from nightshift.cli.progress import TerminalReporter
from nightshift.errors import ExitCode, UsageError
from nightshift.text import clean, local
from nightshift.waiting import lasted

if TYPE_CHECKING:
    from nightshift.cli.views.status import Night


import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from nightshift.campaign.campaign import expected
from nightshift.campaign.index import fold_sound
from nightshift.campaign.standing import Z95, Expected, expected_then

_LONG = ("effective", "scores", "curve")  # they fill screens: see record.json
_FIRST = ("description", "prediction", "mechanism", "refuted_by", "proposer", "told_outcome", "lesson", "diff", "base")
_HASHES = ("config_hash", "effective_hash", "rules_hash", "harness_tree", "commit", "kept_commit")
_LAST = ("unused_keys", *_HASHES, "decision", "versions", "version")  # what programs compare and people hardly read


def experiment_lines(ledger: Ledger, record: Record) -> Iterator[str]:
    """`name: value` by the names of record.json, what is inside another value indented. Scores are fractions 0..1.

    First the verdict with its numbers, then the hypothesis; last hashes, versions and keys that nothing used.
    """
    campaign, _ = fold_sound(ledger, ledger.readable()[0], record.branch, record.rules_hash)
    fields = msgspec.to_builtins(record, builtin_types=(msgspec.Raw,))
    run = {"result": fields.pop("result")}
    judged = fields.pop("judgement")
    for name in ("delta", "delta_stderr") if judged else ():  # as record.json calls expected_then, which stands below
        judged.pop(name)
    verdict = {"number": record.number, "status": record.status, "judgement": judged}
    told = {"expected_then": _interval(expected_then(record)), "expected": _interval(expected(campaign, record))}
    first, last = ({name: fields.pop(name) for name in names if name in fields} for names in (_FIRST, _LAST))
    fields["started"] = f"{datetime.fromisoformat(record.started).astimezone():%Y-%m-%d %H:%M:%S %Z}"
    folder = os.fspath(ledger.run_dir(record.number))
    return _lines({**verdict, **told, "score": record.score, **first, **fields, **run, "files": folder, **last}, "")


def _interval(found: Expected | None) -> str | None:
    """A difference with half its 95 % interval."""
    return None if found is None else f"{found.mean:+.4f} \N{PLUS-MINUS SIGN} {Z95 * found.stderr:.4f}"


def _lines(fields: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in fields.items():
        head = f"{indent}{name}:".ljust(23) + " "
        match value:
            case _ if name in _LONG:
                continue
            case None:
                yield f"{head}none"
            case float():
                yield f"{head}{value:.6g}"
            case dict():
                yield head
                yield from _lines(value, indent + "  ")
            case list() | tuple():
                yield from (f"{head}{each}" for each in value or ["none"])
            case _:
                yield from (f"{head}{line}" for line in str(value).splitlines() or [""])


TIMED_OUT = 124  # as timeout(1)
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5  # between two looks at how far the runs are
_SOMETHING = "a certificate, a night between experiments, or an experiment that starts"


def wait_for_verdict(root: Path, timeout_seconds: float | None) -> int:
    """Wait for the experiment in flight, print its summary, return its exit code; 124 while it still runs."""
    from nightshift.executors.process import interruptible

    ledger, looked, told = Ledger(root), 0.0, "what runs goes on; nobody waits for it any more"
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    with closing(TerminalReporter(f"waiting for {_SOMETHING}")) as reporter, interruptible(told):
        while ledger.is_running():
            if deadline is not None and time.monotonic() >= deadline:
                print_lines(status_lines(ledger, datetime.now(UTC)))
                return TIMED_OUT
            if time.monotonic() >= looked + _LOOK_SECONDS:
                looked = time.monotonic()
                started = [record.number for record in ledger.readable()[0] if record.status == STARTED]
                reporter.show({folder: read_progress(folder) for folder in map(ledger.run_dir, started)})
            time.sleep(_POLL_SECONDS)
    records, _ = ledger.readable()
    if not records:
        raise UsageError("no experiment was run here yet", "Start one: uv run run.py.")
    if records[-1].judgement is None:
        cause = f"experiment {records[-1].number:04d} was killed before its verdict"
        raise UsageError(cause, "The next run.py closes it as a crash.")
    print_text(summary(records[-1], ledger.journal.head))
    return exit_code(records[-1])


def status_lines(ledger: Ledger, now: datetime) -> list[str]:
    """What is running and for how long; then what the last campaign holds, and what the night does."""
    from nightshift.cli.views.status import status
    from nightshift.night.summary import standing_text

    found = status(ledger, now)
    lines = [f"damaged:  {cause}" for cause in found.damaged]
    for running in found.running:
        lines += running_lines(ledger, ledger.record(running.number), now)
    if not found.running:
        lines.append(f"running:  {_SOMETHING if found.is_running else 'nothing'}")
    lines += [f"counted:  {found.counted}", f"cost:     {found.cost}"]
    if found.others:
        lines.append(f"others:   {found.others} of other campaigns in runs/")
    if (best := found.incumbent) is not None:
        believed = found.incumbent_score, found.baseline_score, found.take_back
        lines += [f"incumbent: {standing_text(best.number, *believed)}", _quoted(best.description)]
    return lines + (night_lines(found.night) if found.night else [])


def night_lines(night: Night) -> list[str]:
    """How far the last night is and when it stops."""
    agent = night.agent
    if night.state == "over":
        return [f"night:    {agent} is over: {clean(night.cause or '', 400)}"]
    if night.state == "cut off":
        left = [f"left:     {number} is the job {name} in SLURM" for number, name in night.left.items()]
        how = ", and takes the jobs over; nightshift night --stop cancels them" if left else ""
        return [*left, f"night:    {agent} was cut off: run the same command again to resume{how}"]
    told = f"{agent} since {local(datetime.fromisoformat(night.since))}, {night.num_experiments} experiments"
    return [f"night:    {told}", f"stops:    {night.next_stop}"]


def running_lines(ledger: Ledger, record: Record, now: datetime) -> list[str]:
    """How far an experiment in flight is."""
    from nightshift.cli.running import RunLine

    folder = ledger.run_dir(record.number)
    run = RunLine(folder)
    run.read(read_progress(folder))
    since = datetime.fromisoformat(record.started)
    lasts = f"{lasted((now - since).total_seconds())}, since {since.astimezone():%H:%M:%S %Z}"
    return [f"running:  {record.number:04d} for {lasts}: {run.text('run')}", _quoted(record.description)]


def _quoted(description: str) -> str:
    """What its author said of it, which nobody has measured."""
    return f"{'':10}its author: {description!r}"


def exit_code(record: Record) -> int:
    """0 for a measured experiment, 130 for an interrupted one, 1 for a crash."""
    if record.status in ("keep", "discard"):
        return ExitCode.MEASURED
    return ExitCode.INTERRUPTED if record.failure == "interrupted" else ExitCode.CRASH

"""What stands between the flags of a command and its exit code: run, detach, wait, status."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nightshift import console
from nightshift.engines import PrepareFlags, open_engine
from nightshift.errors import EngineError, ExitCode, NightshiftError, UsageError
from nightshift.records import Record, Request
from nightshift.rules import num_gpus, pick_rules
from nightshift.train_toml.config import load
from nightshift.train_toml.keys import describe_keys

if TYPE_CHECKING:
    from nightshift.campaign.ledger import Ledger
    from nightshift.setup import Setup

TIMED_OUT = 124  # as timeout(1)
_POLL_SECONDS = 0.05
_DETACH_SECONDS = 60.0


class Time(click.ParamType[datetime]):
    """HH:MM (the next one, local time) or an ISO 8601 time."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """An aware time in UTC; click's usage error for anything else."""
        if isinstance(value, datetime):
            return value
        now = datetime.now().astimezone()
        try:
            clock = datetime.strptime(value, "%H:%M")
        except ValueError:
            try:
                until = datetime.fromisoformat(value).astimezone()
            except ValueError:
                self.fail(f"{value!r} is no time. Write 07:30 or 2026-11-21T07:30.", param, ctx)
        else:
            until = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
            until += timedelta(days=until <= now)
        if until <= now:
            self.fail(f"{value!r} is over.", param, ctx)
        return until.astimezone(UTC)


TIME = Time()


def refuse_max_runs(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """--max-runs of version 0.1.0."""
    if value is not None:
        fix = "Leave it out; to repeat a config as an experiment of its own: --again."
        raise click.UsageError(f"--max-runs {value} is gone: an experiment is one run. {fix}")


def run(root: Path, request: Request) -> int:
    """One experiment, or what --keys, --dry-run and --detach ask for; the exit code."""
    if request.keys:
        console.print_text(describe_keys())
        return ExitCode.MEASURED
    reporter = console.TerminalReporter()
    try:
        load(root / "train.toml")  # before anything heavy: a typo costs a tenth of a second
        return detach(root) if request.detach else _experiment(root, request, reporter)
    except (NightshiftError, OSError) as error:
        reporter.close()
        shown = error if isinstance(error, NightshiftError) else machine_error(error)
        console.print_error(shown)
        return shown.exit_code


def machine_error(error: OSError) -> EngineError:
    """One line for a refusal of the operating system that nothing further down has words for."""
    where = "" if error.filename is None else f": {os.fspath(error.filename)}"
    return EngineError(f"{error.strerror or error}{where}", "Free disk space or memory, or fix permissions.")


def prepare(root: Path, flags: PrepareFlags) -> int:
    """What prepare.py does; the exit code."""
    from nightshift.campaign.ledger import Ledger
    from nightshift.environments import chosen
    from nightshift.processes.supervise import interruptible

    ledger = Ledger(root)
    reporter = console.TerminalReporter()
    began = time.monotonic()
    try:
        with interruptible():
            rules = pick_rules(flags.engine_meant, num_gpus(os.environ), chosen(root))
            if flags.rebuild_base:
                from nightshift.engines.trl import base_model

                base_model.rebuild_shipped(root, reporter.note)
            open_engine(rules, root, dict(os.environ)).prepare(flags, reporter.note)
            if not ledger.tsv_path.exists() and ledger.sync_tsv():  # every run.py puts right what is wrong in it
                reporter.note("results.tsv: written")
    except NightshiftError as error:
        console.print_error(error)
        return error.exit_code
    reporter.note(f"ready for {rules.name} after {time.monotonic() - began:.1f} s: uv run run.py")
    return ExitCode.MEASURED


def _experiment(root: Path, request: Request, reporter: console.TerminalReporter) -> int:
    from nightshift import experiment
    from nightshift.processes.supervise import interruptible
    from nightshift.setup import open_setup

    with interruptible():
        setup = open_setup(root, request, reporter)
        if request.dry_run:
            console.print_text(_dry_run(setup))
            return ExitCode.MEASURED
        experiment.require_ready(setup.engine)  # before anything is written or downloaded for what cannot run
        with setup.ledger.head():
            setup.engine.prepare_at_start(reporter.note)
            record = experiment.run_experiment(request, setup)
    reporter.close()
    console.print_summary(record)
    return exit_code(record)


def _dry_run(setup: Setup) -> str:
    from nightshift.experiment import admit, next_seed

    record = admit(load(setup.root / "train.toml"), setup.request, setup)
    run_dir = setup.ledger.run_dir(setup.ledger.next_number(), 1) / "attempt-0"
    starts = setup.engine.describe(record.effective, next_seed(record, setup), run_dir)
    return console.dry_run(record, setup.rules.name, starts)


def exit_code(record: Record) -> int:
    """0 for a measured experiment, 130 for an interrupted one, 1 for a crash."""
    if record.status in ("keep", "discard"):
        return ExitCode.MEASURED
    return ExitCode.INTERRUPTED if record.failure == "interrupted" else ExitCode.CRASH


def detach(root: Path) -> int:
    """Start the same command in a session of its own and return once its experiment runs.

    Errors that come before the experiment are shown here, with their exit code.
    """
    import subprocess

    from nightshift.campaign.ledger import Ledger

    ledger = Ledger(root)
    ledger.runs_dir.mkdir(exist_ok=True)
    before = max(ledger.numbers(), default=0)
    log = ledger.runs_dir / "detached.log"
    arguments = [argument for argument in sys.argv if argument != "--detach"]
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=root,
        )
    deadline = time.monotonic() + _DETACH_SECONDS
    while time.monotonic() < deadline and max(ledger.numbers(), default=0) == before:
        code = child.poll()
        if code is not None:
            sys.stderr.write(log.read_text(errors="replace"))
            return code
        time.sleep(_POLL_SECONDS)
    console.print_text(f"running in process {child.pid}; its output: {log}\nuv run nightshift wait --timeout 540")
    return ExitCode.MEASURED


def wait(root: Path, timeout_seconds: float | None) -> int:
    """Wait for the experiment in flight, print its summary, return its exit code; 124 while it still runs."""
    from nightshift.campaign.ledger import Ledger

    ledger = Ledger(root)
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while ledger.is_running():
        if deadline is not None and time.monotonic() >= deadline:
            console.print_text(status_line(ledger, lambda: datetime.now(UTC)))
            return TIMED_OUT
        time.sleep(_POLL_SECONDS)
    numbers = ledger.numbers()
    record = ledger.read(numbers[-1]) if numbers else None
    if record is None:
        raise UsageError("no experiment was run here yet", "Start one: uv run run.py.")
    if record.judgement is None:
        raise UsageError(
            f"experiment {record.number:04d} was killed before its verdict", "The next run.py closes it as a crash."
        )
    console.print_summary(record)
    return exit_code(record)


def status_line(ledger: Ledger, now: Callable[[], datetime]) -> str:
    """What is running and for how long; then what the ledger holds, and what the night does."""
    from nightshift.campaign.campaign import Campaign  # loads numpy: a typo in train.toml shall not wait for that
    from nightshift.campaign.ledger import duration_seconds, read_progress
    from nightshift.night.text import status_lines

    records = ledger.records()
    lines = []
    is_running = ledger.is_running()
    if is_running and records and records[-1].status == "started":
        last = records[-1]
        reading = read_progress(ledger.run_dir(last.number, len(last.runs) + 1))
        lines.append(
            f"running:  {last.number:04d} for {duration_seconds(last.started, now()):.0f} s  "
            f"{console.reading_text(reading) if reading else 'starting'}  {last.description}"
        )
    else:
        what = "a certificate, a night between experiments, or an experiment that starts" if is_running else "nothing"
        lines.append(f"running:  {what}")
    for status in ("keep", "discard", "crash"):
        lines.append(f"{status + ':':10}{sum(r.status == status for r in records)}")
    best = Campaign.last(records).incumbent
    if best is not None:
        lines.append(f"best:     {best.number:04d} on {best.branch or 'a detached HEAD'}  {best.description}")
    lines += status_lines(ledger, records, now())
    return "\n".join(console.printable(line) for line in lines)


def process_root() -> Path:
    """The checkout that the `nightshift` command is about: the nearest folder upwards with a run.py and train.toml."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "run.py").is_file() and (folder / "train.toml").is_file():
            return folder
    raise UsageError(f"{os.fspath(here)} is no Nightshift checkout", "Go to the folder that holds run.py.")

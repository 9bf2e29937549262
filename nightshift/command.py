"""What stands between the flags of a command and its exit code: run, detach, wait, status."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from nightshift import console
from nightshift.campaign.ledger import Ledger, duration_seconds, read_progress
from nightshift.campaign.lineage import incumbent_number
from nightshift.errors import EngineError, ExitCode, NightshiftError, UsageError
from nightshift.records import Record, Side
from nightshift.train_toml import config, keys

ENGINES = ("trl", "prime-rl")
TIMED_OUT = 124  # as timeout(1)
_POLL_SECONDS = 0.25
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


@dataclass(frozen=True, slots=True)
class Flags:
    """run.py's flags."""

    description: str
    engine: str | None
    gpus: str | None
    max_runs: int
    until: datetime | None
    budget_seconds: float | None
    again: bool
    keep_all: bool
    detach: bool
    dry_run: bool
    keys: bool


@dataclass(frozen=True, slots=True)
class PrepareFlags:
    """prepare.py's flags."""

    engine: str | None
    gpus: str | None
    prime_rl: Path | None
    smoke: bool
    gsm8k: Path | None
    rebuild_base: bool

    @property
    def is_for_prime_rl(self) -> bool:
        return self.smoke or self.gpus is not None or self.prime_rl is not None

    @property
    def engine_meant(self) -> str | None:
        """The engine that is named, or that other flags imply."""
        return self.engine or ("prime-rl" if self.is_for_prime_rl else None)


def run(root: Path, flags: Flags) -> int:
    """One experiment, or what --keys, --dry-run and --detach ask for; the exit code."""
    if flags.keys:
        console.print_text(keys.describe_keys())
        return ExitCode.MEASURED
    reporter = console.TerminalReporter(Ledger(root).run_dir)
    try:
        config.load(root / "train.toml")  # before anything heavy: a typo costs a tenth of a second
        return detach(root) if flags.detach else _experiment(root, flags, reporter)
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
    from nightshift import environments, preparation
    from nightshift.processes.gpus import num_gpus
    from nightshift.processes.supervise import interruptible
    from nightshift.rules import ARITHMETIC_TRL, pick_rules

    reporter = console.TerminalReporter(Ledger(root).run_dir)
    began = time.monotonic()
    try:
        with interruptible():
            rules = pick_rules(flags.engine_meant, num_gpus(os.environ), environments.chosen(root))
            if flags.rebuild_base:
                preparation.rebuild_base(root, ARITHMETIC_TRL, reporter.note)
            if rules.engine == "prime-rl":
                _prepare_prime_rl(root, flags, reporter.note)
            elif flags.is_for_prime_rl:
                raise UsageError("--prime-rl, --gpus and --smoke are for --engine prime-rl", "Leave them out.")
            else:
                preparation.prepare_missing(root, rules, reporter.note, flags.gsm8k)
    except NightshiftError as error:
        console.print_error(error)
        return error.exit_code
    reporter.note(f"ready for {rules.name} after {time.monotonic() - began:.1f} s: uv run run.py")
    return ExitCode.MEASURED


def _prepare_prime_rl(root: Path, flags: PrepareFlags, note: Callable[[str], None]) -> None:
    from nightshift import preparation
    from nightshift.engines.prime_rl.engine import PrimeRlEngine
    from nightshift.engines.prime_rl.installation import ENV_VAR, Installation, Pins
    from nightshift.engines.prime_rl.installer import CommandRunner, Installer
    from nightshift.processes.gpus import choose_pair, list_gpus, parse_gpus

    environ = dict(os.environ)
    train_config = config.load(root / "train.toml")
    gpu_ids = None if flags.gpus is None else parse_gpus(flags.gpus)
    gpus = () if gpu_ids == () else choose_pair(list_gpus(), gpu_ids or None, environ)
    installation = Installation.find(Pins.read(root / "pyproject.toml"), environ, flags.prime_rl)
    installer = Installer(installation, root, gpus, environ, note, CommandRunner(note))
    preparation.prepare_prime_rl(
        installer,
        train_config,
        lambda rules: PrimeRlEngine(rules, root, environ, installation, gpu_ids),
        gsm8k=flags.gsm8k,
        smoke=flags.smoke,
    )
    if Installation.find(installation.pins, environ) != installation:
        note(f"for run.py: export {ENV_VAR}={installation.root}")


def _experiment(root: Path, flags: Flags, reporter: console.TerminalReporter) -> int:
    from nightshift import experiment, preparation
    from nightshift.processes.supervise import interruptible
    from nightshift.setup import open_lab

    with interruptible():
        lab = open_lab(root, flags.engine, flags.budget_seconds, reporter, flags.gpus, flags.keep_all)
        if flags.dry_run:
            plan = experiment.admit(config.load(root / "train.toml"), _request(flags), lab)
            seed = lab.rules.seed(plan.seed_index[Side.CANDIDATE])
            run_dir = lab.ledger.run_dir(lab.ledger.next_number()) / "run-1"
            starts = lab.engine.describe(plan.settings[Side.CANDIDATE], seed, run_dir)
            console.print_text(console.dry_run(plan.record, lab.rules.name, starts))
            return ExitCode.MEASURED
        experiment.require_ready(lab.engine)  # before anything is downloaded for an engine that cannot run
        preparation.prepare_at_start(root, lab.rules, reporter.note)
        record = experiment.run_experiment(_request(flags), lab)
    reporter.close()
    console.print_summary(record)
    return exit_code(record)


def _request(flags: Flags) -> Any:
    from nightshift.experiment import Request

    return Request(" ".join(flags.description.split()), max_runs=flags.max_runs, until=flags.until, again=flags.again)


def exit_code(record: Record) -> int:
    """0 for a measured experiment, 130 for an interrupted one, 1 for a crash."""
    if record.status in ("keep", "discard"):
        return ExitCode.MEASURED
    return ExitCode.INTERRUPTED if record.failure == "interrupted" else ExitCode.CRASH


def detach(root: Path) -> int:
    """Start the same command in a session of its own and return once its experiment runs.

    Errors that come before the experiment are shown here, with their exit code.
    """
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
    ledger = Ledger(root)
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while ledger.is_locked():
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
    from nightshift.night.text import status_lines  # loads numpy: a typo in train.toml shall not wait for that

    records = ledger.records()
    lines = []
    is_locked = ledger.is_locked()
    if is_locked and records and records[-1].status == "started":
        last = records[-1]
        reading = read_progress(ledger.run_dir(last.number))
        lines.append(
            f"running:  {last.number:04d} for {duration_seconds(last.started, now()):.0f} s  "
            f"{reading or 'starting'}  {last.description}"
        )
    else:
        lines.append("running:  a certificate, or an experiment that starts" if is_locked else "running:  nothing")
    for status in ("keep", "discard", "crash"):
        lines.append(f"{status + ':':10}{sum(r.status == status for r in records)}")
    last_branch = [r for r in records if (r.branch, r.rules_hash) == (records[-1].branch, records[-1].rules_hash)]
    number = incumbent_number(last_branch)
    if number is not None:
        last = next(r for r in records if r.number == number)
        lines.append(f"best:     {last.number:04d} on {last.branch or 'a detached HEAD'}  {last.description}")
    lines += status_lines(ledger, records, now())
    return "\n".join(console.printable(line) for line in lines)


def process_root() -> Path:
    """The checkout that the `nightshift` command is about: the nearest folder upwards with a run.py and train.toml."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "run.py").is_file() and (folder / "train.toml").is_file():
            return folder
    raise UsageError(f"{os.fspath(here)} is no Nightshift checkout", "Go to the folder that holds run.py.")

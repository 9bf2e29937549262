"""What stands between the flags of a command and its exit code: run, detach, wait, status."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from nightshift.campaign.ledger import STARTED, Ledger, read_progress
from nightshift.console import (
    TerminalReporter,
    dry_run,
    print_error,
    print_text,
    printable,
    reading_text,
    summary,
    told,
)
from nightshift.engines import PrepareFlags, open_engine, used_keys
from nightshift.errors import EngineError, ExitCode, Interrupted, NightshiftError, UsageError
from nightshift.files import read_file
from nightshift.processes.gpus import num_gpus
from nightshift.records import ATTEMPT, Record
from nightshift.request import Request
from nightshift.rules_toml import rules_here
from nightshift.train_toml.config import load, parse
from nightshift.train_toml.keys import KEYS, describe_keys

if TYPE_CHECKING:
    from nightshift.setup import Setup

TIMED_OUT = 124  # as timeout(1)
_GC_OBJECTS = 100_000  # between two searches for garbage: thousands of records are none, and were looked through often
_POLL_SECONDS = 0.05
_DETACH_SECONDS = 60.0
P = ParamSpec("P")


def in_one_line(command: Callable[P, int]) -> Callable[P, int]:
    """Its errors are shown as one line, without a traceback; the exit code is theirs.

    Where all went well but stdout or stderr did not take it, the code is UNSAID.
    """

    @wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
                pass  # a standard stream that is closed: its number would go to the next file that is opened
            os.close(descriptor)
            gc.set_threshold(_GC_OBJECTS)
            return int(told(command(*args, **kwargs)))
        except SystemExit as end:  # how click returns
            raise SystemExit(told(end.code)) from None
        except KeyboardInterrupt:  # outside `interruptible`: click would end with 1, which means a crash
            shown: NightshiftError = Interrupted("stopped by Ctrl-C")
        except NightshiftError as error:
            shown = error
        except OSError as error:  # a refusal of the operating system that nothing further down has words for
            where = "" if error.filename is None else f": {os.fspath(error.filename)}"
            fix = "Free disk space or memory, or fix permissions."
            shown = EngineError(f"{error.strerror or error}{where}", fix)
        print_error(shown)
        return shown.exit_code

    return guarded


@in_one_line
def run(root: Path, request: Request) -> int:
    """One experiment, or what --keys, --dry-run and --detach ask for; the exit code."""
    if request.keys:
        print_text(keys_here(root, request))
        return ExitCode.MEASURED
    load(root / "train.toml")  # before anything heavy: a typo costs a tenth of a second
    if request.detach:
        return detach(root)
    from nightshift.experiment import admit, require_ready, run_experiment
    from nightshift.pools.survivors import end_jobs
    from nightshift.processes.leftovers import end_leftovers
    from nightshift.processes.supervise import interruptible
    from nightshift.runs import next_seed
    from nightshift.setup import open_setup

    with closing(TerminalReporter()) as reporter, interruptible():
        setup = open_setup(root, request, reporter)
        if request.dry_run:
            record = admit(load(root / "train.toml"), request, setup)
            run_dir = setup.ledger.run_dir(setup.ledger.next_number(), 1) / ATTEMPT
            starts = setup.engine.describe(record.effective, next_seed(record, setup), run_dir)
            print_text(dry_run(record, starts))
            return ExitCode.MEASURED
        require_ready(setup)  # before anything is written or downloaded for what cannot run
        with setup.ledger.head():
            end_leftovers(root, reporter.note)
            end_jobs(setup.ledger)
            setup.engine.prepare_at_start(reporter.note)
            record = run_experiment(request, setup)
    print_text(summary(record, setup.ledger.chain.head))
    return exit_code(record)


def keys_here(root: Path, request: Request) -> str:
    """What --keys shows: every open key, and what the engine makes of it that would train here."""
    rules = rules_here(root, request.engine, num_gpus(os.environ))
    engine = open_engine(rules, root, dict(os.environ), request.gpus, prime_rl=request.prime_rl)
    standard = parse(b"[orchestrator]\ngroup_size = 4\n")  # whatever train.toml holds: who asks may be mending it
    unused = {key.path for key in KEYS} - used_keys(engine, standard)
    lines = [f"scaled: {line}" for line in engine.validate(standard).scaled]
    lines += [f"-: unused by the {engine.name} engine ({rules.name})"] if unused else []
    return "\n".join([*lines, describe_keys(unused)])


@in_one_line
def prepare(root: Path, flags: PrepareFlags) -> int:
    """What prepare.py does; the exit code."""
    from nightshift.engines.memory import on_cards
    from nightshift.processes.supervise import interruptible

    began = time.monotonic()
    with closing(TerminalReporter()) as reporter, interruptible():
        rules = rules_here(root, flags.engine_meant, num_gpus(os.environ))
        if flags.rebuild_base:
            from nightshift.engines.trl import base_model

            base_model.rebuild(root, rules.model, reporter.note)
        rules = on_cards(rules, root, os.environ, flags.gpus)
        open_engine(rules, root, dict(os.environ)).prepare(flags, reporter.note)
        if not flags.smoke:
            reporter.note(f"ready for {rules.name} after {time.monotonic() - began:.1f} s: uv run run.py")
    return ExitCode.MEASURED


def compare(
    request: Request, describe: Callable[[Setup], Sequence[str]], run: Callable[[Setup], str], dry_run: bool
) -> None:
    """What certify and transfer do: print the plan, or make the runs as the head and print what came of them."""
    from nightshift.processes.leftovers import end_leftovers
    from nightshift.processes.supervise import interruptible
    from nightshift.setup import open_setup

    with closing(TerminalReporter()) as reporter, interruptible():
        setup = open_setup(process_root(), request, reporter)
        if dry_run:
            print_text("\n".join(describe(setup)))
            return
        describe(setup)  # what is wrong with the question is said before anything is ended or fetched
        with setup.ledger.head():
            end_leftovers(setup.root, reporter.note)
            said = run(setup)
    print_text(said)


def doctor(root: Path, flags: PrepareFlags, agent: str | None) -> int:
    """Print what was checked; the exit code."""
    from nightshift.engines.doctor import checks, is_ready, table
    from nightshift.proposers.agent import check_agent

    rules = rules_here(root, flags.engine_meant, num_gpus(os.environ))
    found = checks(root, rules, dict(os.environ), flags)
    found += [check_agent(agent, root, dict(os.environ))] if agent else []
    print_text(table(found, rules))
    return ExitCode.MEASURED if is_ready(found, rules.engine) else ExitCode.USAGE


def look_at(root: Path, environment: str) -> None:
    """Print what one environment is."""
    from nightshift.own_environment import look
    from nightshift.processes.supervise import interruptible

    with interruptible():
        for line in look(root, environment):
            print_text(printable(line))


def probe(root: Path, request: Request) -> None:
    """doctor --slurm: print what a job finds. EngineError where none answers."""
    from nightshift.pools.probe import ask
    from nightshift.pools.slurm import SlurmPool
    from nightshift.processes.supervise import interruptible
    from nightshift.runs import job_of
    from nightshift.setup import open_setup

    with closing(TerminalReporter()) as reporter, interruptible():
        setup = open_setup(root, request, reporter)
        assert isinstance(setup.pool, SlurmPool)
        reporter.note("one job is submitted; it may have to wait for its turn (Ctrl-C cancels it)")
        lines = ask(setup.pool, job_of({}, 0, setup, ""))
    print_text("\n".join(map(printable, lines)))


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

    ledger = Ledger(root)
    with ledger.head():  # refused here, so that the log of the one that runs is left alone
        pass
    before = max(ledger.numbers(), default=0)
    log = ledger.runs_dir / "detached.log"
    program, *arguments = (argument for argument in sys.argv if argument != "--detach")
    log.unlink(missing_ok=True)
    with log.open("xb") as file:  # never through a link that lies there
        child = subprocess.Popen(
            [sys.executable, Path(program).absolute(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=root,
        )
    deadline = time.monotonic() + _DETACH_SECONDS
    while time.monotonic() < deadline and max(ledger.numbers(), default=0) == before:
        if (code := child.poll()) is not None:
            print_error(read_file(log).decode(errors="replace").rstrip())
            return code
        time.sleep(_POLL_SECONDS)
    print_text(f"running in process {child.pid}; its output: {log}\nuv run nightshift wait --timeout 540")
    return ExitCode.MEASURED


def wait(root: Path, timeout_seconds: float | None) -> int:
    """Wait for the experiment in flight, print its summary, return its exit code; 124 while it still runs."""
    ledger = Ledger(root)
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while ledger.is_running():
        if deadline is not None and time.monotonic() >= deadline:
            print_text(status_line(ledger, datetime.now(UTC)))
            return TIMED_OUT
        time.sleep(_POLL_SECONDS)
    records, _ = ledger.readable()
    if not records:
        raise UsageError("no experiment was run here yet", "Start one: uv run run.py.")
    if records[-1].judgement is None:
        cause = f"experiment {records[-1].number:04d} was killed before its verdict"
        raise UsageError(cause, "The next run.py closes it as a crash.")
    print_text(summary(records[-1], ledger.chain.head))
    return exit_code(records[-1])


def status_line(ledger: Ledger, now: datetime) -> str:
    """What is running and for how long; then what the ledger holds, and what the night does."""
    from nightshift.campaign.index import fold_sound, last_campaign  # loads numpy, for which a typo shall not wait
    from nightshift.night.text import status_lines

    records, damaged = ledger.readable()
    campaign, unfit = fold_sound(ledger, records, *last_campaign(records))
    lines = [f"damaged:  {cause}" for cause in (*damaged, *unfit.values())]
    is_running = ledger.is_running()
    runs = [running_line(ledger, record, now) for record in records if record.status == STARTED]
    if is_running and runs:
        lines += runs
    else:
        what = "a certificate, a night between experiments, or an experiment that starts" if is_running else "nothing"
        lines.append(f"running:  {what}")
    for status in ("keep", "discard", "crash"):
        lines.append(f"{status + ':':10}{sum(r.status == status for r in records)}")
    best = campaign.incumbent
    if best is not None:
        lines.append(f"best:     {best.number:04d} on {best.branch or 'a detached HEAD'}  {best.description}")
    lines += status_lines(ledger, records, now)
    return "\n".join(printable(line) for line in lines)


def running_line(ledger: Ledger, record: Record, now: datetime) -> str:
    """How far an experiment in flight is: each of its runs that are, where several are side by side."""
    folders = [ledger.run_dir(record.number, len(record.runs) + 1)]
    while (following := ledger.run_dir(record.number, len(record.runs) + len(folders) + 1)).is_dir():
        folders.append(following)
    readings = [reading_text(reading) if (reading := read_progress(folder)) else "starting" for folder in folders]
    seconds = (now - datetime.fromisoformat(record.started)).total_seconds()
    return f"running:  {record.number:04d} for {seconds:.0f} s  {'  |  '.join(readings)}  {record.description}"


def process_root() -> Path:
    """The checkout that the `nightshift` command is about: the nearest folder upwards with a run.py and train.toml."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "run.py").is_file() and (folder / "train.toml").is_file():
            return folder
    raise UsageError(f"{os.fspath(here)} is no Nightshift checkout", "Go to the folder that holds run.py.")

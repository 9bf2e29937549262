"""What stands between the flags of a command and its exit code: run, detach, prepare, compare, doctor."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nightshift.campaign.git import CONFIG_NAME
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Request
from nightshift.cli.output import dry_run, print_error, print_json, print_lines, print_text, summary
from nightshift.cli.progress import TerminalReporter, at_work
from nightshift.cli.status import exit_code
from nightshift.config.allowlist import KEYS, describe_keys
from nightshift.config.rules_toml import rules_here
from nightshift.config.train_toml import diff, load, parse
from nightshift.engines.base import PrepareFlags, open_engine, used_keys
from nightshift.errors import ExitCode, Interrupted, UsageError
from nightshift.executors.gpus import num_gpus
from nightshift.files import read_file
from nightshift.waiting import lasted

if TYPE_CHECKING:
    from nightshift.experiment.certify import Certified
    from nightshift.experiment.setup import Setup

_POLL_SECONDS = 0.05
_DETACH_SECONDS = 60.0
_UNWRAPPED = 10_000  # columns: what prints it knows how many there are


def run(root: Path, request: Request) -> int:
    """One experiment, or what --keys, --dry-run and --detach ask for; the exit code."""
    if request.keys:
        print_lines(keys_here(root, request))
        return ExitCode.MEASURED
    load(root / CONFIG_NAME)  # before anything heavy: a typo costs a tenth of a second
    if request.detach:
        return detach(root)
    from nightshift.executors.process import interruptible

    with closing(TerminalReporter()) as reporter, interruptible(names_sender=True):
        from nightshift.executors.slurm import end_jobs
        from nightshift.experiment.experiment import require_ready, run_experiment
        from nightshift.experiment.setup import open_setup, sweep

        setup = open_setup(root, request, reporter)
        if request.dry_run:
            print_lines(plan(request, setup))
            return ExitCode.MEASURED
        require_ready(setup)  # before anything is written or downloaded for what cannot run
        with setup.ledger.controller():
            sweep(root, reporter.note)
            end_jobs(setup.ledger)
            setup.engine.prepare_at_start(reporter.note)
            try:
                record = run_experiment(request, setup)
            except Interrupted:
                if left := left_in_train_toml(setup):
                    reporter.note(left)
                raise
    print_text(summary(record, setup.ledger.journal.head))
    return exit_code(record)


def plan(request: Request, setup: Setup) -> list[str]:
    """What --dry-run shows. With another engine than the campaign's that of an experiment in a campaign of its own."""
    from nightshift.campaign.git import Head, Repo
    from nightshift.campaign.same_setup import baseline_of
    from nightshift.experiment.baseline import fitting_baseline
    from nightshift.experiment.experiment import admit
    from nightshift.experiment.runs import next_seed

    class Elsewhere(Repo):
        """The checkout, on no branch."""

        def head(self) -> Head:
            return Head("", None)

    first, joins = baseline_of(setup.ledger.records(), setup.repo.head()), []
    if first is not None and first.engine != setup.engine.name:
        setup = replace(setup, repo=Elsewhere(setup.root))
        joins = [f"joins:    not {first.branch}, which is of --engine {first.engine}; it would begin a campaign"]
    config = load(setup.root / CONFIG_NAME)
    if (made := fitting_baseline(setup)) is not None:
        changes = [change.line for change in diff(setup.ledger.stored_config(made), config)]
        told = (
            f"baseline: the run of {made.number:04d}, made on {made.branch or 'a detached HEAD'}, begins this campaign"
        )
        setup.engine.validate(config)
        return [told, *(f"change:   {line}" for line in changes or ("none: nothing is run",))]
    record = admit(config, request, setup)
    run_dir = setup.ledger.run_dir(setup.ledger.next_number())
    starts = setup.engine.describe(record.effective, next_seed(record, setup), run_dir)
    takes = f"takes:    at most {lasted(setup.rules.deadline_seconds)} a run"
    return [*joins, *dry_run(record, [takes, *starts])]


def left_in_train_toml(setup: Setup) -> str | None:
    """That an interrupted experiment's proposal is still there, and how it goes; None where git has the same."""
    head = setup.repo.head()
    committed = None if head.commit is None else setup.repo.config_at(head.commit)
    if committed is None or committed == read_file(setup.root / CONFIG_NAME):
        return None
    whose = "the incumbent's" if head.is_campaign else "the committed one"
    return f"{CONFIG_NAME} still holds what was tried; git checkout {CONFIG_NAME} puts {whose} back"


def keys_here(root: Path, request: Request) -> list[str]:
    """What --keys shows: every open key, and what the engine makes of it that would train here."""
    rules = rules_here(root, request.engine, num_gpus(os.environ))
    engine = open_engine(rules, root, dict(os.environ), request.gpus, prime_rl=request.prime_rl)
    standard = parse(b"[orchestrator]\ngroup_size = 4\n")  # whatever train.toml holds: who asks may be mending it
    unused = {key.path for key in KEYS} - used_keys(engine, standard)
    lines = [f"scaled: {line}" for line in engine.validate(standard).scaled]
    lines += [f"-: unused by the {engine.name} engine ({rules.name})"] if unused else []
    return [*lines, describe_keys(unused, _UNWRAPPED)]


def prepare(root: Path, flags: PrepareFlags) -> int:
    """What prepare.py does; the exit code."""
    from nightshift.engines.memory import on_cards
    from nightshift.executors.process import interruptible

    began = time.monotonic()
    with closing(TerminalReporter()) as reporter, interruptible(names_sender=True):
        rules = rules_here(root, flags.engine_meant, num_gpus(os.environ))
        if flags.rebuild_base:
            from nightshift.engines.trl import base_model

            base_model.rebuild(root, rules.model, reporter.note)
        rules = on_cards(rules, root, os.environ, flags.gpus)
        open_engine(rules, root, dict(os.environ)).prepare(flags, reporter.note)
        if not flags.smoke:
            reporter.note(f"ready for {rules.name} after {time.monotonic() - began:.1f} s: uv run run.py")
    return ExitCode.MEASURED


def certify(request: Request, options: tuple[Any, ...], dry_run: bool) -> Certified:
    """Compare, but for a dry run. `options`: the arguments of certify.tasks."""
    from nightshift.executors.process import interruptible
    from nightshift.experiment.certify import Certified, certify, tasks
    from nightshift.experiment.setup import open_setup, sweep

    with closing(TerminalReporter()) as reporter, interruptible(names_sender=True):
        setup = open_setup(process_root(), request, reporter)
        questions = tasks(setup, *options)  # a wrong question is refused before anything is ended
        plan = tuple(line for task in questions for line in task.describe())
        if dry_run:
            return Certified(plan=plan, comparisons=())
        with setup.ledger.controller():
            sweep(setup.root, reporter.note)
            return Certified(plan=plan, comparisons=tuple(certify(tasks(setup, *options))))


def doctor(root: Path, flags: PrepareFlags, agent: str | None, as_json: bool = False) -> int:
    """Print what was checked; the exit code."""
    from nightshift.agents.agent import check_agent
    from nightshift.engines.doctor import Doctor, checks

    with at_work("looking at what experiments need"):
        rules = rules_here(root, flags.engine_meant, num_gpus(os.environ))
        found = checks(root, rules, dict(os.environ), flags)
        found += [check_agent(agent, root, dict(os.environ))] if agent else []
    report = Doctor.of(found, rules)
    if as_json:
        print_json(report)
    else:
        print_lines([report.table(flags.engine_meant)])
    return ExitCode.MEASURED if report.is_ready else ExitCode.USAGE


def look_at(root: Path, environment: str) -> None:
    """Print what one environment is."""
    from nightshift.evaluation.template import look

    with at_work(f"loading {environment}"):
        for line in look(root, environment):
            print_lines([line])


def probe(root: Path, request: Request) -> None:
    """doctor --slurm: print what a job finds. EngineError where none answers."""
    from nightshift.executors.process import interruptible
    from nightshift.executors.slurm import SlurmExecutor, probe_node
    from nightshift.experiment.runs import job_of
    from nightshift.experiment.setup import open_setup

    with closing(TerminalReporter()) as reporter, interruptible(names_sender=True):
        setup = open_setup(root, request, reporter)
        assert isinstance(setup.executor, SlurmExecutor)
        reporter.note("one job is submitted; it may have to wait for its turn (Ctrl-C cancels it)")
        lines = probe_node(setup.executor, job_of({}, 0, setup, ""))
    print_lines(lines)


def detach(root: Path) -> int:
    """Start the same command in a session of its own and return once its experiment runs.

    Errors that come before the experiment are shown here, with their exit code.
    """
    import subprocess

    ledger = Ledger(root)
    with ledger.controller():  # refused here, so that the log of the one that runs is left alone
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
    print_text(f"running in process {child.pid}; its output: {log}\nuv run nightshift wait --timeout 100")
    return ExitCode.MEASURED


def process_root() -> Path:
    """The checkout that the `nightshift` command is about: the nearest folder upwards with a run.py and train.toml."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "run.py").is_file() and (folder / "train.toml").is_file():
            return folder
    raise UsageError(f"{os.fspath(here)} is no Nightshift checkout", "Go to the folder that holds run.py.")

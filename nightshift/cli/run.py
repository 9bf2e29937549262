"""The work of run.py and prepare.py: one experiment, its plan, the list of keys, the preparation of a machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from nightshift.agents.direction import read_direction
from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import DETACHED_NAME, Request
from nightshift.cli.output import print_error, print_text
from nightshift.cli.progress import reporting
from nightshift.cli.status import print_verdict
from nightshift.config.allowlist import KEYS, describe_keys
from nightshift.config.losses import keys_with
from nightshift.config.rules_toml import rules_here
from nightshift.config.scope import scope_of
from nightshift.config.train_toml import load, parse
from nightshift.engines.base import Check, PrepareFlags, look, on_cards, open_engine, scaled_rates, used_keys
from nightshift.engines.machine import read_machine
from nightshift.errors import ExitCode, UsageError
from nightshift.executors.gpus import num_gpus
from nightshift.experiment.checkout import checked_head, next_start
from nightshift.experiment.checkout import plan as plan_start
from nightshift.files import read_file
from nightshift.waiting import lasted

if TYPE_CHECKING:
    from nightshift.experiment.experiment import Controller

_POLL_SECONDS = 0.05
_DETACH_SECONDS = 900.0  # asking an agent takes up to 4 minutes; loading a model takes time, too


def checkout_checks(root: Path) -> list[Check]:
    """Return the problems of the checkout for which `run` refuses to start: the state of git, and the direction."""
    checks = look("git", lambda: checked_head(Repo(root))), look("direction", lambda: read_direction(root))
    return [check for check in checks if not check.ok]


def run(root: Path, request: Request) -> int:
    """Run one experiment, or do what --keys, --dry-run or --detach ask for. Return the exit code."""
    if request.keys:
        return print_keys(root, request)
    checked_head(Repo(root))  # first: a conflict of a rebase is not a typo in train.toml
    load(root / CONFIG_NAME)  # before heavy imports: a typo is reported in a tenth of a second
    with reporting() as reporter:
        from nightshift.executors.process import end_leftovers
        from nightshift.executors.slurm import end_jobs
        from nightshift.experiment.experiment import open_controller

        request = replace(request, only=scope_of(read_direction(root)))
        controller = open_controller(root, request, reporter, request.branch)
        if request.dry_run:
            bench = controller.bench  # without slots here, for runs in SLURM, nothing is checked
            engines = [bench.engine_of.get(slot.gpus, bench.engine) for slot in bench.executor.free_slots[:1]]
            missing = [f"missing:  {problem}" for engine in engines for problem in engine.check()]
            for line in chain(missing, plan(request, controller)):
                print_text(line)
            return ExitCode.USAGE if missing else ExitCode.MEASURED
        controller.bench.require_ready()  # before anything is written or downloaded
        logging: AbstractContextManager[object] = nullcontext()
        if (project := read_machine(root).wandb.project) and not request.detach:
            from nightshift.report.export.wandb_runs import live_runs

            logging = live_runs(root, project, reporter.note)
        with controller.ledger.lock(), logging:
            end_leftovers(root, reporter.note)
            end_jobs(controller.ledger, reporter.note)
            controller.bench.engine.prepare_at_start(reporter.note)
            controller.begin(request.branch)
            record = None if request.detach else controller.run(request)
    ledger = controller.ledger
    if record is not None:
        return print_verdict(record, ledger)
    last = max(ledger.numbers(), default=0)
    wait = "uv run nightshift wait --timeout 100"
    return start_detached(ledger, lambda: max(ledger.numbers(), default=0) > last, wait)


def print_keys(root: Path, request: Request) -> int:
    """Print every key that train.toml may have. The train.toml here need not be valid."""
    rules = rules_here(root, request.engine, num_gpus(os.environ))
    engine = open_engine(rules, root, dict(os.environ), request.gpus, prime_rl=request.prime_rl)
    standard = parse(b"[orchestrator]\ngroup_size = 4\n")
    unused = {key.path for key in KEYS} - used_keys(engine, standard)
    lines = [f"scaled, for example the default: {line}" for line in scaled_rates(standard, rules.learning_rate_scale)]
    lines.append("KEY = VALUE: the default, which applies if train.toml does not set the key; then the allowed values")
    lines += [f"-: unused by the {engine.name} engine ({rules.name})"] if unused else []
    for line in (*lines, *describe_keys(unused, engine.name, keys_with(engine.rules.losses))):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        print_text(*wrap(line, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""])
    if line := next_start(Ledger(root), Repo(root)):
        print_error(line)
    return ExitCode.MEASURED


def plan(request: Request, controller: Controller) -> Iterator[str]:
    """Yield the lines of a dry run: what this request would do with branches, and the run itself."""
    records, repo, bench = controller.ledger.records(), controller.repo, controller.bench
    rules = bench.rules
    start = plan_start(repo, records, controller.now(), rules, bench.rules_hash, request.branch)
    if line := start.describe():
        yield f"branch:   {line}"
    config = load(bench.root / CONFIG_NAME)
    committed = repo.config_at(str(start.before.commit))
    if committed == config.source:  # a switch writes the branch's train.toml
        config = parse(repo.config_at(str(start.head.commit)) or b"")
    controller = replace(controller, repo=Repo(bench.root, start.head))
    campaign = controller.campaign()
    config = campaign.compose(()) if request.baseline else config
    yield f"rules:    {rules.name} {bench.rules_hash}"
    yield from (f"scaled:   {line}" for line in scaled_rates(config, rules.learning_rate_scale))
    record = controller.admit(config, request, campaign)
    run_dir = controller.ledger.run_dir(controller.ledger.next_number())
    engine = bench.engine
    names = ", ".join(change.name for change in record.run.kept)
    against = f"the baseline with {names}" if names else "the baseline"
    if record.parent is None:
        against = "nothing: this is the baseline"
    yield f"against:  {against}"
    yield from (f"change:   {line}" for line in record.diff or ("none",))
    yield from (f"unused:   {key}" for key in record.unused_keys)
    yield f"time:     at most {lasted(engine.deadline_seconds)}, of which {rules.budget_text} of training"
    seed = bench.next_seed(campaign)
    yield from engine.describe(record.effective, seed, run_dir, verbose=request.verbose)


def prepare(root: Path, flags: PrepareFlags) -> int:
    from nightshift.experiment.prove import prove, proving

    with reporting() as reporter:
        least = 1 if flags.prove else 0  # so that a machine without a GPU is refused with the reason
        rules = rules_here(root, flags.engine_meant, max(num_gpus(os.environ), least))
        rules = on_cards(rules, root, os.environ, flags.gpus)
        engine = open_engine(rules, root, dict(os.environ), flags.gpus, prime_rl=flags.prime_rl)
        with proving(root, engine) as proof:
            if flags.prove:
                return prove(proof, flags, reporter.note)
            engine.prepare(flags, reporter.note)
        if flags.smoke is None:
            reporter.note(f"ready for {rules.name}: uv run run.py")
    return ExitCode.MEASURED


def start_detached(ledger: Ledger, has_begun: Callable[[], bool], then: str) -> int:
    """Start the same command without --detach in a new session. Return when `has_begun` is true, or the exit code of a
    command that failed before. `then`: the command that waits for the started process."""
    import subprocess

    log = ledger.runs_dir / DETACHED_NAME
    own_log = log.with_name(f"{os.getpid()}-{log.name}")  # not shared with another start at the same moment
    program, *arguments = (word for word in sys.argv if word != "--detach")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited: closing the terminal does not end the child
    with own_log.open("xb") as file:  # does not follow a link of that name
        child = subprocess.Popen(
            [sys.executable, Path(program).absolute(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + _DETACH_SECONDS
    try:
        while time.monotonic() < deadline:
            if ledger.holder.startswith(f"process {child.pid} ") and has_begun():
                break
            if (code := child.poll()) is not None:
                print_error(read_file(own_log).decode(errors="replace").rstrip())
                own_log.unlink()
                return code
            time.sleep(_POLL_SECONDS)
    finally:  # also after Ctrl-C, after which the child continues
        if own_log.exists():
            own_log.replace(log)
        signal.signal(signal.SIGHUP, before)  # only now: a closed terminal would leave the log under its own name
    print_text(f"running in process {child.pid}; its output: {log}\n{then}")
    return ExitCode.MEASURED


def open_ledger(start: str = "") -> Ledger:
    """Return the ledger of this checkout. UsageError if it has no experiments. `start`: what the first one would do."""
    ledger = Ledger(process_root())
    if not ledger.numbers():
        raise UsageError("no experiments yet", f"Start one: uv run run.py{start}")
    return ledger


def process_root() -> Path:
    """Return the checkout: the nearest folder upwards with run.py and train.toml."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "run.py").is_file() and (folder / "train.toml").is_file():
            return folder
    raise UsageError(f"{os.fspath(here)} is not in a Nightshift checkout", "Go to the folder of run.py: cd FOLDER.")

"""One experiment, from train.toml to a verdict in the ledger, which has all state of the controller; and the bench on
which it runs: the rules, the engine and the executor, as machine, checkout and flags determine them."""

import itertools
import json
import math
import os
import platform
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from nightshift.campaign.campaign import Campaign, already_tried, close, crash, resume
from nightshift.campaign.commits import change_keys
from nightshift.campaign.git import CONFIG_NAME, START_SUBJECT, Repo
from nightshift.campaign.ledger import STARTED, Ledger, baseline_of, read_progress
from nightshift.campaign.metrics import METRICS_NAME, read_steps
from nightshift.campaign.records import (
    JOB_NAME,
    LATE_SECONDS,
    Evaluation,
    Job,
    Progress,
    Record,
    Request,
    Run,
    Stage,
    settings_of,
)
from nightshift.campaign.results import UNDECIDED, verdict_of
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import rules_here
from nightshift.config.scope import require_within
from nightshift.config.train_toml import Config, diff, load
from nightshift.engines.base import Engine, on_cards, open_engine, scaled_rates, used_keys
from nightshift.errors import EngineError, Failure, Interrupted, UsageError, listed
from nightshift.evaluation import environment
from nightshift.executors.base import Executor, Slot
from nightshift.executors.gpus import list_gpus, num_gpus, visible_gpus
from nightshift.executors.local import LocalExecutor, divide, num_slots_of, own_cores
from nightshift.executors.slurm import SlurmExecutor
from nightshift.executors.slurm import read as read_slurm
from nightshift.experiment.checkout import IntegrityError, continued, plan, require_unchanged
from nightshift.experiment.health import Conditions, digest
from nightshift.files import free_disk_gb
from nightshift.text import counted
from nightshift.waiting import lasted

_TICK_SECONDS = 0.5
_LEAST_DISK_BYTES = 10_000_000  # for a run, before a run of the campaign has ended. Estimated
_SUSPENDED_SECONDS = 30.0  # smaller jumps of the wall clock are adjustments


@dataclass(frozen=True)
class Bench:
    """Everything that one machine, one checkout and the flags determine about runs."""

    root: Path
    rules: Rules
    rules_hash: str
    engine: Engine
    executor: Executor[Any]
    request: Request
    engine_of: Mapping[str | None, Engine] = field(default_factory=dict)  # by the GPUs of a slot, if there are several

    def require_ready(self, slots: Sequence[Slot] | None = None) -> None:
        """Raise EngineError with the problems of the first of these slots that has some; None: the next run's slot."""
        for slot in self.executor.free_slots[:1] if slots is None else slots:
            if problems := self.engine_of.get(slot.gpus, self.engine).check():
                raise EngineError(" ".join(problems))

    def hardware(self, first: Record | None) -> str:
        """Return the hardware text of a run here. A cluster's is that of the campaign's `first` experiment."""
        return self.executor.hardware(self.engine.hardware()) or (first.hardware if first else "")

    @property
    def in_flight(self) -> list[int]:
        """The numbers of the experiments whose runs are in flight."""
        folders = self.executor.in_flight()
        return sorted(int(folder.name) for folder in folders if folder.name.isdigit())  # not a certificate's runs

    def next_seed(self, campaign: Campaign) -> int:
        """Return the first seed that no scored or running run of the campaign has. A lost run's seed is used again."""
        used = {record.result.seed for record in campaign.decided if record.result and record.result.evaluation}
        used |= {job.seed for job in self.executor.in_flight().values()}
        return next(seed for seed in itertools.count(self.rules.first_seed) if seed not in used)

    def job(self, settings: Mapping[str, Any], seed: int, hardware: str, **fields: Any) -> Job:
        """Return the job of one run. `fields`: further fields of Job."""
        return Job(
            rules=self.rules,
            rules_hash=self.rules_hash,
            settings=dict(settings),
            seed=seed,
            deadline_seconds=self.engine.deadline_seconds,
            token=secrets.token_hex(16),
            hardware=hardware or None,
            gpus=self.request.gpus,
            **fields,
        )


class Reporter(Protocol):
    """Shows the progress of experiments; cli/progress.py implements it."""

    def note(self, text: str) -> None:
        """Show a line."""

    def show(self, readings: Mapping[Path, Progress | None]) -> None:
        """Show the live line: the progress of the runs in these folders, None for a run that has not begun."""


@dataclass(slots=True)
class Controller:
    """Makes experiments. All methods except for `campaign` and `admit` need the lock (Ledger.lock)."""

    bench: Bench
    ledger: Ledger
    repo: Repo
    reporter: Reporter
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    clock: Callable[[], float] = time.monotonic  # seconds
    is_stopping: Callable[[], bool] = lambda: False  # True if the user wants that no run starts any more
    _folded: Campaign | None = field(default=None, init=False)
    _begins: dict[int, float] = field(default_factory=dict, init=False)  # of experiments, on the monotonic clock
    _ahead: float | None = field(default=None, init=False)  # wall clock minus monotonic clock, in seconds

    def folded(self) -> Campaign:
        """Return the campaign of the checked-out branch from its records, which are folded again if they changed."""
        records, branch, last = self.ledger.records(), self.repo.head().branch, self._folded
        if last is None or (last.branch, last.records) != (branch, records):
            last = self._folded = Campaign.of(records, branch, self.bench.rules_hash)
        return last.copy()

    def campaign(self) -> Campaign:
        """Return the campaign of the checked-out branch, with the decisions of the user's commits."""
        return self.folded().with_user_commits(self.ledger, self.repo)

    def begin(self, branch: str | None) -> None:
        """Check out the campaign's branch, and commit uncommitted files of its baseline. `branch`: --branch."""
        bench, repo, records = self.bench, self.repo, self.ledger.records()
        start = plan(repo, records, self.now(), bench.rules, bench.rules_hash, branch)
        if bench.request.baseline:  # fail without a baseline before a branch is created
            Campaign.read(self.ledger, records, start.head.branch, bench.rules_hash).compose(())
        if start.is_new or start.files:
            bench.engine.validate(load(bench.root / CONFIG_NAME))
        if start.head.branch != start.before.branch:
            repo.switch(start.head.branch, start.is_new)
        if start.files:
            subject = f"{START_SUBJECT}add {counted(len(start.files), 'uncommitted file')}"
            repo.commit_files(start.head, dict.fromkeys(start.files), "\n".join([subject, "", *start.files, ""]))
        if line := start.describe():
            self.reporter.note(line)

    def run(self, request: Request) -> Record:
        """Make one experiment. Return its closed record. Interrupted and IntegrityError close the record too."""
        try:
            config = load(self.bench.root / CONFIG_NAME)  # before `resume`, which may write the file
            resume(self.ledger, self.repo, self.reporter.note)
            record = self.start(request, config, self.campaign())
            while (closed := self.collect(record.number)) is None:
                self.wait()
            return closed
        except (Interrupted, IntegrityError) as error:
            self.interrupt(error.cause)
            raise
        finally:
            self.cancel()

    def first_to_compare(self) -> Record | None:
        """Return the campaign's first experiment. IntegrityError or UsageError if a run here is not comparable."""
        bench, first = self.bench, baseline_of(self.ledger.records(), self.repo.head().branch)
        if first is None:
            return None
        require_unchanged(self.repo, bench.rules, first.rules_hash, first.commit, bench.rules_hash)
        for what, old, new in (
            ("rules", first.rules_hash, bench.rules_hash),
            ("hardware", first.hardware, bench.hardware(first)),
        ):
            if old != new:
                cause = f"campaign {first.branch} began with {what} {old or 'unset'}; now: {new or 'unset'}"
                raise UsageError(cause, f"Begin another campaign: --branch NEW. Or restore the {what} of the campaign.")
        return first

    def admit(self, candidate: Config, request: Request, campaign: Campaign) -> Record:
        """Return the record of a new experiment, with number 0. UsageError or IntegrityError if it may not run."""
        bench, head = self.bench, self.repo.head()
        hardware = bench.hardware(self.first_to_compare())
        validated = bench.engine.validate(candidate)
        effective = json.loads(json.dumps(validated.settings, allow_nan=False))
        run, before, is_baseline = Run(), candidate, campaign.baseline is None or request.baseline
        if request.run is not None and not is_baseline:
            run, before = request.run, campaign.compose(replace(request.run, new=None).changes)
        elif not is_baseline:
            before = campaign.compose(campaign.kept)
            keys = change_keys(before, candidate)
            run = Run(kept=campaign.kept, new=campaign.known(keys) if keys else None)
        changes = diff(before, candidate)
        require_within(request.only, (change.key for change in changes), candidate)
        if request.again and run.new and (run.new.experiment or run.new.commit):
            run, changes = Run(kept=run.changes), ()  # the same changes, none of which is new
        is_repeatable = is_baseline or request.again or (request.run and request.run.new is None)
        if changes and not is_repeatable and bench.engine.validate(before).settings == validated.settings:
            cause = (
                f"all changes are to keys that this engine does not use: {listed([change.key for change in changes])}"
            )
            raise UsageError(cause, "Change a key that the engine uses, or run the config anyway: --again.")
        twins = [r for r in self.in_flight if run.new and r.run.new and r.run.new.keys == run.new.keys]
        decided = [*campaign.decided, *self.in_flight]
        tried = already_tried(decided, run, candidate.hash, effective) or next(iter(twins), None)
        if tried and not is_repeatable:
            cause = (
                f"these values were already tried in experiment {tried.number:04d} ({verdict_of(tried) or UNDECIDED})"
            )
            raise UsageError(cause, f"Change a key that {bench.engine.name} uses, or repeat it: --again.")
        config = "the incumbent" if run.changes == campaign.kept else "an earlier config"
        if run.is_baseline:
            config = "the baseline"
        kind = "re-run" if run.stage is Stage.SEARCH else "final check run"
        name = f"{kind} of {config}" if campaign.baseline else "baseline"
        description = request.proposal.description or ", ".join(change.line for change in changes) or name
        return Record(
            number=0,
            status=STARTED,
            branch=head.branch,
            commit=head.commit,
            started=self.now().isoformat(timespec="milliseconds"),
            parent=campaign.parent.number if campaign.parent else None,
            decided_before=self.ledger.num_decided(),
            user_decisions=campaign.user_decisions,
            proposal=replace(request.proposal, description=description),
            run=run,
            diff=tuple(change.line for change in changes),
            scaled=scaled_rates(candidate, bench.rules.learning_rate_scale),
            unused_keys=tuple(path for path in candidate.values if path in validated.unused),
            config_hash=candidate.hash,
            effective=effective,
            rules_name=bench.rules.name,
            rules_hash=bench.rules_hash,
            decision_rules=bench.rules.decision,
            budget_seconds=bench.rules.budget_seconds,
            engine=bench.engine.name,
            versions={"python": platform.python_version(), "nightshift": metadata.version("nightshift")},
            hardware=hardware,
            num_starts=1 + sum((r.branch, r.effective) == (head.branch, effective) for r in campaign.records),
        )

    def start(self, request: Request, config: Config, campaign: Campaign) -> Record:
        """Admit a config, reserve a number, and submit the run. Return the record, which is closed if this failed."""
        if request.baseline:
            config = campaign.compose(())
        record, rules = self.admit(config, request, campaign), self.bench.rules
        self.bench.require_ready()
        self.require_disk(campaign)
        record = self.ledger.reserve(record, config.source, self.repo.last_experiment())
        self._begins[record.number] = self.clock()
        limits = f"{rules.budget_text} for training, at most {lasted(self.bench.engine.deadline_seconds)} in total"
        self.reporter.note(f"experiment {record.number:04d}: {limits}")
        try:
            parent = campaign.parent and self.ledger.stored_config(campaign.parent)
            incumbent = dict(self.bench.engine.validate(parent).settings) if parent else None  # paths of this checkout
            job = self.bench.job(record.effective, self.bench.next_seed(campaign), record.hardware, incumbent=incumbent)
            self.ledger.sync_tsv()
            self.submit(self.ledger.run_dir(record.number), job)
        except (EngineError, UsageError, OSError) as error:
            return self.conclude(crash(record, Failure.INFRASTRUCTURE, str(error)))
        return record

    def require_disk(self, campaign: Campaign) -> None:
        """Raise EngineError if the disk is too small for all runs in flight, by the size of the last run."""
        sizes = (r.result.disk_bytes for r in reversed(campaign.decided) if r.result and r.result.disk_bytes)
        needed = next(sizes, _LEAST_DISK_BYTES) * (1 + len(self.bench.in_flight)) / 1e9
        if (free := free_disk_gb(self.ledger.runs_dir)) < needed:
            cause = f"{free:.3f} GB of disk are free, and the runs in flight and the next one need {needed:.3f} GB"
            raise EngineError(cause, "Run: du -sh runs/*; then delete old ones.")

    def submit(self, run_dir: Path, job: Job, **access: Any) -> None:
        """Start a worker. Its job, with any `access` to the test split, is in the journal before the worker starts."""
        self.bench.executor.submit(run_dir, job, lambda: self.ledger.log(run_dir / JOB_NAME, **access))

    def collect(self, number: int) -> Record | None:
        """Judge and close an experiment; None while its run or its proof is in flight. Raises IntegrityError."""
        record, bench, run_dir = self.ledger.record(number), self.bench, self.ledger.run_dir(number)
        if record.status != STARTED:
            return record
        if not bench.executor.is_over(run_dir):
            return None
        if (branch := self.repo.head().branch) != record.branch:
            cause = f"the checkout moved from {record.branch} to {branch or 'a detached HEAD'}"
            raise IntegrityError(cause, f"Go back: git switch {shlex.quote(record.branch)}")
        campaign = self.folded()
        first = campaign.baseline
        baseline = self.ledger.stored_config(first) if first else None
        require_unchanged(self.repo, bench.rules, record.rules_hash, (first or record).commit, bench.rules_hash)
        try:
            result = bench.executor.result(run_dir)
            record = replace(record, result=result, hardware=record.hardware or result.hardware)
            if result.evaluation is None:
                failure = result.training.failure or Failure.INFRASTRUCTURE
                raise EngineError(result.training.cause or "no cause known", failure=failure)
            record = campaign.judge(record, baseline, bench.engine.validate)
            if record.is_keep or record.is_incumbent:
                record = replace(record, health=self.prove(run_dir, result.evaluation))
        except (EngineError, UsageError, OSError) as error:
            failure = error.failure if isinstance(error, EngineError) else Failure.INFRASTRUCTURE
            return self.conclude(crash(record, failure, str(error)))
        except Interrupted as error:  # the run is not in flight any more
            self.conclude(crash(record, Failure.INTERRUPTED, f"interrupted: {error.cause}"))
            raise
        return self.conclude(record, result.evaluation.unscored)

    def prove(self, run_dir: Path, evaluation: Evaluation) -> str | None:
        """Wait for the proof that the weights in `run_dir` were scored. Return its line; None if the engine needs no
        proof. EngineError if the proof fails."""
        proof = self.bench.engine.start_proof(run_dir, evaluation.weights, self.reporter.note)
        if proof is None:
            return None
        with closing(proof):
            while not proof.is_over():
                self.wait()
            return proof.result()

    def conclude(self, record: Record, remarks: Sequence[str] = ()) -> Record:
        """Close an experiment that has its verdict. Return the closed record. `remarks`: on its scores."""
        if record.decided is None and record.failure in (None, Failure.CONFIG):
            record = replace(record, decided=self.ledger.num_decided() + 1)
        # The monotonic clock excludes suspensions. If another process started the run, the worker's clock is left.
        began = self._begins.pop(record.number, None)
        seconds = None if began is None else self.clock() - began
        lines = [record.health] if record.health else []
        if record.result is not None:
            seconds = max(seconds or 0.0, record.result.total_seconds)
            try:
                config, steps = self.ledger.stored_config(record), self.ledger.run_dir(record.number) / METRICS_NAME
                keys = used_keys(self.bench.engine, config)
                num_steps, new = self._steps_without_new(record), tuple(record.run.new.keys) if record.run.new else ()
                conditions = Conditions(record.result, self.bench.rules, config.resolved, keys, remarks, num_steps, new)
                lines += map(str, digest(read_steps(steps), conditions))
            except UsageError as error:  # the verdict does not depend on the curves
                lines.append(f"the curves were not examined: {error}")
        record = replace(record, total_seconds=seconds, health="\n".join(lines) or None)
        return close(record, self.ledger, self.repo)

    def _steps_without_new(self, record: Record) -> int | None:
        """Return the number of steps of the parent's run; None if its config was not that of `record` without the new
        change."""
        parent = self.ledger.read(record.parent) if record.parent and record.run.new else None
        if parent is None or parent.result is None:
            return None
        is_same = settings_of(parent.run.changes) == settings_of(replace(record.run, new=None).changes)
        return parent.result.training.num_steps if is_same else None

    @property
    def in_flight(self) -> tuple[Record, ...]:
        """The experiments whose runs are in flight."""
        return tuple(map(self.ledger.record, self.bench.in_flight))

    def wait(self) -> None:
        """Wait until a run in flight ends, at most half a second. Then show the progress of the others. If this machine
        was suspended, report for how long: the monotonic clock, which limits training, stops meanwhile."""
        self.bench.executor.wait(_TICK_SECONDS)
        self.reporter.show({folder: read_progress(folder) for folder in self.bench.executor.in_flight()})
        before, self._ahead = self._ahead, self.now().timestamp() - self.clock()
        seconds = 0.0 if before is None else self._ahead - before
        if seconds >= _SUSPENDED_SECONDS:
            was = f"this machine was suspended for {lasted(seconds)}, or its clock was set forward"
            self.reporter.note(f"{was}; this does not count as training time")

    def cancel(self) -> None:
        """Cancel all runs that were not collected."""
        self.bench.executor.cancel([*self.bench.executor.in_flight()])

    def interrupt(self, cause: str) -> None:
        """End the runs in flight and close their records as interrupted, unless a record already has a verdict."""
        numbers = {*self.bench.in_flight, *self.ledger.numbers()[-1:]}
        self.cancel()
        for record in self.ledger.records():
            if record.number in numbers and record.status == STARTED:
                self.conclude(crash(record, Failure.INTERRUPTED, f"interrupted: {cause}"))
            elif record.number in numbers and record.git_action is None:
                close(record, self.ledger, self.repo)


def open_controller(root: Path, request: Request, reporter: Reporter, branch: str | None = None) -> Controller:
    """Return a controller of this checkout, without the lock. If a campaign continues, the controller has the engine
    and the budget of the campaign, unless flags name others. `branch`: --branch."""
    ledger, repo, environ = Ledger(root), Repo(root), dict(os.environ)
    records, here = ledger.records(), repo.head().branch
    first = baseline_of(records, here) or baseline_of(records, continued(repo, records, None))
    first = first if first and branch in (None, first.branch) else None
    cluster = None if request.slurm is None else read_slurm(request.slurm)
    num_gpus_here = num_gpus(environ) if cluster is None else cluster.gpus
    rules = rules_here(root, request.engine or (first.engine if first else None), num_gpus_here)
    environment.load(root, rules.scored)
    rules = on_cards(rules, root, environ, request.gpus)
    if request.budget_seconds is not None:
        rules = rules.with_budget(request.budget_seconds)
    elif first and first.budget_seconds:
        in_its_budget = rules.with_budget(first.budget_seconds)
        rules = in_its_budget if in_its_budget.hash(root) == first.rules_hash else rules
    engine, rules_hash = open_engine(rules, root, environ, request.gpus, request.prime_rl), rules.hash(root)
    if first is not None and first.branch != here and first.rules_hash != rules_hash:
        first = baseline_of(records, continued(repo, records, rules_hash))
    num_slots = 1 if request.pairs is None else request.pairs  # 0: --pairs auto
    if not request.pairs and first is not None:
        num_slots = num_slots_of(first.hardware)
    if num_slots == 0 and cluster is None and (fitting := engine.capacity()) is not None:
        num_slots = fitting.num_runs
        reporter.note(f"--pairs auto: {fitting}")
    if request.pairs == 0 and first is not None:
        fix = "--branch NEW begins a campaign with another number"
        reporter.note(f"--pairs auto: {counted(num_slots, 'run')} at a time, as {first.branch} began; {fix}")
    executor: Executor[Any] = LocalExecutor(root, environ)
    if cluster is not None:
        for name, value, needed in (
            ("time_minutes", cluster.time_minutes, math.ceil((engine.deadline_seconds + LATE_SECONDS) / 60.0)),
            ("gpus", cluster.gpus, rules.num_gpus),
        ):
            if value < needed and request.gpus is None:
                cause = f"{request.slurm}: {name} = {value}, and a run of {rules.name} needs {needed}"
                raise UsageError(cause, f"Write {needed} or more.")
        executor = SlurmExecutor(root, environ, cluster)
    elif num_slots != 1:
        if request.gpus is not None:
            cause = f"--gpus {request.gpus} names the GPUs of one run"
            raise UsageError(cause, "Leave it out: --pairs uses all GPUs in order.")
        num_each = len({*engine.gpus()})
        indices = [gpu.index for gpu in visible_gpus(list_gpus(), environ)] if num_each else []
        executor = LocalExecutor(root, environ, divide(num_slots, indices, num_each, own_cores()))
    engine_of: Mapping[str | None, Engine] = {
        slot.gpus: open_engine(rules, root, environ, slot.gpus, request.prime_rl)
        for slot in executor.free_slots
        if slot.gpus
    }
    return Controller(Bench(root, rules, rules_hash, engine, executor, request, engine_of), ledger, repo, reporter)

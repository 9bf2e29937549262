"""One experiment: from train.toml to a verdict in the ledger, from which a controller reads all that it needs."""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from nightshift.campaign.campaign import Campaign, already_tried
from nightshift.campaign.commits import change_keys
from nightshift.campaign.finish import close, crash, resume
from nightshift.campaign.git import CONFIG_NAME, START_SUBJECT, Repo
from nightshift.campaign.journal import Access, Event
from nightshift.campaign.ledger import STARTED, Ledger, baseline_of, read_progress, require_same_setup
from nightshift.campaign.metrics import METRICS_NAME, read_steps
from nightshift.campaign.records import JOB_NAME, Job, Phase, Progress, Record, Request, Run
from nightshift.config.allowlist import shorten
from nightshift.config.scope import require_within
from nightshift.config.train_toml import Config, diff, load
from nightshift.engines.base import used_keys
from nightshift.errors import EngineError, Failure, Interrupted, UsageError
from nightshift.experiment.bench import Bench, open_bench
from nightshift.experiment.branch import plan
from nightshift.experiment.health import Conditions, digest
from nightshift.experiment.integrity import IntegrityError, require_branch, require_unchanged
from nightshift.waiting import lasted

_LONGEST = 200  # characters of a list in a refusal, which is one line
_TICK_SECONDS = 0.5


class Reporter(Protocol):
    """Where an experiment tells how it goes; cli/progress.py implements it."""

    def note(self, text: str) -> None:
        """Show a line of news."""

    def show(self, readings: Mapping[Path, Progress | None]) -> None:
        """Show the live line: how far the runs in these folders are, None for a run that has not begun."""


@dataclass(slots=True)
class Controller:
    """What runs experiments. All methods but `campaign` and `admit` need the lock (Ledger.lock)."""

    bench: Bench
    ledger: Ledger
    repo: Repo
    reporter: Reporter
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    clock: Callable[[], float] = time.monotonic  # seconds
    is_stopping: Callable[[], bool] = lambda: False  # a person asked for it: start nothing new
    _folded: Campaign | None = field(default=None, init=False)

    def folded(self) -> Campaign:
        """Return the campaign of the branch that is checked out, as its records have it. Only new ones are folded."""
        records, branch = self.ledger.records(), self.repo.head().branch
        self._folded = Campaign.of(records, branch, self.bench.rules_hash, self._folded)
        self._folded.read_config(self.ledger)
        return self._folded

    def campaign(self) -> Campaign:
        """Return the same with what your own commits since its last experiment decided."""
        return self.folded().with_user_commits(self.ledger, self.repo)

    def begin(self, branch: str | None) -> None:
        """Check out the campaign's branch, and commit what is not committed of its baseline. `branch`: --branch."""
        bench, repo = self.bench, self.repo
        while True:
            start = plan(repo, self.ledger.records(), self.now(), bench.rules, bench.rules_hash, branch)
            if bench.request.baseline and not start.num_experiments:
                raise UsageError("there is no baseline to run once more", "Run the first one: uv run run.py")
            if start.is_new or start.files:
                bench.engine.validate(load(bench.root / CONFIG_NAME))
            if start.is_switch:
                repo.switch(start.head.branch)
            if not start.is_new or repo.create_branch(start.head.branch):
                break  # else another worktree created the branch at this moment
        if start.files:
            names = f"{len(start.files)} files as they were" if start.files[1:] else f"{start.files[0]} as it was"
            message = "\n".join([f"{START_SUBJECT}{names}", "", *start.files, ""])
            repo.commit_files(start.head, dict.fromkeys(start.files), message)
        if line := start.describe(is_done=True):
            self.reporter.note(line)

    def run(self, request: Request) -> Record:
        """Make one experiment. Return its closed record. Only Interrupted and IntegrityError follow a record."""
        try:
            config = load(self.bench.root / CONFIG_NAME)  # first: `resume` may write the file
            resume(self.ledger, self.repo, self.reporter.note)
            record = self.start(request, config, self.campaign())
            while (closed := self.collect(record.number)) is None:
                self.wait()  # while the worker trains and evaluates
            return closed
        except (Interrupted, IntegrityError) as error:
            self.interrupt(error.cause)
            raise
        finally:
            self.cancel()

    def first_to_compare(self, records: Sequence[Record]) -> Record | None:
        """Return the campaign's first experiment. IntegrityError or UsageError if a run here would not compare."""
        bench, first = self.bench, baseline_of(records, self.repo.head().branch)
        if first is not None:
            require_unchanged(self.repo, bench.rules, first.rules_hash, first.commit, bench.rules_hash)
            require_same_setup(first, bench.engine.name, bench.rules_hash, bench.hardware(first), bench.variables)
        return first

    def admit(self, candidate: Config, request: Request, campaign: Campaign) -> Record:
        """Return the record of an experiment to come, with number 0. UsageError or IntegrityError if it may not run."""
        bench, head = self.bench, self.repo.head()
        hardware = bench.hardware(self.first_to_compare(campaign.records))
        validated = bench.engine.validate(candidate)
        settings = json.dumps(validated.settings, sort_keys=True, indent=1, allow_nan=False)
        effective_hash = hashlib.sha256(settings.encode()).hexdigest()[:12]
        run, before, is_baseline = Run(), candidate, campaign.baseline is None or request.baseline
        if request.run is not None and not is_baseline:
            run, before = request.run, campaign.compose(replace(request.run, new=None).changes)
        elif not is_baseline:
            before = campaign.compose(campaign.kept)
            keys = change_keys(before, candidate)
            run = Run(kept=campaign.kept, new=campaign.known(keys) if keys else None)
            if request.again and run.new and (run.new.experiment or run.new.commit):
                run, before = Run(kept=run.changes), candidate  # the same changes, none of them new
        differences = diff(before, candidate)
        changes = tuple(change.line for change in differences)
        require_within(request.only, (change.key for change in differences), candidate)
        if not (is_baseline or request.again or (request.run and request.run.new is None)):
            if tried := already_tried(campaign.decided, run, candidate.hash):
                effect = tried.decision and tried.decision.estimate
                outcome = f"{tried.status}, effect {effect}" if effect else tried.status
                cause = f"this config was already tried in experiment {tried.number:04d} ({outcome})"
                raise UsageError(cause, "Change train.toml, or repeat it with a new seed: --again.")
            for other in self.in_flight:
                is_same = run.new and other.run.new and other.run.new.keys == run.new.keys
                if is_same or other.config_hash == candidate.hash:
                    raise UsageError(f"this config is in flight as experiment {other.number:04d}", "Change train.toml.")
            if changes and bench.engine.validate(before).settings == validated.settings:
                text = shorten(", ".join(changes), _LONGEST)
                cause = f"the only changes are to keys that this engine does not use: {text}"
                raise UsageError(cause, "Change a key that it uses, or run it all the same: --again.")
        name = "baseline " if run.is_baseline else "incumbent " if run.changes == campaign.kept else ""
        name = f"{name}again" if campaign.baseline else "baseline"
        description = request.proposal.description or ", ".join(changes) or name
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
            diff=changes,
            scaled=validated.scaled,
            unused_keys=validated.unused,
            config_hash=candidate.hash,
            effective_hash=effective_hash,
            effective=dict(validated.settings),
            rules_name=bench.rules.name,
            rules_hash=bench.rules_hash,
            decision_rules=bench.rules.decision,
            budget_seconds=bench.rules.budget_seconds,
            engine=bench.engine.name,
            versions={"python": platform.python_version(), "nightshift": metadata.version("nightshift")}
            | bench.variables,
            hardware=hardware,
            num_starts=1 + sum((r.branch, r.effective_hash) == (head.branch, effective_hash) for r in campaign.records),
        )

    def start(self, request: Request, config: Config, campaign: Campaign) -> Record:
        """Admit a config, reserve its number, and submit its run. Return the record, closed if that failed."""
        if request.baseline:
            config = campaign.compose(())
        record, rules = self.admit(config, request, campaign), self.bench.rules
        self.bench.require_ready()
        record = self.ledger.reserve(record, {CONFIG_NAME: config.source}, self.repo.last_experiment())
        limits = f"{rules.budget_text} for training, at most {lasted(rules.deadline_seconds)} in all"
        self.reporter.note(f"experiment {record.number:04d}: {limits}")
        try:
            parent = campaign.parent and self.ledger.stored_config(campaign.parent)
            # Validated again: its record lies where agents can write.
            incumbent = dict(self.bench.engine.validate(parent).settings) if parent else None
            job = self.bench.job(record.effective, self.bench.next_seed(campaign), record.hardware, incumbent=incumbent)
            self.submit(self.ledger.run_dir(record.number), job)
            self.ledger.sync_tsv()
        except (EngineError, UsageError, OSError) as error:
            self.cancel(record.number)
            return self.conclude(crash(record, Failure.INFRASTRUCTURE, str(error)))
        return record

    def submit(self, run_dir: Path, job: Job, access: Access | None = None) -> None:
        """Start a worker. The journal has its job, and its `access` to the test split, before the worker starts."""
        event: Event = "access" if access else "submitted"
        self.bench.executor.submit(run_dir, job, lambda: self.ledger.log(event, run_dir / JOB_NAME, access=access))

    def collect(self, number: int) -> Record | None:
        """Judge and close an experiment; None while its run or its proof is in flight: a keep has its proof first.

        IntegrityError if measuring files changed.
        """
        record, bench, run_dir = self.ledger.record(number), self.bench, self.ledger.run_dir(number)
        if record.status != STARTED:
            return record
        if not bench.is_over(run_dir):
            return None
        require_branch(self.repo, record.branch)
        campaign = self.folded()
        commit = (campaign.baseline or record).commit
        require_unchanged(self.repo, bench.rules, record.rules_hash, commit, bench.rules_hash)
        result, proof = bench.proofs.pop(run_dir, (None, None))
        try:
            result = result or bench.executor.result(run_dir)
            record = replace(record, result=result, hardware=record.hardware or result.hardware)
            if result.hardware not in ("", record.hardware):
                raise EngineError(f"the run was made on {result.hardware}, and the campaign's on {record.hardware}")
            if proof is not None:
                record = replace(record, health=proof.result())
        except (EngineError, UsageError, OSError) as error:
            return self.conclude(crash(record, Failure.INFRASTRUCTURE, str(error)))
        if result.evaluation is None:
            failure = result.training.failure or Failure.INFRASTRUCTURE
            return self.conclude(crash(record, failure, result.training.cause or "no cause known"))
        record = campaign.judge(record, validate=bench.engine.validate)
        if proof is None and (record.is_keep or record.is_incumbent):
            try:  # the engine proves that the weights that stay are those that were scored
                proof = bench.engine.start_proof(run_dir, result.evaluation.weights, self.reporter.note)
            except EngineError as error:
                return self.conclude(crash(record, Failure.INFRASTRUCTURE, str(error)))
            if proof is not None:
                bench.proofs[run_dir] = result, proof
                return None
        return self.conclude(record, campaign.remarks(record))

    def conclude(self, record: Record, remarks: Sequence[str] = ()) -> Record:
        """Close an experiment that has its verdict. Return the closed record. `remarks`: on its scores."""
        if record.decided is None and record.failure in (None, Failure.CONFIG):
            record = replace(record, decided=self.ledger.num_decided() + 1)
        # A wall clock may be set back: no less than its run took.
        seconds = (self.now() - datetime.fromisoformat(record.started)).total_seconds()
        lines = [record.health] if record.health else []
        if record.result is not None:
            seconds = max(seconds, record.result.total_seconds)
            try:
                config = self.ledger.stored_config(record)
                keys = used_keys(self.bench.engine, config)
                conditions = Conditions(record.result, self.bench.rules, config.resolved, keys, remarks)
                lines += map(str, digest(read_steps(self.ledger.run_dir(record.number) / METRICS_NAME), conditions))
            except UsageError as error:  # no reason to lose a verdict
                lines.append(f"the curves were not examined: {error}")
        record = replace(record, total_seconds=max(seconds, 0.0), health="\n".join(lines) or None)
        return close(record, self.ledger, self.repo)

    @property
    def in_flight(self) -> tuple[Record, ...]:
        """The experiments whose runs or proofs are in flight."""
        return tuple(map(self.ledger.record, self.bench.in_flight))

    def wait(self) -> None:
        """Wait until a run in flight ends, half a second at most; then report how far the others are."""
        executor, starting = self.bench.executor, Progress(Phase.STARTING, 0)
        executor.wait(_TICK_SECONDS)
        folders = executor.in_flight()
        self.reporter.show({f: read_progress(f) or (starting if executor.has_begun(f) else None) for f in folders})

    def cancel(self, number: int | None = None) -> None:
        """Cancel the runs that were not collected, and the proofs; with `number` only the run of that experiment."""
        executor, proofs = self.bench.executor, self.bench.proofs
        folders = [*executor.in_flight(), *proofs] if number is None else [self.ledger.run_dir(number)]
        executor.cancel(folders)
        for folder in folders:
            if folder in proofs:
                proofs.pop(folder)[1].close()

    def interrupt(self, cause: str) -> None:
        """End the runs in flight and close their records: as interrupted, unless a record has its verdict already."""
        numbers = self.bench.in_flight
        self.cancel()
        records = self.ledger.records()
        for record in records:
            if record.git_action is not None or (record.number not in numbers and record is not records[-1]):
                continue
            if record.status == STARTED:
                self.conclude(crash(record, Failure.INTERRUPTED, f"interrupted: {cause}"))
            else:
                close(record, self.ledger, self.repo)


def open_controller(root: Path, request: Request, reporter: Reporter, branch: str | None = None) -> Controller:
    """Return a controller of this checkout, which does not hold the lock yet. `branch`: --branch."""
    ledger, repo = Ledger(root), Repo(root)
    return Controller(open_bench(repo, ledger.records(), request, reporter.note, branch), ledger, repo, reporter)

"""The set-up that experiments run in: what this machine, this checkout and these flags mean."""

import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import user_decisions
from nightshift.campaign.finish import uncommitted
from nightshift.campaign.git import CONFIG_NAME, Head, Repo
from nightshift.campaign.journal import Access, Event
from nightshift.campaign.ledger import Ledger, baseline_of, fixed_variables, read_progress
from nightshift.campaign.records import JOB_NAME, LATE_SECONDS, Job, Phase, Progress, Record, Request
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import rules_here
from nightshift.config.train_toml import load as load_config
from nightshift.engines.base import Engine, on_cards, open_engine
from nightshift.engines.prime_rl import remains
from nightshift.errors import UsageError
from nightshift.evaluation.environment import load
from nightshift.executors.gpus import list_gpus, num_gpus, visible_gpus
from nightshift.executors.leftovers import end_leftovers
from nightshift.executors.local import LocalExecutor
from nightshift.executors.slots import divide, num_slots_of, own_cores
from nightshift.executors.slurm import SlurmExecutor
from nightshift.executors.slurm import read as read_slurm
from nightshift.experiment.branch import continued, plan

_TICK_SECONDS = 0.5


class Reporter(Protocol):
    """Where an experiment tells how it goes; cli/progress.py implements it."""

    def note(self, text: str) -> None:
        """One line of news."""

    def show(self, readings: Mapping[Path, Progress | None]) -> None:
        """How far the runs in these folders are, None where none has begun: the live line."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All that an experiment needs of the world."""

    root: Path
    rules: Rules
    rules_hash: str
    engine: Engine
    ledger: Ledger
    repo: Repo
    executor: LocalExecutor | SlurmExecutor
    variables: dict[str, str]  # of this process, those that a campaign fixes
    reporter: Reporter
    request: Request
    now: Callable[[], datetime]  # aware, UTC
    clock: Callable[[], float]  # monotonic seconds
    is_stopping: Callable[[], bool] = lambda: False  # a person asked for it: start nothing new
    # By the GPUs of its slot, where it has its own: each holds them as long as it lives.
    engine_of: Mapping[str | None, Engine] = field(default_factory=dict)

    def campaign(self) -> Campaign:
        """Return the campaign of the branch that is checked out, with what your own commits since its last experiment
        decided. While git lacks a commit of ours, your changes cannot be told from ours, and are not read."""
        records, branch = self.ledger.records(), self.repo.head().branch
        campaign = Campaign.of(records, branch, self.rules_hash)
        if campaign.baseline is None:
            return campaign
        campaign.config = self.ledger.stored_config(campaign.baseline)
        if uncommitted(records, branch):
            return campaign
        ours = [record for record in records if record.branch == branch]
        ids = {id for record in ours for id in record.commits.values()}
        ids |= {decision.commit for record in ours for decision in record.user_decisions if decision.commit}
        decisions = user_decisions(self.repo, Head(branch, ours[-1].commit), campaign.config, campaign.kept, ids)
        return campaign.with_user_decisions(decisions) if decisions else campaign

    def begin(self, branch: str | None) -> None:
        """Check out the campaign's branch, and commit what is not committed of its baseline. `branch`: --branch.

        Call as the controller, when the engine was checked. After a kill the next start continues.
        """
        while True:
            start = plan(self.repo, self.ledger.records(), self.now(), self.rules, self.rules_hash, branch)
            if self.request.baseline and not start.num_experiments:
                raise UsageError("there is no baseline to run once more", "Run the first one: uv run run.py")
            if start.is_new or start.files:
                self.engine.validate(load_config(self.root / CONFIG_NAME))
            if start.is_switch:
                self.repo.switch(start.head.branch)
            if not start.is_new or self.repo.create_branch(start.head):
                break  # else another worktree created the branch at this moment
        if start.files:
            self.repo.commit_blobs(start.head, self.repo.working_blobs(start.files), start.message)
        if line := start.describe(is_done=True):
            self.reporter.note(line)

    def hardware(self, first: Record | None) -> str:
        """Return what a run has here, as records name it; of a cluster what the campaign's `first` experiment had."""
        return self.executor.hardware(self.engine.hardware()) or (first.hardware if first else "")

    def experiments_in_flight(self) -> set[int]:
        """The numbers of the experiments whose runs are in flight; a certificate's runs have other names."""
        return {int(folder.name) for folder in self.executor.in_flight() if folder.name.isdigit()}

    @property
    def in_flight(self) -> tuple[Record, ...]:
        return tuple(map(self.ledger.record, sorted(self.experiments_in_flight())))

    def next_seed(self, campaign: Campaign) -> int:
        """Return the first seed that no scored and no running run of the campaign has: a lost run keeps its seed."""
        results = [record.result for record in campaign.decided if record.evaluation]
        used = {result.seed for result in results if result} | {job.seed for job in self.executor.in_flight().values()}
        return next(seed for index in itertools.count() if (seed := self.rules.seed(index)) not in used)

    def job(self, settings: Mapping[str, Any], seed: int, hardware: str = "", **fields: Any) -> Job:
        """Return the job of one run. `fields`: of Job, besides those of the set-up."""
        return Job(
            rules=self.rules,
            rules_hash=self.rules_hash,
            settings=dict(settings),
            seed=seed,
            deadline_seconds=self.rules.deadline_seconds,
            token=secrets.token_hex(16),
            hardware=hardware or None,
            gpus=self.request.gpus,
            keep_all=self.request.keep_all,
            **fields,
        )

    def submit(self, run_dir: Path, job: Job, access: Access | None = None) -> None:
        """Start a worker. The journal has its job, and its `access` to the test split, before the worker starts."""
        event: Event = "access" if access else "submitted"
        self.executor.submit(run_dir, job, lambda: self.ledger.log(event, run_dir / JOB_NAME, access))

    def cancel(self, number: int | None = None) -> None:
        """Cancel the runs that were not collected; with `number` only the run of that experiment."""
        in_flight = self.executor.in_flight()
        self.executor.cancel([f for f in in_flight if number is None or f == self.ledger.run_dir(number)])

    def wait(self) -> None:
        """Wait until a run in flight ends, half a second at most; then report how far the others are."""
        self.executor.wait(_TICK_SECONDS)
        readings = dict[Path, Progress | None]()
        for folder in self.executor.in_flight():
            starting = Progress(Phase.STARTING, 0) if self.executor.has_begun(folder) else None
            readings[folder] = read_progress(folder) or starting
        self.reporter.show(readings)


def sweep(root: Path, note: Callable[[str], None]) -> None:
    """End what a killed controller left running; delete its weights and rollouts. Call as the controller."""
    end_leftovers(root, note)
    remains.sweep(root / "runs")


def open_setup(root: Path, request: Request, reporter: Reporter, branch: str | None = None) -> Setup:
    """Return all that an experiment needs here. Engine and budget are those of the campaign that continues, unless a
    flag names them. `branch`: --branch."""
    ledger, repo, environ = Ledger(root), Repo(root), dict(os.environ)
    records, here = ledger.records(), repo.head().branch
    first = baseline_of(records, here)
    if first is None and (campaign := continued(repo, records, None)) is not None:
        first = baseline_of(records, campaign.branch)
    if first is not None and branch not in (None, first.branch):
        first = None
    cluster = None if request.slurm is None else read_slurm(request.slurm)
    num_gpus_here = num_gpus(environ) if cluster is None else cluster.gpus
    rules = rules_here(root, request.engine or (first.engine if first else None), num_gpus_here)
    load(root, rules.environments)
    if request.budget_seconds is not None:
        rules = rules.with_budget(request.budget_seconds)
    rules = on_cards(rules, root, environ, request.gpus)
    if first is not None and request.budget_seconds is None and first.budget_seconds != rules.budget_seconds:
        with suppress(UsageError):  # no budget: the record lies where agents can write
            in_its_budget = rules.with_budget(first.budget_seconds or 0.0)
            rules = in_its_budget if in_its_budget.hash(root) == first.rules_hash else rules
    if cluster is not None and 60.0 * cluster.time_minutes < rules.deadline_seconds + LATE_SECONDS:
        least = math.ceil((rules.deadline_seconds + LATE_SECONDS) / 60.0)
        cause = f"{request.slurm}: time_minutes = {cluster.time_minutes} is less than a run may take"
        raise UsageError(cause, f"Write {least} or more.")
    engine = open_engine(rules, root, environ, request.gpus, request.keep_all, request.prime_rl)
    rules_hash = rules.hash(root)
    if first is not None and first.branch != here and first.rules_hash != rules_hash:
        campaign = continued(repo, records, rules_hash)
        first = None if campaign is None else baseline_of(records, campaign.branch)
    num_slots = request.pairs
    if num_slots is None:
        num_slots = num_slots_of(first.hardware) if first else 1
    elif num_slots == 0 and cluster is None and (fitting := engine.capacity()) is not None:
        num_slots, text = fitting.num_runs, f"--pairs auto: {fitting}"
        if first is not None and num_slots_of(first.hardware) != num_slots:  # free memory changes, a campaign does not
            num_slots = num_slots_of(first.hardware)
            text += f"; {first.branch} began with {num_slots} and keeps to that: --branch NEW begins another campaign"
        reporter.note(text)
    executor: LocalExecutor | SlurmExecutor = LocalExecutor(root, environ)
    if cluster is not None:
        executor = SlurmExecutor(root, environ, cluster)
    elif num_slots != 1:
        if request.gpus is not None:
            fix = "Leave it out: --pairs takes them in order."
            raise UsageError(f"--gpus {request.gpus} names the GPUs of one run", fix)
        num_each = len({*engine.gpu_ids()})
        ids = [gpu.index for gpu in visible_gpus(list_gpus(), environ)] if num_each else []
        executor = LocalExecutor(root, environ, tuple(divide(num_slots, ids, num_each, own_cores())))
    gpus = [slot.gpus for slot in executor.free_slots if slot.gpus]
    return Setup(
        root=root,
        rules=rules,
        rules_hash=rules_hash,
        engine=engine,
        ledger=ledger,
        repo=repo,
        executor=executor,
        variables=fixed_variables(environ),
        reporter=reporter,
        request=request,
        now=lambda: datetime.now(UTC),
        clock=time.monotonic,
        engine_of={each: open_engine(rules, root, environ, each, request.keep_all, request.prime_rl) for each in gpus},
    )

"""Where experiments run: the rules, the engine and the executor that machine, checkout and flags mean."""

import itertools
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import FIXED_VARIABLES, baseline_of
from nightshift.campaign.records import LATE_SECONDS, Job, Record, Request, Result
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import rules_here
from nightshift.engines.base import Engine, Proof, on_cards, open_engine
from nightshift.errors import EngineError, UsageError
from nightshift.evaluation.environment import load
from nightshift.executors.gpus import list_gpus, num_gpus, visible_gpus
from nightshift.executors.local import LocalExecutor, Slot, divide, num_slots_of, own_cores
from nightshift.executors.slurm import SlurmExecutor
from nightshift.executors.slurm import read as read_slurm
from nightshift.experiment.branch import continued


@dataclass(frozen=True, slots=True)
class Bench:
    root: Path
    rules: Rules
    rules_hash: str
    engine: Engine
    executor: LocalExecutor | SlurmExecutor
    variables: dict[str, str]  # of this process, those that a campaign fixes
    request: Request
    # By the GPUs of its slot, where it has its own: each holds them as long as it lives.
    engine_of: Mapping[str | None, Engine] = field(default_factory=dict)
    # Proofs under way, each with the result of its run, by the run's folder: the slot is free for the next run.
    proofs: dict[Path, tuple[Result, Proof]] = field(default_factory=dict)

    def require_ready(self, slots: Sequence[Slot] | None = None) -> None:
        """Raise EngineError with the first problem of these slots; None: of the slot of the next run."""
        for engine in self._engines(self.executor.free_slots[:1] if slots is None else slots):
            if problems := engine.check():
                more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
                raise EngineError(problems[0] + more)

    def warnings(self) -> list[str]:
        """Return what may make a run fail in the slots of this machine, each a line with its fix."""
        checks = itertools.chain(*(engine.warnings() for engine in self._engines(self.executor.free_slots)))
        return [*dict.fromkeys(str(check.problem) for check in checks)]

    def _engines(self, slots: Sequence[Slot]) -> list[Engine]:
        return [self.engine_of.get(slot.gpus, self.engine) for slot in slots]

    def hardware(self, first: Record | None) -> str:
        """Return what a run has here, as records name it; of a cluster what the campaign's `first` experiment had."""
        return self.executor.hardware(self.engine.hardware()) or (first.hardware if first else "")

    @property
    def in_flight(self) -> list[int]:
        """The numbers of the experiments whose runs or proofs are in flight; a certificate's runs have other names."""
        folders = [*self.executor.in_flight(), *self.proofs]
        return sorted(int(folder.name) for folder in folders if folder.name.isdigit())

    def is_over(self, folder: Path) -> bool:
        """Return whether the run in `folder` has ended, and its proof if one began."""
        return self.proofs[folder][1].is_over() if folder in self.proofs else self.executor.is_over(folder)

    def next_seed(self, campaign: Campaign) -> int:
        """Return the first seed that no scored and no running run of the campaign has: a lost run keeps its seed."""
        results = [record.result for record in campaign.decided if record.evaluation]
        used = {result.seed for result in results if result} | {job.seed for job in self.executor.in_flight().values()}
        used |= {result.seed for result, _ in self.proofs.values()}
        return next(seed for index in itertools.count() if (seed := self.rules.seed(index)) not in used)

    def job(self, settings: Mapping[str, Any], seed: int, hardware: str = "", **fields: Any) -> Job:
        """Return the job of one run. `fields`: of Job, besides those of the bench."""
        return Job(
            rules=self.rules,
            rules_hash=self.rules_hash,
            settings=dict(settings),
            seed=seed,
            deadline_seconds=self.rules.deadline_seconds
            + self.engine.machine.later_seconds(self.rules.startup_seconds),
            token=secrets.token_hex(16),
            hardware=hardware or None,
            gpus=self.request.gpus,
            keep_all=self.request.keep_all,
            **fields,
        )


def open_bench(
    repo: Repo, records: Sequence[Record], request: Request, note: Callable[[str], None], branch: str | None = None
) -> Bench:
    """Open the bench of this checkout, with engine and budget of the campaign that continues unless flags name them."""
    root, environ, here = repo.root, dict(os.environ), repo.head().branch
    first = baseline_of(records, here) or baseline_of(records, continued(repo, records, None))
    first = first if first and branch in (None, first.branch) else None
    cluster = None if request.slurm is None else read_slurm(request.slurm)
    num_gpus_here = num_gpus(environ) if cluster is None else cluster.gpus
    rules = rules_here(root, request.engine or (first.engine if first else None), num_gpus_here)
    load(root, rules.environments)
    if request.budget_seconds is not None:
        rules = rules.with_budget(request.budget_seconds)
    rules = on_cards(rules, root, environ, request.gpus)
    if first is not None and request.budget_seconds is None:
        with suppress(UsageError):  # no budget: the record lies where agents can write
            in_its_budget = rules.with_budget(first.budget_seconds or 0.0)
            rules = in_its_budget if in_its_budget.hash(root) == first.rules_hash else rules
    least = math.ceil((rules.deadline_seconds + LATE_SECONDS) / 60.0)
    if cluster is not None and cluster.time_minutes < least:
        cause = f"{request.slurm}: time_minutes = {cluster.time_minutes} is less than a run may take"
        raise UsageError(cause, f"Write {least} or more.")
    flags = request.keep_all, request.prime_rl
    engine, rules_hash = open_engine(rules, root, environ, request.gpus, *flags), rules.hash(root)
    if first is not None and first.branch != here and first.rules_hash != rules_hash:
        first = baseline_of(records, continued(repo, records, rules_hash))
    num_before = num_slots_of(first.hardware) if first else None
    num_slots = (num_before or 1) if request.pairs is None else request.pairs
    if num_slots == 0 and cluster is None and (fitting := engine.capacity()) is not None:
        num_slots, text = num_before or fitting.num_runs, f"--pairs auto: {fitting}"
        if first and num_slots != fitting.num_runs:  # free memory changes, a campaign does not
            text += f"; {first.branch} began with {num_slots} and keeps to that: --branch NEW begins another campaign"
        note(text)
    executor: LocalExecutor | SlurmExecutor = LocalExecutor(root, environ)
    if cluster is not None:
        executor = SlurmExecutor(root, environ, cluster)
    elif num_slots != 1:
        if request.gpus is not None:
            cause = f"--gpus {request.gpus} names the GPUs of one run"
            raise UsageError(cause, "Leave it out: --pairs takes them in order.")
        num_each = len({*engine.gpu_ids()})
        indices = [gpu.index for gpu in visible_gpus(list_gpus(), environ)] if num_each else []
        executor = LocalExecutor(root, environ, tuple(divide(num_slots, indices, num_each, own_cores())))
    gpus = [slot.gpus for slot in executor.free_slots if slot.gpus]
    engine_of: dict[str | None, Engine] = {ids: open_engine(rules, root, environ, ids, *flags) for ids in gpus}
    variables = {name: environ[name] for name in FIXED_VARIABLES if environ.get(name)}
    return Bench(root, rules, rules_hash, engine, executor, variables, request, engine_of)

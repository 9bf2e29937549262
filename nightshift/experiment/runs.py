"""The jobs of runs: settings, seed and token; how to submit and how to cancel them."""

import hashlib
import itertools
import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from nightshift.campaign.journal import Access
from nightshift.campaign.records import JOB_NAME, Job, Record
from nightshift.experiment.setup import Setup


def submit(record: Record, setup: Setup) -> None:
    """Submit the run of an experiment."""
    job = job_of(record.effective, next_seed(record, setup), setup, record.hardware)
    if record.parent is not None:  # validated again: its record lies where agents can write
        parent = setup.ledger.stored_config(setup.ledger.record(record.parent))
        job = replace(job, incumbent=dict(setup.engine.validate(parent).settings), ends_without_gradient=True)
    submit_job(setup.ledger.run_dir(record.number), job, setup)


def submit_job(run_dir: Path, job: Job, setup: Setup, access: Access | None = None) -> None:
    """Start a worker. The journal holds its job, and its `access` to the test split, before the worker starts."""
    setup.executor.submit(run_dir, job, lambda: setup.ledger.enter(run_dir / JOB_NAME, access))


def next_seed(record: Record, setup: Setup) -> int:
    """Return the first seed that no scored run of the campaign and no run in flight has.

    So a lost run is run again with its seed.
    """
    used = setup.campaign(record.branch).seeds() | {job.seed for job in setup.executor.in_flight().values()}
    return next(seed for index in itertools.count() if (seed := setup.rules.seed(index)) not in used)


def job_of(
    settings: Mapping[str, Any],
    seed: int,
    setup: Setup,
    hardware: str,
    split: Literal["validation", "test"] = "validation",
) -> Job:
    """Return the job of one run under this set-up, evaluated on `split`."""
    return Job(
        rules=setup.rules,
        rules_hash=setup.rules_hash,
        settings=dict(settings),
        seed=seed,
        split=split,
        deadline_seconds=setup.rules.deadline_seconds,
        token=secrets.token_hex(16),
        hardware=hardware or None,
        gpus=setup.request.gpus,
        keep_all=setup.request.keep_all,
    )


def cancel(setup: Setup, number: int | None = None) -> None:
    """Cancel the runs that were not collected; with `number` only the run of that experiment."""
    in_flight = setup.executor.in_flight()
    setup.executor.cancel([f for f in in_flight if number is None or f == setup.ledger.run_dir(number)])


def as_json(value: Mapping[str, Any]) -> bytes:
    """Return canonical JSON: equal bytes for equal values."""
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode()


def hash_of(settings: Mapping[str, Any]) -> str:
    """Return 12 hex digits over the engine's settings."""
    return hashlib.sha256(as_json(settings)).hexdigest()[:12]

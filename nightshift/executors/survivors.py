"""The workers that outlived their head, as the records and the chain tell of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from nightshift.campaign.journal import sha256
from nightshift.campaign.ledger import STARTED, SUBMITTED_NAME, Ledger
from nightshift.campaign.records import Job
from nightshift.executors.base import Submitted, job_of
from nightshift.executors.slurm import NAME as SLURM
from nightshift.executors.slurm import cancel_jobs
from nightshift.executors.watchdog import marker_of
from nightshift.files import read_file


def survivors(ledger: Ledger, first: int) -> dict[Path, tuple[Submitted, Job]]:
    """By folder, the runs of the experiments from `first` on that were submitted and not collected, as the chain has
    them: whoever wrote another name, key or job there gets nothing adopted."""
    found = {}
    for record in ledger.records():
        if record.status != STARTED or record.number < first:
            continue
        folder = ledger.run_dir(record.number)
        path = folder / SUBMITTED_NAME
        with suppress(OSError):  # none, or what somebody put in its place
            data = read_file(path)
            if ledger.journal.holds(path.relative_to(ledger.runs_dir).as_posix(), sha256(data)):
                was = msgspec.json.decode(data, type=Submitted)
                if (job := job_of(folder, was)) is not None:
                    found[folder] = was, job
    return found


def alive(ledger: Ledger, first: int) -> dict[int, list[str]]:
    """The workers that outlived the head of a night, by the number of their experiment: `process 17`, or `job NAME`,
    of which nobody is asked whether it runs."""
    found, numbers = dict[int, list[str]](), {}
    for folder, (was, _) in survivors(ledger, first).items():
        numbers[was.name] = int(folder.name)
        if was.executor == SLURM:
            found.setdefault(numbers[was.name], []).append(f"job {was.name}")
    for process in psutil.process_iter() if numbers else ():
        if (number := numbers.get(marker_of(process) or "")) is not None:
            found.setdefault(number, []).append(f"process {process.pid}")
    return found


def end_jobs(ledger: Ledger) -> None:
    """Cancel the jobs of a cluster that earlier heads of this checkout left there."""
    cancel_jobs([was.name for was, _ in survivors(ledger, 0).values() if was.executor == SLURM])

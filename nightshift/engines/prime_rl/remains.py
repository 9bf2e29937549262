"""Deletes the large files of prime-rl in the folders of runs: published weights and rollouts, 1 to 3 GB a run on GPUs.

A session deletes its files at its end. Files of a killed worker are deleted after its run, or at the next start.
"""

import shutil
from contextlib import suppress
from pathlib import Path

from nightshift.campaign.records import CERTIFY_NAME, JOB_NAME, RESULT_NAME, Job
from nightshift.errors import UsageError
from nightshift.files import read_json

PRIME_DIR = "prime-rl"  # prime-rl's folder in the folder of a run


def remove_heavy(prime_dir: Path) -> None:
    """Delete weights and rollouts in prime-rl's folder of a run."""
    for name in ("broadcasts", "rollouts"):
        shutil.rmtree(prime_dir / name, ignore_errors=True)  # does not follow a link


def sweep(runs_dir: Path) -> None:
    """Clean the folders of all runs that are over. Call when no run on this machine is in flight; SLURM jobs may be."""
    for path in (*runs_dir.glob(f"*/{JOB_NAME}"), *runs_dir.glob(f"{CERTIFY_NAME}/*/*/{JOB_NAME}")):
        with suppress(UsageError):  # a damaged job.json does not show whether the run is over
            job = read_json(path, Job, "")
            if job is not None and (not job.name or path.with_name(RESULT_NAME).exists()):
                clean(runs_dir, path.parent)


def clean(runs_dir: Path, folder: Path) -> None:
    """Delete weights and rollouts of a run that is over. Call as the controller."""
    for prime_dir in (folder / PRIME_DIR, *folder.glob(f"*/{PRIME_DIR}")):  # a re-run of the incumbent has several
        if prime_dir.resolve() == runs_dir.resolve() / prime_dir.relative_to(runs_dir):  # no link in the path
            remove_heavy(prime_dir)

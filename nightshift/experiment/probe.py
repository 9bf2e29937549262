"""Look at a cluster's node from inside a job, for `nightshift doctor --slurm`."""

import os
import platform
from pathlib import Path

import msgspec

from nightshift.campaign.records import JOB_NAME, Job
from nightshift.engines.base import open_engine
from nightshift.errors import NightshiftError
from nightshift.executors.slurm import FOUND_NAME
from nightshift.files import free_disk_gb, read_file, write_json


def write_probe(root: Path, folder: Path) -> None:
    """Write what the job's node is, for the controller."""
    job = msgspec.json.decode(read_file(folder / JOB_NAME), type=Job)
    write_json(folder / FOUND_NAME, probe(job, root))


def probe(job: Job, root: Path) -> list[str]:
    """Open the engine here. Return this node's name, then lines on its hardware, rules and problems."""
    try:
        engine = open_engine(job.rules, root, dict(os.environ), job.gpus, job.keep_all)
        hardware, problems = engine.hardware(), [*engine.check()]
    except NightshiftError as error:
        hardware, problems = "unknown", [str(error)]
    gpus, rules_hash = os.environ.get("CUDA_VISIBLE_DEVICES", "none"), job.rules.hash(root)
    rules = "the same as here" if rules_hash == job.rules_hash else f"PROBLEM: {rules_hash}, here {job.rules_hash}"
    return [
        os.environ.get("SLURMD_NODENAME", platform.node()),
        f"hardware:  {hardware}; GPUs of the job: {gpus}; {free_disk_gb(root):.0f} GB of disk free",
        f"rules:     {rules}",
        *(f"PROBLEM:   {problem}" for problem in problems),
    ]

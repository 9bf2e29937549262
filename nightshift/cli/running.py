"""A run in flight in words: the live line, `nightshift wait` and `nightshift status`."""

import time
from contextlib import suppress
from pathlib import Path

from nightshift.campaign.records import JOB_NAME, Job, Phase, Progress
from nightshift.errors import UsageError
from nightshift.files import read_json
from nightshift.text import clean
from nightshift.waiting import lasted

_MAX_NAME = 40  # characters of a slot or node
_STARTS = {"trl": "loading torch and the model", "prime-rl": "starting the inference server and the trainer"}


def describe_run(folder: Path, reading: Progress | None, name: str = "") -> str:
    """What a run does, for how long it has run, and what is left of its budget. `reading`: how far it is."""
    job, lasts = _job(folder), lasted(time.time() - _written(folder / JOB_NAME))
    place = clean(reading.slot, _MAX_NAME) + ": " if reading and reading.slot else ""
    head = f"{name or run_name(folder)}: {place}"
    if reading is None:
        return f"{head}waiting to start, {lasts}"
    if reading.phase is Phase.STARTING:
        what = f": {_STARTS[job.rules.engine]}" if job and job.rules.engine in _STARTS else ""
        most = f" of at most {lasted(job.rules.startup_seconds)}" if job else ""
        return f"{head}starting{what}, {lasts}{most}"
    if reading.phase is Phase.EVALUATING:
        environments = job.rules.environments if job else ()
        is_game = any(environment.is_game for environment in environments)  # of several turns: nobody knows how many
        total = 0 if is_game else sum(environment.num_validation for environment in environments)
        return f"{head}evaluating {reading.num_done or 0:,}{f' of {total:,}' if total else ' examples'}, {lasts}"
    reward = "" if reading.reward is None else f", reward {reading.reward:.2f}"
    left = "" if reading.seconds_left is None else f", {max(reading.seconds_left, 0.0):.0f} s of the budget left"
    return f"{head}training, step {reading.num_steps}{reward}, {lasts}{left}"


def run_name(folder: Path) -> str:
    """`experiment 0042`; of a certificate `baseline 1000`."""
    return f"experiment {folder.name}" if folder.name.isdigit() else short_name(folder)


def short_name(folder: Path) -> str:
    return folder.name.replace("-", " ")


def _job(folder: Path) -> Job | None:
    with suppress(UsageError):  # damaged: less is shown
        return read_json(folder / JOB_NAME, Job, "")
    return None


def _written(path: Path) -> float:
    """When, in seconds since 1970; now, where it is not there or its clock is ahead."""
    try:
        return min(time.time(), path.stat().st_mtime)
    except OSError:
        return time.time()

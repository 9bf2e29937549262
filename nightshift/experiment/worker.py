"""The process of one run: `worker.py ROOT FOLDER` reads job.json from FOLDER and writes result.json to it. A local
worker ends with its controller, because the pipe to stdin closes."""

import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from nightshift.campaign.metrics import NO_GRADIENT_STEPS, PROGRESS_NAME
from nightshift.campaign.records import (
    ANSWERS_NAME,
    JOB_NAME,
    RESULT_NAME,
    STARTED_NAME,
    Job,
    Outcome,
    Phase,
    Progress,
    ProgressCallback,
    Result,
    Training,
)
from nightshift.engines.base import Engine, NoGradient, isolate, open_engine
from nightshift.engines.machine import MACHINE_NAME
from nightshift.errors import EngineError, ExitCode, Failure, Interrupted, UsageError
from nightshift.evaluation.evaluate import evaluate, examples_of
from nightshift.executors.process import engine_environment, interruptible
from nightshift.files import read_file, temporary_beside, write_atomically, write_json
from nightshift.text import MAX_TEXT, clean

_PROGRESS_SECONDS = 0.5
_CHANCE = 1e-4  # a series of steps without a gradient that is less likely than this by chance ends the run
INCUMBENT = "incumbent"  # the folder in which the incumbent is started, to find out whose fault a failed start is


def main(root: Path, folder: Path) -> int:
    """Make the run of `folder`. Return the exit code: MEASURED if there is a result."""
    try:
        (folder / STARTED_NAME).touch(exist_ok=False)
    except FileExistsError:  # SLURM may start a job twice
        return ExitCode.USAGE
    try:
        with interruptible():
            job = msgspec.json.decode(read_file(folder / JOB_NAME), type=Job)
            isolate(job.rules, root)
            if not job.name:
                threading.Thread(target=_end_with_the_controller, daemon=True).start()
            result = make_run(job, root, folder)
    except Interrupted as error:
        return error.exit_code
    write_json(folder / RESULT_NAME, result)
    return ExitCode.MEASURED


def _end_with_the_controller() -> None:
    """Wait until stdin closes, which means that the controller has ended. Then end by SIGTERM."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def make_run(job: Job, root: Path, folder: Path) -> Result:
    """Train and evaluate. Return the result; if it has no scores, `training` has the cause. No process is left."""
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="milliseconds")
    slot, rules = job.slot or os.environ.get("SLURMD_NODENAME", ""), job.rules
    training = Training(Outcome.CRASHED, num_steps=0, failure=Failure.INFRASTRUCTURE)
    measured: dict[str, Any] = {}  # further fields of the result
    engine: Engine | None = None
    # Agents read in runs/, so no answers to test examples are written. The file appears together with the result, so
    # nobody can end a run because its first scores are low.
    answers = None if job.split == "test" else temporary_beside(folder / ANSWERS_NAME)
    try:
        # The environment variables of a cluster's node may contain tokens.
        engine = open_engine(rules, root, engine_environment(os.environ, {}), job.gpus)
        hardware = engine.hardware() + job.layout  # before this process is pinned to a part of the hardware
        expected, actual = (job.rules_hash, job.hardware or hardware), (rules.hash(root), hardware)
        if expected != actual:
            cause = f"{', '.join(actual)}, not {', '.join(expected)}"
            raise EngineError(f"the worker's rules hash or hardware differs from the job's: {cause}")
        if job.cores and hasattr(os, "sched_setaffinity"):  # not on macOS
            os.sched_setaffinity(0, job.cores)
        examples = examples_of(job.split, rules, root)
        measured = {"hardware": hardware, "versions": engine.versions()}
        if engine.machine.text:
            measured["versions"] |= {MACHINE_NAME: engine.machine.text}
        opened, progress = time.monotonic(), reporter(folder / PROGRESS_NAME, slot)
        session = engine.open(job.settings, job.seed, folder, job.deadline_seconds)
        try:
            measured["startup_seconds"] = time.monotonic() - opened
            callback = ending(progress, rules.budget_seconds) if job.incumbent else progress
            training = session.train(rules.budget_seconds, callback)
            if not training.outcome.is_success:
                if training.failure in (None, Failure.UNKNOWN):
                    failure = Failure.INFRASTRUCTURE if training.num_steps else Failure.UNKNOWN
                    raise EngineError(training.cause or "no cause known", failure=failure, log=training.log)
            elif training.num_steps < 1:  # the weights are still those of the base model
                cause = f"the budget of {rules.budget_text} is too short for one step"
                fix = "Lower orchestrator.batch_size or max_completion_tokens."
                raise EngineError(cause, fix, failure=Failure.CONFIG)
            else:
                measured["evaluation"] = evaluate(session, examples, rules, answers, progress)
                session.confirm()
        finally:
            session.close()
    except (EngineError, UsageError, OSError) as error:
        cause, failure, log = str(error), Failure.INFRASTRUCTURE, None
        if isinstance(error, EngineError):
            failure, log = error.failure, error.log
        if failure is Failure.UNKNOWN:
            failure = Failure.INFRASTRUCTURE
            if engine and job.incumbent:
                other, seconds_left = folder / INCUMBENT, job.deadline_seconds - (time.monotonic() - began)
                try:
                    other.mkdir()
                    engine.open(job.incumbent, job.seed, other, seconds_left).close()
                    failure, reason = Failure.CONFIG, "the incumbent starts, so the config is at fault"
                except (EngineError, UsageError, OSError) as problem:
                    reason = f"the incumbent does not start either: {problem}"
                cause = f"{cause.rstrip('.')}; {reason}"
        cause = clean(cause, 4 * MAX_TEXT)
        training = replace(training, outcome=Outcome.CRASHED, failure=failure, cause=cause, log=log)
        measured.pop("evaluation", None)
    if answers is not None:
        if "evaluation" in measured:
            answers.replace(folder / ANSWERS_NAME)
        answers.unlink(missing_ok=True)
    with suppress(OSError):  # a file may be deleted meanwhile, by the user or by NFS
        measured["disk_bytes"] = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    measured |= {"started": started, "slot": slot, "total_seconds": time.monotonic() - began}
    return Result(job.seed, training, token=job.token, job_sha256=job.sha256, **measured)


def reporter(path: Path, slot: str) -> ProgressCallback:
    """Return a callback that writes the last reading to `path`, for the live line."""
    phase, written = Phase.STARTING, -math.inf

    def report(reading: Progress) -> None:
        nonlocal phase, written
        if reading.phase is not phase or time.monotonic() - written >= _PROGRESS_SECONDS:
            phase, written = reading.phase, time.monotonic()
            with suppress(OSError):  # a full disk does not end the run before the result is written
                write_atomically(path, msgspec.json.encode(replace(reading, slot=slot)), sync=False)

    report(Progress(Phase.STARTING, 0))
    return report


def ending(report: ProgressCallback, budget_seconds: float) -> ProgressCallback:
    """Return a callback that calls `report` and ends a run without a gradient by NoGradient: after NO_GRADIENT_STEPS
    steps in a row, if the earlier steps make this less likely than _CHANCE, because sparse rewards give many steps
    without a gradient. A run that never had a gradient ends after half of the budget: sparse rewards may start late."""

    def watch(reading: Progress) -> None:
        report(reading)
        num, left = reading.num_without_gradient, reading.seconds_left
        if num < NO_GRADIENT_STEPS or left is None:
            return
        before = reading.num_steps - num
        without = before - reading.num_with_gradient
        # Probability that each of the next `num` steps has no gradient: independent steps, uniform prior.
        chance = math.comb(without + num, num) / math.comb(before + 1 + num, num)
        if chance < _CHANCE if before else left <= budget_seconds / 2:
            raise NoGradient(f"no gradient in the last {num} of {reading.num_steps} steps", failure=Failure.CONFIG)

    return watch


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

"""Make one run in its own process: `worker.py ROOT FOLDER`.

ROOT is the checkout, and FOLDER holds job.json. The worker checks that rules and hardware are those of the job, trains
within the budget, evaluates the final weights, and writes `result.json`. It leaves no process. On this machine the
controller holds the pipe to stdin, so a worker ends with its controller.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
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
    Evaluation,
    Failure,
    Job,
    Outcome,
    Phase,
    Progress,
    ProgressCallback,
    Result,
    Training,
)
from nightshift.engines.base import Engine, NoGradient, open_engine
from nightshift.engines.machine import MACHINE_NAME
from nightshift.errors import EngineError, ExitCode, Interrupted, NightshiftError
from nightshift.evaluation.evaluate import evaluate, examples_of_test_split, examples_of_validation_split
from nightshift.executors.process import engine_environment, interruptible
from nightshift.files import read_file, temporary_beside, write_atomically, write_json
from nightshift.text import MAX_TEXT, clean

_PROGRESS_SECONDS = 0.5
_CHANCE = 1e-4  # a row of steps that is less likely than this by chance ends the run
INCUMBENT = "incumbent"  # the folder in which the incumbent is started, to tell whose fault a failed start is


def main(root: Path, folder: Path) -> int:
    """Make the run of `folder`. Return the exit code: MEASURED if there is a result."""
    try:
        (folder / STARTED_NAME).touch(exist_ok=False)
    except FileExistsError:  # SLURM may start a job twice
        return ExitCode.USAGE
    try:
        with interruptible():
            job = msgspec.json.decode(read_file(folder / JOB_NAME), type=Job)
            if not job.name:
                threading.Thread(target=_end_with_the_controller, daemon=True).start()
            result = make_run(job, root, folder)
    except Interrupted as error:
        return error.exit_code
    write_json(folder / RESULT_NAME, result)
    return ExitCode.MEASURED


def _end_with_the_controller() -> None:
    """Wait for the end of stdin, which means that the controller is dead. Then end as if it had asked."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def make_run(job: Job, root: Path, folder: Path) -> Result:
    """Train within the budget, evaluate the final weights, and return the result. All files go to `folder`.

    If nothing could be evaluated, `training` holds the cause and whose fault it is. No process is left.
    """
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="milliseconds")
    slot, rules = job.slot or os.environ.get("SLURMD_NODENAME", ""), job.rules
    training = Training(Outcome.CRASHED, num_steps=0, failure=Failure.MACHINERY)
    evaluation: Evaluation | None = None
    startup_seconds: float | None = None
    hardware, versions = "", dict[str, str]()
    engine: Engine | None = None
    answers: Path | None = None
    try:
        # A cluster's node adds what a login there brings, with its tokens.
        engine = open_engine(rules, root, engine_environment(os.environ, {}), job.gpus, job.keep_all)
        here = engine.hardware() + job.layout  # before this process is pinned to its part of it
        _require("rules", job.rules_hash, rules.hash(root))
        if job.hardware is not None:
            _require("hardware", job.hardware, here)
        if job.cores:
            os.sched_setaffinity(0, job.cores)
        if job.split == "test":  # only its scores are written: runs/ is where agents read
            examples = examples_of_test_split(rules, root, job.token)
        else:  # the file appears with the result: whoever read scores earlier could end a run whose score is low
            examples, answers = examples_of_validation_split(rules, root), temporary_beside(folder / ANSWERS_NAME)
        hardware, versions = here, engine.versions()
        if engine.machine.text:
            versions[MACHINE_NAME] = engine.machine.text
        opened, progress = time.monotonic(), reporter(folder / PROGRESS_NAME, slot)
        session = engine.open(job.settings, job.seed, folder, job.deadline_seconds)
        try:
            startup_seconds = time.monotonic() - opened
            callback = ending(progress, rules.budget_seconds) if job.incumbent else progress
            training = session.train(rules.budget_seconds, callback)
            if training.outcome.is_success:
                if training.num_steps < 1:  # the base model is no result of this config
                    cause = f"no step fitted into the budget of {rules.budget_text}"
                    fix = "Lower orchestrator.batch_size or max_completion_tokens."
                    raise EngineError(cause, fix, is_config_fault=True)
                evaluation = evaluate(session, examples, rules, answers, progress)
                session.confirm()
            elif training.failure is None:  # the cause is not known: with a step behind it, it is the machine's
                fault = False if training.num_steps else None
                raise EngineError(training.cause or "no cause known", is_config_fault=fault, log=training.log)
        finally:
            session.close()
    except Interrupted:
        raise
    except (NightshiftError, OSError) as error:
        is_config_fault, cause = isinstance(error, EngineError) and error.is_config_fault, str(error)
        if is_config_fault is None and engine and job.incumbent:
            seconds_left = job.deadline_seconds - (time.monotonic() - began)
            reporter(folder / PROGRESS_NAME, slot, "trying the incumbent's start: the cause of a failure is not known")
            is_config_fault, why = _start_incumbent(engine, job.incumbent, job.seed, folder / INCUMBENT, seconds_left)
            cause = f"{cause.rstrip('.')}; {why}"
        failure = Failure.TRAINING if is_config_fault else Failure.MACHINERY
        cause, log = clean(cause, 4 * MAX_TEXT), error.log if isinstance(error, EngineError) else None
        training = replace(training, outcome=Outcome.CRASHED, failure=failure, cause=cause, log=log)
        evaluation = None
    if answers is not None:
        if evaluation is not None:
            answers.replace(folder / ANSWERS_NAME)
        answers.unlink(missing_ok=True)
    seconds, job_sha256 = time.monotonic() - began, job.sha256
    measured = (training, evaluation, startup_seconds, seconds, hardware, versions)
    return Result(job.seed, *measured, token=job.token, job_sha256=job_sha256, started=started, slot=slot)


def _require(what: str, wanted: str, actual: str) -> None:
    if wanted != actual:
        raise EngineError(f"the worker has other {what} than its job: {actual}, not {wanted}")


def _start_incumbent(
    engine: Engine, settings: Mapping[str, Any], seed: int, folder: Path, seconds_left: float
) -> tuple[bool, str]:
    """Start the incumbent once and stop it. Return whether the failed start is its config's fault, and why."""
    try:
        folder.mkdir()
        engine.open(settings, seed, folder, seconds_left).close()
    except Interrupted:
        raise
    except (NightshiftError, OSError) as error:
        return False, f"the incumbent does not start either: {error}"
    return True, "the incumbent starts, so it is the config's fault"


def reporter(path: Path, slot: str, note: str = "") -> ProgressCallback:
    """Return a callback that writes the last reading to `path`, for progress lines and `nightshift status`. `note`: of
    the first reading."""
    last_phase: Phase | None = None
    last = 0.0

    def report(reading: Progress) -> None:
        nonlocal last_phase, last
        now = time.monotonic()
        if reading.phase is not last_phase or now - last >= _PROGRESS_SECONDS:
            with suppress(OSError):  # a full disk ends the run where it matters, not here
                write_atomically(path, msgspec.json.encode(replace(reading, slot=slot)), sync=False)
            last_phase, last = reading.phase, now

    report(Progress(Phase.STARTING, 0, note=note))
    return report


def ending(report: ProgressCallback, budget_seconds: float) -> ProgressCallback:
    """Return `report` with an end: it raises NoGradient once NO_GRADIENT_STEPS steps in a row had no gradient.

    Where rewards are sparse, many steps have no gradient by chance. So the row must also be less likely than _CHANCE,
    given the steps before it: steps are taken for independent, and the share without a gradient has a uniform prior. A
    run that never had a gradient goes on for half of its budget, because sparse rewards start late.
    """

    def watch(reading: Progress) -> None:
        report(reading)
        row, left = reading.num_without_gradient, reading.seconds_left
        if row < NO_GRADIENT_STEPS or left is None:
            return
        before = reading.num_steps - row
        without = before - reading.num_with_gradient
        # Probability that all of the next `row` steps have no gradient.
        chance = math.comb(without + row, row) / math.comb(before + 1 + row, row)
        is_over = chance < _CHANCE if before else left <= budget_seconds / 2
        if is_over:
            raise NoGradient(f"no gradient in the last {row} of {reading.num_steps} steps", is_config_fault=True)

    return watch


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

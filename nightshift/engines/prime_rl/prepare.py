"""Runs that nobody scores: they fill the compile caches, or prove the whole chain with the tiny model."""

import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from nightshift.campaign.records import Progress
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import Config, parse, set_values
from nightshift.engines.base import Engine, Note
from nightshift.errors import EngineError
from nightshift.executors.process import tail
from nightshift.waiting import look, waiting

# The first start on a box has cold caches: vLLM, Triton and the trainer's first step compile everything, and Python
# compiles all that was installed. Not measured on GPUs.
_COLD_START_SECONDS = 1200.0
_NUM_LAST_LINES = 20
_PROBE = [{"role": "user", "content": "1 + 1 ="}]
# For the shipped model of a megabyte, whose context is 512 tokens.
_SMOKE_CONFIG = b"""
seq_len = 512
[orchestrator]
batch_size = 64
group_size = 8
[orchestrator.train.sampling]
max_completion_tokens = 64
"""


def warm_up_rules(rules: Rules) -> Rules:
    """Give the slowest card, too, time for one step."""
    return replace(rules, name="warm-up", budget_seconds=300.0, startup_seconds=_COLD_START_SECONDS)


def smoke_rules(root: Path, rules: Rules, seconds: float) -> Rules:
    """Return rules for the shipped model: `seconds` of training, prompts and context as in the model's own rules."""
    tiny = rules_of(root, Chosen(environments=["arithmetic"]), "trl", 0)
    return replace(
        tiny,
        name="smoke",
        engine=rules.engine,
        model=str(root / tiny.model),
        budget_seconds=seconds,
        budget_clock="wall",
        startup_seconds=_COLD_START_SECONDS,
        memory=rules.memory,
        num_gpus=rules.num_gpus,
        infer_gpus=rules.infer_gpus,
        train_gpus=rules.train_gpus,
        tensor_parallel=rules.tensor_parallel,
        losses=rules.losses,
    )


def smoke_config(config: Config) -> Config:
    """Return sizes for the tiny model with the trainer of `config`: another trainer would rehearse other code."""
    trainer = ("trainer.model.", "trainer.optim.", "trainer.loss.", "trainer.matmul_precision")
    values = {path: value for path, value in config.values.items() if path.startswith(trainer)}
    return parse(set_values(_SMOKE_CONFIG, values))


def rehearse(engine: Engine, config: Config, run_dir: Path, note: Note) -> None:
    """Run the whole chain once: start, train, load the final weights, have them answer, prove that they did.

    Notes the result in one line. EngineError when any part fails; then `run_dir` keeps its logs, and the last lines of
    the log that shows the cause are noted.
    """
    rules, began, stage = engine.rules, time.monotonic(), "starting"

    def show(reading: Progress) -> None:
        nonlocal stage
        left = "" if reading.seconds_left is None else f", {reading.seconds_left:.0f} s left"
        stage = ", ".join(filter(None, [f"{reading.phase}, step {reading.num_steps}{left}", reading.note]))
        look()

    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    (run_dir / "train.toml").write_bytes(config.source)
    try:
        settings = engine.validate(config).settings
        with waiting(lambda: f"{rules.name}: {stage}", rules.deadline_seconds):
            session = engine.open(settings, rules.seed(0), run_dir, rules.deadline_seconds)
            with closing(session):
                startup_seconds = time.monotonic() - began
                training = session.train(rules.budget_seconds, show)
                if not training.outcome.is_success or training.num_steps < 1:
                    raise EngineError(training.cause or f"no step in {rules.budget_seconds:g} s", log=training.log)
                weights = session.load_final_weights()
                session.complete([_PROBE], rules.decoding, show)
                session.confirm()
        proof = engine.start_proof(run_dir, weights, note)
        proven = proof.result() if proof else ""
    except EngineError as error:
        if error.log is not None:
            note(f"the last lines of {run_dir / error.log}:")
            for line in tail(run_dir / error.log, _NUM_LAST_LINES):
                note(f"  {line}")
        raise EngineError(f"{rules.name}: {error.cause}", f"{error.fix} Read the logs in {run_dir}.".lstrip()) from None
    steps = f"{training.num_steps} steps in {rules.budget_seconds:g} s"
    line = f"{rules.name}: ready after {startup_seconds:.0f} s, {steps}, weights of step {weights.step} answer"
    note("; ".join(filter(None, [line, proven])))
    shutil.rmtree(run_dir)

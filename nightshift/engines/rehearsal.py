"""Runs without a score, which fill the compile caches or test the whole chain with the tiny model."""

import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from nightshift.campaign.records import Progress
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import Config, parse
from nightshift.engines.base import Engine, Note, isolate
from nightshift.errors import EngineError
from nightshift.executors.process import tail
from nightshift.waiting import look, mark, waiting

# The first start on a machine compiles everything: vLLM, Triton, the trainer's first step, and Python's packages. Not
# measured on GPUs.
_COLD_START_SECONDS = 1200.0
_NUM_LAST_LINES = 20
_NUM_STEPS = 10  # so many steps show that training works
_PROBE = [{"role": "user", "content": "1 + 1 ="}]
# For the shipped model of 1 MB, whose context is 512 tokens.
_SMOKE_CONFIG = b"""
seq_len = 512
[orchestrator]
batch_size = 64
group_size = 8
[orchestrator.train.sampling]
max_completion_tokens = 64
"""


def warm_up_rules(rules: Rules) -> Rules:
    """Return `rules` with enough time for a cold start and one step on the slowest GPU."""
    return replace(rules, name="warm-up", budget_seconds=300.0, startup_seconds=_COLD_START_SECONDS)


def smoke(engine: Engine, seconds: float, runs_dir: Path, note: Note) -> None:
    """Run the whole chain with the tiny model and `seconds` of training, in a folder of `runs_dir`. Uses no network."""
    rules = smoke_rules(engine.root, engine.rules, seconds)
    rehearse(engine.under(rules), parse(_SMOKE_CONFIG), runs_dir / rules.name, note)


def smoke_rules(root: Path, rules: Rules, seconds: float) -> Rules:
    """Return rules for the shipped model, with `seconds` of training and the environment of arithmetic."""
    tiny = rules_of(root, Chosen(environments=["arithmetic"]), "trl", 0)
    return replace(
        rules,
        name="smoke",
        model=str(root / tiny.model),
        model_revision=None,
        environments=tiny.environments,
        guards=(),
        decoding=tiny.decoding,
        max_completion_tokens=tiny.max_completion_tokens,
        learning_rate_scale=tiny.learning_rate_scale,
        budget_seconds=seconds,
        budget_clock="wall",
        startup_seconds=_COLD_START_SECONDS,
    )


def rehearse(engine: Engine, config: Config, run_dir: Path, note: Note) -> str:
    """Run the whole chain once: start, train, load the final weights, complete a prompt, prove the served weights.

    This process enters a network namespace, like a worker. Notes and returns the result in one line. EngineError if a
    part fails: then `run_dir` keeps its logs, and the last lines of the log with the cause are noted.
    """
    rules, began, stage = engine.rules, time.monotonic(), "starting"
    isolate(rules, engine.root)

    def show(reading: Progress) -> None:
        nonlocal stage
        stage = f"{reading.phase}, step {reading.num_steps} {reading.note}"
        look()

    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    (run_dir / "train.toml").write_bytes(config.source)
    mark("server up")
    try:
        settings = engine.validate(config).settings
        with waiting(lambda: f"{rules.name}: {stage}", rules.deadline_seconds):
            session = engine.open(settings, rules.first_seed, run_dir, rules.deadline_seconds)
            with closing(session):
                start = f"after {time.monotonic() - began:.0f} s"
                mark("server up", f"{start}; network: {engine.versions().get('network', 'shared')}")
                mark("ten training steps")
                training = session.train(rules.budget_seconds, show)
                if not training.outcome.is_success or training.num_steps < 1:
                    raise EngineError(training.cause or f"no step in {rules.budget_seconds:g} s", log=training.log)
                steps = f"{training.num_steps} steps in {training.training_seconds or rules.budget_seconds:.0f} s"
                mark("ten training steps", steps, training.num_steps >= _NUM_STEPS)
                peak_gb = training.peak_memory_gb
                mark("memory peak", "not measured" if peak_gb is None else f"{peak_gb:.1f} GB", peak_gb is not None)
                mark("weights updated in place")
                weights = session.load_final_weights()
                session.complete([_PROBE], rules.decoding, show)
                session.confirm()
                answers = f"weights of step {weights.step} answer"
                mark("weights updated in place", answers)
        mark("served = file")
        proof = engine.start_proof(run_dir, weights, note)
        proven = proof.result() if proof else ""
        mark("served = file", proven, "cannot tell" not in proven)
    except EngineError as error:
        for line in tail(run_dir / error.log, _NUM_LAST_LINES) if error.log else ():
            note(f"{error.log}: {line}")
        raise EngineError(f"{rules.name}: {error.cause}", f"{error.fix} Read the logs in {run_dir}.".lstrip()) from None
    line = "; ".join(filter(None, [f"{rules.name}: ready {start}, {steps}, {answers}", proven]))
    note(line)
    shutil.rmtree(run_dir)
    return line

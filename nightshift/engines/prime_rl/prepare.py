"""prime-rl's part of prepare.py: install it, fill its caches by a run that nobody scores."""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.toml_edit import set_values
from nightshift.config.train_toml import Config, parse
from nightshift.engines.base import Engine, Note
from nightshift.engines.downloads import prepare_data, prepare_model
from nightshift.engines.prime_rl.install import Installer, pin_model
from nightshift.engines.prime_rl.installation import MIN_DRIVER, cache_dir, model_problem
from nightshift.errors import EngineError, UsageError
from nightshift.executors.gpus import gpu_problems, gpu_warnings
from nightshift.files import disk_error

# Whatever comes first on a box starts with cold caches: vLLM, Triton and the trainer, within its first step, compile
# everything, and Python all that was installed. Not measured on GPUs.
_COLD_START_SECONDS = 1200.0
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


def prepare(
    under: Callable[[Rules], Engine],
    rules: Rules,
    installer: Installer,
    config: Config,
    *,
    sources: Mapping[str, Path] | None = None,
    smoke: bool = False,
) -> None:
    """Install prime-rl, its model and data; fill its compile caches by an unscored run with `config`. `under` makes an
    engine with other rules.

    With `smoke` the chain runs once with the tiny model instead, which needs no network where prime-rl is installed.
    EngineError names what is in the way; repeating goes on where this stopped.
    """
    installation, note = installer.installation, installer.note
    for problem in gpu_problems(installer.gpus):
        raise problem
    for warning in gpu_warnings(installer.gpus, MIN_DRIVER):
        note(f"warning: {warning}")
    runs_dir = installation.state_dir / "runs"
    with _lock(installer.environ):
        installer.install()
        if smoke:
            tiny = smoke_rules(installer.root, rules)
            rehearse(under(tiny), smoke_config(config), runs_dir / tiny.name, note)
            return
        model = prepare_model(installer.root, rules, note)
        prepare_data(installer.root, rules, sources or {}, note)
        if model_problem(installation, rules) is not None:
            pin_model(installation, rules, model)
        mark = installation.warm_mark(installer.gpus)
        if installer.gpus and not mark.is_file():
            note("filling the compile caches by an unscored run, once: up to 20 minutes to start, 5 to train")
            cold = warm_up_rules(rules)
            line = rehearse(under(cold), config, runs_dir / cold.name, note)
            mark.parent.mkdir(exist_ok=True)
            mark.write_text(line + "\n")


def _lock(environ: Mapping[str, str]) -> AbstractContextManager[object]:
    """Let one prepare.py of a user work at a time. Raises UsageError while another one is at work."""
    folder = cache_dir(environ) / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / "prepare.lock").acquire(timeout=0)
    except Timeout:
        raise UsageError("another prepare.py of yours is at work", "Wait for it.") from None
    except OSError as error:
        raise disk_error(error, folder) from None


def warm_up_rules(rules: Rules) -> Rules:
    """Time for one step at least, also on the slowest card."""
    return replace(rules, name="warm-up", budget_seconds=300.0, startup_seconds=_COLD_START_SECONDS)


def smoke_rules(root: Path, rules: Rules) -> Rules:
    """The whole chain with the shipped model: two minutes of training, prompts and context as in its own rules."""
    tiny = rules_of(root, Chosen(environments=["arithmetic"]), "trl", 0)
    return replace(
        tiny,
        name="smoke",
        engine=rules.engine,
        model=str(root / tiny.model),
        budget_seconds=120.0,
        budget_clock="wall",
        startup_seconds=_COLD_START_SECONDS,
        memory=rules.memory,
    )


def smoke_config(config: Config) -> Config:
    """Sizes for the tiny model, and the trainer of `config`: with another one, other code would be rehearsed."""
    trainer = ("trainer.model.", "trainer.optim.", "trainer.loss.", "trainer.matmul_precision")
    values = {path: value for path, value in config.values.items() if path.startswith(trainer)}
    return parse(set_values(_SMOKE_CONFIG, values))


def rehearse(engine: Engine, config: Config, run_dir: Path, note: Note) -> str:
    """One short run of the whole chain: start, train, load the final weights, have them answer, prove that they did.
    Nothing is scored.

    Returns what it came to, one line. EngineError when any part fails; then `run_dir` keeps its logs.
    """
    rules, began = engine.rules, time.monotonic()
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    (run_dir / "train.toml").write_bytes(config.source)
    try:
        engine.prepare_at_start(note)
        settings = engine.validate(config).settings
        with closing(engine.open(settings, rules.seed(0), run_dir, rules.deadline_seconds)) as session:
            startup_seconds = time.monotonic() - began
            training = session.train(rules.budget_seconds, lambda reading: None)
            if not training.outcome.is_success or training.num_steps < 1:
                raise EngineError(training.cause or f"no step in {rules.budget_seconds:g} s")
            weights = session.load_final_weights()
            session.complete([_PROBE], rules.decoding, lambda reading: None)
        proof = engine.prove(run_dir, weights, note)
    except EngineError as error:
        raise EngineError(f"{rules.name}: {error.cause}", f"{error.fix} Read the logs in {run_dir}.".lstrip()) from None
    steps = f"{training.num_steps} steps in {rules.budget_seconds:g} s"
    line = f"{rules.name}: ready after {startup_seconds:.0f} s, {steps}, weights of step {weights.step} answer"
    line = f"{line}; {proof}" if proof else line
    note(line)
    shutil.rmtree(run_dir)
    return line

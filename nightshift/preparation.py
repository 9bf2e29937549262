"""One-time set-up: what a set of rules needs before its first experiment, and how to get it.

Used by prepare.py and, but for prime-rl, by the first run.py; every step is skipped when it was done.
"""

from __future__ import annotations

import importlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nightshift.campaign.ledger import Ledger
from nightshift.engines import Engine
from nightshift.engines.prime_rl import launch as prime_rl_launch
from nightshift.engines.prime_rl.effective import effective
from nightshift.engines.prime_rl.errors import explain
from nightshift.engines.prime_rl.installation import Installation, is_whole_model, model_problem
from nightshift.engines.prime_rl.installer import Installer, pin_model
from nightshift.errors import ConfigError, EngineError, UsageError
from nightshift.evaluation import selection_set
from nightshift.processes.gpus import pair_problems
from nightshift.processes.supervise import engine_environment
from nightshift.records import Progress
from nightshift.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, Rules
from nightshift.train_toml.config import Config, parse

Note = Callable[[str], None]

NUM_REHEARSAL_PROMPTS = 8
# Cold caches: vLLM and the trainer compile everything in this one start. Not measured on GPUs.
WARM_UP = replace(GSM8K_PRIME_RL, name="warm-up", budget_seconds=90.0, startup_seconds=1200.0)
# For the shipped model of a megabyte, whose context is 512 tokens.
SMOKE_CONFIG = b"""
seq_len = 512
[orchestrator]
batch_size = 64
group_size = 8
[orchestrator.train.sampling]
max_completion_tokens = 64
"""


def prepare_missing(root: Path, rules: Rules, note: Note, gsm8k: Path | None = None) -> None:
    """Prepare base model, data and results.tsv as far as they are missing. EngineError names what cannot be had."""
    _base_model(root, rules, note)
    for environment in rules.environments:
        data: Any = importlib.import_module(f"{environment.package}.data")
        if hasattr(data, "prepare"):  # generated data needs none
            try:
                data.prepare(source=gsm8k, progress=note)
            except ValueError as error:  # the environments' own error, one line with its fix
                raise EngineError(str(error)) from None
    ledger = Ledger(root)
    if not ledger.tsv_path.exists() and ledger.sync_tsv():  # every run.py puts right what is wrong in it
        note("results.tsv: written")


def prepare_at_start(root: Path, rules: Rules, note: Note) -> None:
    """What a command does by itself before it trains. Not for prime-rl: gigabytes are prepare.py's to install."""
    if rules.engine == "trl":
        prepare_missing(root, rules, note)


def prepare_prime_rl(
    installer: Installer,
    config: Config,
    open_engine: Callable[[Rules], Engine],
    *,
    gsm8k: Path | None = None,
    smoke: bool = False,
) -> None:
    """Install prime-rl, its model and data; let it check train.toml; fill its compile caches by an unscored run.

    EngineError or ConfigError names what is in the way; repeating goes on where this stopped.
    """
    installation, rules, note = installer.installation, GSM8K_PRIME_RL, installer.note
    for problem in pair_problems(installer.gpus):
        raise problem
    installer.install()
    prepare_missing(installer.root, rules, note, gsm8k)
    if model_problem(installation, rules) is not None:
        pin_model(installation, rules, _base_model(installer.root, rules, note))
    with _alone(installation):
        note("checking train.toml with prime-rl's own classes")
        dry_run(installer, config)
        runs_dir = installation.state_dir / "runs"
        mark = installation.warm_mark(installer.gpus)
        if installer.gpus and not mark.is_file():
            note("filling the compile caches by an unscored run, once: up to twenty minutes")
            said = rehearse(open_engine(WARM_UP), WARM_UP, config, runs_dir / WARM_UP.name, note)
            mark.parent.mkdir(exist_ok=True)
            mark.write_text(said + "\n")
        if smoke:
            tiny = smoke_rules(installer.root)
            rehearse(open_engine(tiny), tiny, parse(SMOKE_CONFIG), runs_dir / tiny.name, note)


@contextmanager
def _alone(installation: Installation) -> Iterator[None]:
    """One prepare.py at a time fills the caches of an installation. UsageError while another does."""
    try:
        with FileLock(installation.state_dir / "prepare.lock", timeout=0):
            yield
    except Timeout:
        raise UsageError(f"another prepare.py is at work in {installation.root}", "Wait for it.") from None


def smoke_rules(root: Path) -> Rules:
    """The whole chain with the shipped model: half a minute of training, prompts and context as in its own rules."""
    return replace(
        ARITHMETIC_TRL,
        name="smoke",
        engine=GSM8K_PRIME_RL.engine,
        model=str(root / ARITHMETIC_TRL.model),
        budget_seconds=30.0,
        startup_seconds=GSM8K_PRIME_RL.startup_seconds,
    )


def dry_run(installer: Installer, config: Config) -> None:
    """Have prime-rl's own classes resolve what a run with this config would start. ConfigError with their refusal."""
    run_dir = installer.installation.state_dir / "runs" / "dry-run"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    launch = prime_rl_launch.plan(
        effective(config, GSM8K_PRIME_RL),
        seed=GSM8K_PRIME_RL.seed(0),
        run_dir=run_dir,
        ports=prime_rl_launch.free_ports(),
        gpu_ids=(),
        bin_dir=installer.installation.bin_dir,
        environment=installer.installation.environment(installer.root, installer.environ.get("PATH", "")),
    )
    launch.write()
    validator = next(command for command in launch.commands if command.name == "validator")
    environment = engine_environment(installer.environ, validator.env)
    try:
        installer.run(
            "prime-rl's validation", validator.argv, cwd=run_dir, env=environment, log_path=run_dir / validator.log_name
        )
    except EngineError:
        if not launch.verdict.is_file():
            raise
        raise ConfigError(explain(json.loads(launch.verdict.read_bytes())["errors"], config)) from None
    shutil.rmtree(run_dir)


def rehearse(engine: Engine, rules: Rules, config: Config, run_dir: Path, note: Note) -> str:
    """One short run of the whole chain: start, train, load the final weights, complete. Nothing is scored.

    Returns what it came to, one line. EngineError when any part fails; then `run_dir` keeps its logs.
    """
    began = time.monotonic()
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    settings = engine.validate(config).settings
    session = engine.open(settings, rules.seed(0), run_dir, rules.deadline_seconds)
    ready = time.monotonic()
    try:
        training = session.train(rules.budget_seconds, _silent)
        if not training.outcome.is_success:
            raise EngineError(f"{rules.name}: {training.cause}", f"Read the logs in {run_dir}.")
        weights = session.load_final_weights()
        prompts = [problem.messages for problem in selection_set(rules)[:NUM_REHEARSAL_PROMPTS]]
        completions = session.complete(prompts, rules.decoding, _silent)
    finally:
        session.close()
    if training.num_steps < 1 or len(completions) != len(prompts):
        raise EngineError(
            f"{rules.name}: {training.num_steps} steps in {rules.budget_seconds:g} s, "
            f"{len(completions)} of {len(prompts)} prompts completed",
            f"Read the logs in {run_dir}.",
        )
    said = (
        f"{rules.name}: ready after {ready - began:.0f} s, {training.num_steps} steps in {rules.budget_seconds:g} s, "
        f"weights of step {weights.step} answered {len(completions)} prompts"
    )
    note(said)
    shutil.rmtree(run_dir)
    return said


def _silent(reading: Progress) -> None:
    """Rehearsals show no live line."""


def _base_model(root: Path, rules: Rules, note: Note) -> Path:
    """The folder of the rules' model, downloaded if it is missing."""
    if rules.model_revision is None:
        if not (root / rules.model / "model.safetensors").is_file():
            raise EngineError(f"{rules.model} is missing", "Restore it: git checkout models, or --rebuild-base.")
        return root / rules.model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError, OSError):  # not in the cache
        snapshot = Path(snapshot_download(rules.model, revision=rules.model_revision, local_files_only=True))
        if is_whole_model(snapshot):
            return snapshot
    note(f"downloading {rules.model} (about 1 GB, once)")
    try:
        return Path(snapshot_download(rules.model, revision=rules.model_revision))
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EngineError(f"cannot download {rules.model}: {reason}", "Check the network, then repeat.") from None


def rebuild_base(root: Path, rules: Rules, note: Note) -> None:
    """Remake the shipped base model from its recipe: a fixed number of supervised steps (a few minutes)."""
    from nightshift.engines.trl import base_model as trl_base

    note(f"rebuilding {rules.model}: a few minutes; its bytes belong to the rules, so a new campaign starts")

    def progress(step: int, num_steps: int) -> None:
        if step % 50 == 0 or step == num_steps:
            note(f"supervised step {step} / {num_steps}")

    trl_base.rebuild(root / rules.model, trl_base.NUM_STEPS, seed=0, progress=progress)

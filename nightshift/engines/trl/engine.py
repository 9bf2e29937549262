"""The embedded engine: Hugging Face TRL's GRPOTrainer in one child process, on a CPU or one GPU.

This module checks, and maps train.toml to the trainer's settings; it never imports torch. session.py talks to
the trainer, trainer.py trains.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from nightshift.engines import Check, Effective, Note, PrepareFlags
from nightshift.engines.downloads import data_problem, prepare_data, prepare_model
from nightshift.engines.trl.session import TrlSession, trainer_argv
from nightshift.errors import ConfigError, UsageError
from nightshift.files import free_disk_gb
from nightshift.processes.supervise import engine_environment
from nightshift.rules import Rules
from nightshift.train_toml.config import Config

TRAINER = Path(__file__).with_name("trainer.py")
MIN_FREE_DISK_GB = 0.2  # a run writes a few MB of metrics, completions and weights
_NUM_THREADS = 2  # the rules' figures are measured with two

# prepare.py has fetched everything: a trainer that asks a hub would only wait for it.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

_OPTIMIZER_KEYS = {
    "adamw": ("lr", "weight_decay", "max_norm", "betas1", "betas2"),
    "sgd": ("lr", "weight_decay", "max_norm", "momentum", "nesterov"),
    "muon": ("lr", "weight_decay", "max_norm", "mu", "betas1", "betas2"),
}
_SCHEDULER_KEYS = {
    "constant": (),
    "linear": ("warmup_steps", "decay_steps", "min_lr"),
    "cosine": ("warmup_steps", "min_lr"),
}
_ALGOS = ("grpo", "max_rl")
_LENGTH = "orchestrator.train.sampling.max_completion_tokens"
# Keys that mean the same here. Everything else in train.toml is named as unused.
_USED = {
    "max_steps",
    "seq_len",
    "orchestrator.batch_size",
    "orchestrator.group_size",
    "orchestrator.algo.type",
    "orchestrator.train.sampling.temperature",
    _LENGTH,
    "orchestrator.train.filter_zero_advantages",
    "trainer.optim.type",
    "trainer.scheduler.type",
    *(f"trainer.optim.{name}" for names in _OPTIMIZER_KEYS.values() for name in names),
    *(f"trainer.scheduler.{name}" for names in _SCHEDULER_KEYS.values() for name in names),
}


class TrlEngine:
    """TRL on this machine, under the given rules."""

    name = "trl"

    def __init__(
        self,
        rules: Rules,
        root: Path,
        environ: Mapping[str, str],
        gpus: str | None = None,
        keep_all: bool = False,
        *,
        trainer: Path | None = None,
    ) -> None:
        """`environ` is the harness's own, of which `trainer` inherits what supervise allows.

        A run leaves nothing heavy, so `keep_all` changes nothing. UsageError for `gpus`.
        """
        if gpus is not None:
            raise UsageError(f"--gpus {gpus} is for --engine prime-rl", "Choose the GPU with CUDA_VISIBLE_DEVICES.")
        self.rules, self.root = rules, root
        self._environ = environ
        self._trainer = trainer or TRAINER
        self._cuda = rules.model_revision is not None  # the rules' real model is for a GPU

    def prepare(self, flags: PrepareFlags, note: Note) -> None:
        """Fetch base model and data."""
        if flags.is_for_prime_rl:
            raise UsageError("--prime-rl, --gpus and --smoke are for --engine prime-rl", "Leave them out.")
        prepare_model(self.root, self.rules, note)
        prepare_data(self.root, self.rules, flags.gsm8k, note)

    def prepare_at_start(self, note: Note) -> None:
        """All of it: it is small."""
        self.prepare(PrepareFlags(), note)

    def doctor(self, flags: PrepareFlags) -> list[Check]:
        """Packages, base model and disk; the data."""
        ready = f"{self.rules.name}: packages, base model, disk"
        names = ", ".join(environment.package for environment in self.rules.environments)
        problems: list[str | None] = [*self.check()]
        found = [Check(self.name, "installation", problem, ready) for problem in problems or [None]]
        return [*found, Check(self.name, "data", data_problem(self.root, self.rules), names)]

    def check(self) -> list[str]:
        """Missing packages, model or disk space, each with its fix."""
        problems = [
            f"package {name} is not installed. Run: uv sync"
            for name in ("torch", "transformers", "trl")
            if importlib.util.find_spec(name) is None
        ]
        if self.rules.model_revision is None and not (self.root / self.rules.model / "model.safetensors").is_file():
            problems.append(f"{self.rules.model} is missing. Run: uv run prepare.py --rebuild-base")
        free = free_disk_gb(self.root)
        if free < MIN_FREE_DISK_GB:
            problems.append(
                f"{free:.2f} GB of disk are free, {MIN_FREE_DISK_GB} are needed. Delete old folders in runs/"
            )
        return problems

    def hardware(self) -> str:
        """`cpu x86_64, 2 cores`, or the name of the GPU."""
        if self._cuda:
            import pynvml

            pynvml.nvmlInit()
            return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
        return f"cpu {platform.machine()}, {len(os.sched_getaffinity(0))} cores"

    def versions(self) -> dict[str, str]:
        """Of Python and of the packages that train; the trainer runs in this environment."""
        packages = {name: metadata.version(name) for name in ("torch", "transformers", "trl")}
        return {"python": platform.python_version(), **packages}

    def validate(self, config: Config) -> Effective:
        """The trainer's settings. The learning rate is scaled by the rules; lengths are capped by them.

        Raises ConfigError for an optimizer, schedule or algorithm that TRL cannot express.
        """
        optimizer = _choice(config, "trainer.optim.type", _OPTIMIZER_KEYS)
        scheduler = _choice(config, "trainer.scheduler.type", _SCHEDULER_KEYS)
        algo = _choice(config, "orchestrator.algo.type", dict.fromkeys(_ALGOS, ()))
        if config.get("orchestrator.batch_size") is None:
            raise ConfigError("orchestrator.token_batch_size has no equal in TRL", "Write orchestrator.batch_size.")
        cap = self.rules.max_completion_tokens
        settings: dict[str, Any] = {
            "optimizer": {"type": optimizer}
            | {name: config.get(f"trainer.optim.{name}") for name in _OPTIMIZER_KEYS[optimizer]},
            "scheduler": {"type": scheduler}
            | {name: config.get(f"trainer.scheduler.{name}") for name in _SCHEDULER_KEYS[scheduler]},
            "algo": {"type": algo},
            "batch_size": config.get("orchestrator.batch_size"),
            "group_size": config.get("orchestrator.group_size"),
            "temperature": config.get("orchestrator.train.sampling.temperature"),
            "max_completion_tokens": min(config.get(_LENGTH) or cap, cap),
            "filter_zero_advantages": config.get("orchestrator.train.filter_zero_advantages"),
            "max_steps": config.get("max_steps"),
            "seq_len": config.get("seq_len"),
        }
        settings["optimizer"]["lr"] *= self.rules.learning_rate_scale
        if "min_lr" in settings["scheduler"]:
            settings["scheduler"]["min_lr"] *= self.rules.learning_rate_scale
        is_capped = (config.get(_LENGTH) or cap) >= cap  # any value up there means the same
        used = _USED - {_LENGTH} if is_capped else _USED
        return Effective(settings, tuple(key for key in config.values if key not in used))

    def describe(self, settings: Mapping[str, Any], seed: int, run_dir: Path) -> list[str]:
        """The trainer's command line and what its spec.json would hold."""
        spec = self._spec(settings, seed, run_dir)
        command = shlex.join(map(str, trainer_argv(self._trainer, run_dir / "spec.json")))
        settings_of = spec.pop("settings").items()
        flat = spec | {f"settings.{name}": value for name, value in settings_of}
        return [f"trainer:  {command}", *(f"spec:     {name} = {json.dumps(value)}" for name, value in flat.items())]

    def open(self, settings: Mapping[str, Any], seed: int, run_dir: Path, deadline_seconds: float) -> TrlSession:
        """Start the trainer and wait until it has loaded model and trainer."""
        deadline = time.monotonic() + deadline_seconds
        spec_path = run_dir / "spec.json"
        spec_path.write_text(json.dumps(self._spec(settings, seed, run_dir), indent=1))
        environment_variables = engine_environment(self._environ, _OFFLINE)
        session = TrlSession(self._trainer, spec_path, run_dir, environment_variables, deadline)
        try:
            session.wait_until_ready(self.rules.startup_seconds)
        except BaseException:
            session.close()
            raise
        return session

    def _spec(self, settings: Mapping[str, Any], seed: int, run_dir: Path) -> dict[str, Any]:
        model = str(self.root / self.rules.model) if self.rules.model_revision is None else self.rules.model
        return {
            "model": model,
            "model_revision": self.rules.model_revision,
            "root": str(self.root),
            "environments": [asdict(environment) for environment in self.rules.environments],
            "train_seed": seed,
            "settings": dict(settings),
            "metrics_path": str(run_dir / "metrics.jsonl"),
            "weights_dir": str(run_dir / "weights"),
            "device": "cuda" if self._cuda else "cpu",
            "num_threads": min(_NUM_THREADS, len(os.sched_getaffinity(0))),
        }


def _choice(config: Config, key: str, choices: Mapping[str, Sequence[str]]) -> str:
    value = str(config.get(key))
    if value not in choices:
        raise ConfigError(
            f'train.toml: {key} = "{value}" has no equal in TRL',
            f"Write one of {', '.join(choices)}, or use --engine prime-rl.",
        )
    return value

"""The embedded engine: Hugging Face TRL's GRPOTrainer in one child process, on a CPU or one GPU.

This module maps train.toml to the trainer's settings; it never imports torch. session.py is the connection to the
trainer process, trainer.py the trainer process.
"""

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from nightshift.campaign.metrics import METRICS_NAME
from nightshift.campaign.records import WEIGHTS_NAME
from nightshift.config.allowlist import KEYS, LOSS, OPPONENT, PRIME_RL_LOSSES, RATIO, find_key
from nightshift.config.rules import NO_CARD
from nightshift.config.rules_toml import MODELS
from nightshift.config.train_toml import Config
from nightshift.engines.base import Check, Effective, Engine, Note, Plan, PrepareFlags, Settings, size_of
from nightshift.engines.downloads import data_problem, model_folder, model_problem, prepare_data, prepare_model
from nightshift.engines.mixture import opponent, ratios, where
from nightshift.engines.rehearsal import smoke
from nightshift.engines.trl.session import TrlSession
from nightshift.errors import ConfigError, UsageError
from nightshift.executors.gpus import Gpu
from nightshift.executors.local import Capacity, capacity, own_cores
from nightshift.executors.process import python_command, python_environment
from nightshift.files import write_json

# By the memory of the GPU in GB: the number of rollouts in one forward and backward pass, and in one pass of sampling
# (at least one group). Estimated, not measured.
AT_ONCE = {80: (16, 512), 48: (8, 256), 24: (2, 64), 16: (1, 32)}
_AT_ONCE_ON_CPU = (512, 512)
# Two threads synchronize after every operation. Steps in equal time on 2 cores, with two threads and with one: 70 and
# 70 on an idle machine, 37 and 47 with two busy processes, 6 and 12 with four.
_NUM_THREADS = 1

# prepare.py has downloaded everything.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

# The trainer's name of a setting -> its key in train.toml, without the tables with variants.
_SETTINGS = {
    "batch_size": "orchestrator.batch_size",
    "group_size": "orchestrator.group_size",
    "temperature": "orchestrator.train.sampling.temperature",
    "max_completion_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "filter_zero_advantages": "orchestrator.train.filter_zero_advantages",
    "max_steps": "max_steps",
    "seq_len": "seq_len",
}
# The tables with variants; their settings are the keys of the allow-list that this engine uses.
_TABLES = {"optimizer": "trainer.optim", "scheduler": "trainer.scheduler", "algo": "orchestrator.algo"}


class TrlEngine(Engine):
    """TRL on this machine, under the given rules."""

    name = "trl"
    trainer: Sequence[str] = ("-m", "nightshift.engines.trl.trainer")  # the arguments of python_command

    def __init__(self, *arguments: Any) -> None:
        """`arguments`: of Engine."""
        super().__init__(*arguments)
        if self._gpu_ids == ():
            raise UsageError("--gpus none is for --engine prime-rl", "Leave it out.")

    def prepare(self, flags: PrepareFlags, note: Note) -> None:
        """Fetch base model and data. With `smoke`, run the whole chain with the tiny model instead."""
        if flags.smoke is not None:
            self.free_gpus()
            smoke(self, flags.smoke, self.root / "runs", note)
            return
        prepare_model(self.root, self.rules, note)
        prepare_data(self.root, self.rules, flags.sources, note)

    def prepare_at_start(self, note: Note) -> None:
        """Do all of `prepare`, which takes little time."""
        self.prepare(PrepareFlags(), note)

    def doctor(self) -> list[Check]:
        """As the base class, and check the data. `checks` does not, because reading data may take ten seconds."""
        names = ", ".join(environment.package for environment in self.rules.scored)
        problem = data_problem(self.root, self.rules)
        return [*self.checks(), Check(self.name, "data", problem, names, is_warning=True)]

    def parts(self, gpus: Sequence[Gpu]) -> list[Check]:
        """Check the base model. A missing model of the hub is a warning: a run downloads it at its start."""
        problem, is_on_hub = model_problem(self.rules, self.root), self.rules.model_revision is not None
        checks = [Check(self.name, "model", problem, self.rules.model, is_warning=is_on_hub)]
        if (capacity := self.capacity()) is not None:
            checks.append(Check(self.name, "runs", detail=str(capacity)))
        return checks

    def hardware(self) -> str:
        """Return `cpu x86_64, 2 cores`, or `1 x NVIDIA H100 80GB HBM3`."""
        if self.uses_gpus:
            return super().hardware()
        return f"cpu {platform.machine()}, {len(own_cores())} cores"

    def capacity(self) -> Capacity | None:
        """Return the capacity of a CPU for a shipped model, whose memory was measured; None otherwise."""
        return capacity() if not self.uses_gpus and self.rules.model.startswith(MODELS) else None

    def versions(self) -> dict[str, str]:
        """Return the versions of Python and of the packages that train, which are in this environment."""
        packages = {name: metadata.version(name) for name in ("torch", "transformers", "trl")}
        return {"python": platform.python_version(), **packages}

    def validate(self, config: Config) -> Effective:
        """Return the trainer's settings, with the learning rate and the length limit of the rules.

        ConfigError for an optimizer, schedule, algorithm or loss that TRL does not have.
        """
        settings: dict[str, Any] = {name: config.get(path) for name, path in _SETTINGS.items()}
        unused = {path for path in config.resolved if not ((key := find_key(path)) and self.name in key.engines)}
        for name, table in _TABLES.items():
            keys = [key for key in KEYS if key.table == table and self.name in key.engines]
            settings[name] = {key.leaf: config.get(key.path) for key in keys if key.path in config.resolved}
            kind = settings[name]["type"]
            if kind not in keys[0].choices_of(self.name):
                cause = f'train.toml: {table}.type = "{kind}" does not exist in TRL'
                raise ConfigError(cause, "Write another type, or use --engine prime-rl.")
        if config.get(LOSS) not in PRIME_RL_LOSSES:
            fix = 'Write type = "ipo", or use --engine prime-rl.'
            raise ConfigError(f"{where(config, LOSS)}: --engine trl always uses TRL's loss", fix)
        if settings["batch_size"] is None:
            raise ConfigError("orchestrator.token_batch_size does not exist in TRL", "Write orchestrator.batch_size.")
        ratio, other = ratios(config, self.rules), opponent(config, self.rules)
        for name, table, values in (("ratio", RATIO, ratio), ("opponent", OPPONENT, other)):
            if values:
                settings[name] = values
            else:
                unused |= {path for path in config.resolved if path.startswith(f"{table}.")}
        cap, length = self.rules.max_completion_tokens, settings["max_completion_tokens"]
        if length is None or length >= cap:  # equal to no value
            settings["max_completion_tokens"] = cap
            unused.add(_SETTINGS["max_completion_tokens"])
        scale = self.rules.learning_rate_scale
        for name, leaf in (("optimizer", "lr"), ("scheduler", "min_lr")):
            if rate := settings[name].get(leaf):
                settings[name][leaf] = rate * scale
        return Effective(settings, frozenset(unused))

    def plan(self, settings: Settings, seed: int, run_dir: Path) -> Plan:
        """Return the trainer's command line and the fields of its spec.json."""
        command = python_command(*self.trainer, str(run_dir / "spec.json"))
        return {"trainer": command}, self.spec(settings, seed, run_dir)

    def open(self, settings: Settings, seed: int, run_dir: Path, deadline_seconds: float) -> TrlSession:
        """Start the trainer and wait until it has loaded model and trainer."""
        deadline = time.monotonic() + deadline_seconds
        write_json(run_dir / "spec.json", self.spec(settings, seed, run_dir))
        variables, ids = dict(_OFFLINE), [gpu.index for gpu in self.gpus()]
        if ids:  # NVML's number, independent of the current CUDA_VISIBLE_DEVICES
            variables |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(ids[0])}
        environment = python_environment(self._environ, self.machine.environment | variables)
        return TrlSession(self.trainer, run_dir, environment, deadline, self.startup_seconds, ids)

    def spec(self, settings: Settings, seed: int, run_dir: Path) -> dict[str, Any]:
        """Return the fields of spec.json, which the trainer process reads."""
        memory = self.rules.memory
        trained, sampled = _AT_ONCE_ON_CPU if memory == NO_CARD else AT_ONCE[size_of(memory)[1]]
        return {
            "model": str(model_folder(self.rules, self.root)),
            "root": str(self.root),
            "environments": [asdict(environment) for environment in self.rules.environments],
            "train_seed": seed,
            "settings": dict(settings),
            "metrics_path": str(run_dir / METRICS_NAME),
            "weights_dir": str(run_dir / WEIGHTS_NAME),
            "device": "cuda" if self.uses_gpus else "cpu",
            "trained_at_once": trained,
            "sampled_at_once": sampled,
            "num_threads": _NUM_THREADS,
            "budget_clock": "wall" if self.uses_gpus else self.rules.budget_clock,
        }

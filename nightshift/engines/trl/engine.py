"""The embedded engine: Hugging Face TRL's GRPOTrainer in one child process, on a CPU or one GPU.

This module checks, and maps train.toml to the trainer's settings; it never imports torch. session.py talks to
the trainer, trainer.py trains.
"""

import json
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from nightshift.campaign.metrics import METRICS_NAME
from nightshift.campaign.records import WEIGHTS_NAME
from nightshift.config.allowlist import KEYS, OPPONENT, RATIO, uses
from nightshift.config.rules import NO_CARD, Rules
from nightshift.config.rules_toml import MODELS
from nightshift.config.train_toml import Config
from nightshift.engines.base import Check, Effective, Engine, Note, PrepareFlags, scaled_rate, size_of
from nightshift.engines.downloads import changes, data_problem, local_problem, prepare_data, prepare_model
from nightshift.engines.mixture import difficulty_pools, opponent, ratios
from nightshift.engines.trl.session import TrlSession
from nightshift.errors import ConfigError, EngineError, UsageError
from nightshift.executors.gpus import Gpu, choose_gpus, gpu_problems, gpu_warnings, list_gpus, parse_gpus
from nightshift.executors.local import Capacity, capacity, own_cores
from nightshift.executors.process import python_command, python_environment
from nightshift.files import free_disk_gb, write_json

TRAINER = ("-m", "nightshift.engines.trl.trainer")
MIN_DRIVER = 580  # of CUDA 13, with which this environment's torch is built
# By the memory of the card in GB: how many rollouts a forward and backward pass takes, and how many are sampled
# together (a group at least). Estimated, not measured.
AT_ONCE = {80: (16, 512), 48: (8, 256), 24: (2, 64), 16: (1, 32)}
_AT_ONCE_ON_CPU = (512, 512)
MIN_FREE_DISK_GB = 0.2  # a run writes a few MB of metrics, completions and weights
# Two wait for each other after every operation. On 2 cores, in as many seconds: calm both make about 70 steps, beside
# two busy processes two threads make 37 and one 47, beside four 6 and 12.
_NUM_THREADS = 1

# prepare.py has fetched everything: a trainer that asks a hub would only wait for it.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

# The keys of train.toml outside of tables with variants, by the name of the trainer's setting.
_SETTINGS = {
    "batch_size": "orchestrator.batch_size",
    "group_size": "orchestrator.group_size",
    "temperature": "orchestrator.train.sampling.temperature",
    "max_completion_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "filter_zero_advantages": "orchestrator.train.filter_zero_advantages",
    "max_steps": "max_steps",
    "seq_len": "seq_len",
}
# The tables with variants: their keys are those of the allow-list that this engine uses.
_OF_EXAMPLES = {"ratio": RATIO, "opponent": OPPONENT}  # mixture.py
_TABLES = {"optimizer": "trainer.optim", "scheduler": "trainer.scheduler", "algo": "orchestrator.algo"}


class TrlEngine(Engine):
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
        trainer: Sequence[str] = TRAINER,
    ) -> None:
        """`trainer`: the words of its command (process.py: python_command). `gpus` is one GPU, on which the tiny model
        trains, too; UsageError for others. A run leaves nothing heavy, so `keep_all` changes nothing."""
        self.rules, self.root, self._environ, self._trainer = rules, root, environ, trainer
        self._gpu_ids = None if gpus is None else parse_gpus(gpus, 1)
        if self._gpu_ids == ():
            raise UsageError(f"--gpus {gpus} is for --engine prime-rl", "Leave it out.")
        self._cuda = rules.num_gpus > 0 or gpus is not None

    def prepare(self, flags: PrepareFlags, note: Note) -> None:
        """Fetch base model and data: the same for every GPU."""
        if flags.smoke:
            raise UsageError("--smoke is for --engine prime-rl", "Leave it out.")
        prepare_model(self.root, self.rules, note)
        prepare_data(self.root, self.rules, flags.sources, note)

    def prepare_at_start(self, note: Note) -> None:
        """Do all of `prepare`: it is small."""
        self.prepare(PrepareFlags(), note)

    def doctor(self) -> list[Check]:
        """Check the GPU, the base model and the data."""
        names = ", ".join(environment.package for environment in self.rules.environments)
        gpu = f"{self.hardware()}, memory preset {self.rules.memory}, " if self._cuda else ""
        ready = f"{self.rules.name}: {gpu}base model"
        found = [Check(self.name, "installation", problem, ready) for problem in (*self.check(),) or (None,)]
        # A run fetches the data at its start.
        found.append(Check(self.name, "data", data_problem(self.root, self.rules), names, is_warning=True))
        if (fitting := self.capacity()) is not None:
            found.append(Check(self.name, "runs", detail=str(fitting)))
        return found + self.warnings()

    def warnings(self) -> list[Check]:
        """Return guesses about the GPU and the disk."""
        problems = list[EngineError]()
        if self._cuda:
            with suppress(EngineError):
                problems += gpu_warnings([self._gpu()], MIN_DRIVER)
        if (free := free_disk_gb(self.root)) < MIN_FREE_DISK_GB:
            problems.append(EngineError(f"{free:.2f} GB of disk are free", "Run: du -sh runs/*; then delete old ones."))
        return [Check(self.name, "machine", warning, is_warning=True) for warning in problems]

    def check(self) -> list[str]:
        """Return the problems of the GPU and of the base model, each with its fix."""
        problems = list[EngineError | None]()
        try:
            problems += gpu_problems([self._gpu()]) if self._cuda else []
        except EngineError as error:
            problems.append(error)
        return [str(problem) for problem in (*problems, local_problem(self.rules, self.root)) if problem]

    def hardware(self) -> str:
        """Return `cpu x86_64, 2 cores`, or `1 x NVIDIA H100 80GB HBM3`."""
        if not self._cuda:
            return f"cpu {platform.machine()}, {len(own_cores())} cores"
        with suppress(EngineError):  # `check` reports it before anything runs
            return f"1 x {self._gpu().name}"
        return "no such GPU"

    def gpu_ids(self) -> tuple[int, ...]:
        """Return one number, or none."""
        return (self._gpu().index,) if self._cuda else ()

    def capacity(self) -> Capacity | None:
        """Return the capacity of a CPU for a model of models/, whose memory was measured."""
        return capacity() if not self._cuda and self.rules.model.startswith(MODELS) else None

    def versions(self) -> dict[str, str]:
        """Return those of Python and of the packages that train; the trainer runs in this environment."""
        packages = {name: metadata.version(name) for name in ("torch", "transformers", "trl")}
        return {"python": platform.python_version(), **packages}

    def validate(self, config: Config) -> Effective:
        """Return the trainer's settings. The learning rate is scaled by the rules; lengths are capped by them.

        Raises ConfigError for an optimizer, schedule or algorithm that TRL cannot express.
        """
        settings: dict[str, Any] = {name: config.get(path) for name, path in _SETTINGS.items()}
        for name, table in _TABLES.items():
            keys = [key for key in KEYS if key.table == table and uses(self.name, key.path)]
            settings[name] = {key.leaf: config.get(key.path) for key in keys if key.path in config.resolved}
            kind = settings[name]["type"]
            if kind not in keys[0].choices_of(self.name):
                cause = f'train.toml: {table}.type = "{kind}" has no equal in TRL'
                raise ConfigError(cause, "Write another type, or use --engine prime-rl.")
        if settings["batch_size"] is None:
            raise ConfigError("orchestrator.token_batch_size has no equal in TRL", "Write orchestrator.batch_size.")
        examples = {
            "difficulty_pools": difficulty_pools(config, self.rules),
            "ratio": ratios(config, self.rules),
            "opponent": opponent(config, self.rules),
        }
        settings |= {name: value for name, value in examples.items() if value}
        unused_tables = tuple(f"{table}." for name, table in _OF_EXAMPLES.items() if name not in settings)
        unused = {path for path in config.resolved if not uses(self.name, path) or path.startswith(unused_tables)}
        cap, length = self.rules.max_completion_tokens, settings["max_completion_tokens"]
        if length is None or length >= cap:  # any value up there means the same
            settings["max_completion_tokens"] = cap
            unused.add(_SETTINGS["max_completion_tokens"])
        scale, scaled = self.rules.learning_rate_scale, []
        for name, leaf in (("optimizer", "lr"), ("scheduler", "min_lr")):
            rate = settings[name].get(leaf)
            if rate and scale != 1:
                settings[name][leaf] = rate * scale
                scaled.append(scaled_rate(f"{_TABLES[name]}.{leaf}", rate, scale))
        in_file = tuple(path for path in config.values if path in unused)
        return Effective(settings, in_file, frozenset(unused), tuple(scaled))

    def describe(self, settings: Mapping[str, Any], seed: int, run_dir: Path, *, verbose: bool = True) -> list[str]:
        """Return the model and the memory preset; then the trainer's command line and the fields of its spec.json."""
        spec = self.spec(settings, seed, run_dir)
        command = shlex.join(python_command(*self._trainer, str(run_dir / "spec.json")))
        flat = spec | {f"settings.{name}": value for name, value in spec.pop("settings").items()}
        lines = changes(self.rules, self.root / self.rules.model)
        lines += [f"memory:   {self.rules.memory}"] if self._cuda else []
        details = [f"trainer:  {command}", *(f"spec:     {name} = {json.dumps(value)}" for name, value in flat.items())]
        return lines + details if verbose else lines

    def open(self, settings: Mapping[str, Any], seed: int, run_dir: Path, deadline_seconds: float) -> TrlSession:
        """Start the trainer and wait until it has loaded model and trainer."""
        deadline = time.monotonic() + deadline_seconds
        write_json(run_dir / "spec.json", self.spec(settings, seed, run_dir))
        variables = dict(_OFFLINE)
        if self._cuda:  # NVML's number, whatever CUDA_VISIBLE_DEVICES says here
            variables |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(self._gpu().index)}
        environment = python_environment(self._environ, self.machine.environment | variables)
        return TrlSession(self._trainer, run_dir, environment, deadline, self.startup_seconds, self.gpu_ids())

    def _gpu(self) -> Gpu:
        """Return the GPU that trains. EngineError if there is none."""
        return choose_gpus(list_gpus(), self._gpu_ids, 1, self._environ)[0]

    def spec(self, settings: Mapping[str, Any], seed: int, run_dir: Path) -> dict[str, Any]:
        """Return what the trainer process reads."""
        memory = self.rules.memory
        trained, sampled = _AT_ONCE_ON_CPU if memory == NO_CARD else AT_ONCE[size_of(memory)[1]]
        return {
            "model": self.rules.model if self.rules.model_revision else str(self.root / self.rules.model),
            "model_revision": self.rules.model_revision,
            "root": str(self.root),
            "environments": [asdict(environment) for environment in self.rules.environments],
            "train_seed": seed,
            "settings": dict(settings),
            "metrics_path": str(run_dir / METRICS_NAME),
            "weights_dir": str(run_dir / WEIGHTS_NAME),
            "device": "cuda" if self._cuda else "cpu",
            "trained_at_once": trained,
            "sampled_at_once": sampled,
            "num_threads": _NUM_THREADS,
            "budget_clock": "wall" if self._cuda else self.rules.budget_clock,
        }

"""The base class of engines, which turn (config, seed, budget) into a trained policy, and the registry of engines.

An engine starts processes; executors/process.py ends them. Metrics come from structured files, never from log text.
To add an engine, add a folder here and a line in the registry. tests/contract tests every engine.
"""

from __future__ import annotations

import importlib
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nightshift.campaign.metrics import Step, num_without_gradient
from nightshift.campaign.records import Phase, Progress, ProgressCallback, Training, Weights
from nightshift.config.allowlist import KEYS, LOSS, number_text
from nightshift.config.losses import keys_with
from nightshift.config.rules import NO_CARD, Rules
from nightshift.config.rules_toml import chosen_in
from nightshift.config.train_toml import Config
from nightshift.engines.machine import read_machine
from nightshift.errors import EngineError, NightshiftError, UsageError
from nightshift.evaluation.environment import Policy
from nightshift.executors import network
from nightshift.executors.gpus import SIZES_GB, Gpu, choose_gpus, gpu_problems, list_gpus, parse_gpus
from nightshift.executors.local import Capacity
from nightshift.waiting import mark

if TYPE_CHECKING:
    from nightshift.engines.prime_rl.served import ServedProof

Note = Callable[[str], None]  # one line of news
Environ = Mapping[str, str]  # variables of processes
Settings = Mapping[str, Any]  # of an engine for a config
Plan = tuple[Mapping[str, Sequence[str]], Settings]  # the command line of each process, and their config

# Name -> module and class, which is imported when the engine is opened: prime-rl's loads an HTTP client.
_ENGINES = {
    "trl": ("nightshift.engines.trl.engine", "TrlEngine"),
    "prime-rl": ("nightshift.engines.prime_rl.engine", "PrimeRlEngine"),
}
ENGINES = tuple(_ENGINES)
LEARNING_RATES = ("trainer.optim.lr", "trainer.scheduler.min_lr")
NO_GPU = "no GPU (--gpus none): not comparable"
ALL = "all"  # engine of a check that concerns every engine


def open_engine(
    rules: Rules,
    root: Path,
    environ: Environ,
    gpus: str | None = None,
    prime_rl: Path | None = None,
) -> Engine:
    """Return the engine of `rules` for the checkout at `root`. `gpus`, `prime_rl`: the flags --gpus and --prime-rl.

    UsageError if a flag is for another engine, or machine.toml has a mistake.
    """
    if prime_rl is not None and rules.engine != "prime-rl":
        cause = f"--prime-rl {prime_rl} is for --engine prime-rl, these rules ({rules.name}) are for {rules.engine}"
        raise UsageError(cause, "Leave it out, or add --engine prime-rl.")
    module, name = _ENGINES[rules.engine]
    engine: Engine = getattr(importlib.import_module(module), name)(rules, root, environ, gpus)
    return engine


def isolate(rules: Rules, root: Path) -> None:
    """Move this process, which must have only one thread, into a network namespace if the engine's server has no
    password and namespaces work here. Otherwise the run shares the network, and its record says so."""
    with suppress(UsageError, OSError):  # UsageError: `open_engine` raises it again
        if rules.engine == "prime-rl" and not network_problem(root):
            network.enter()


def network_problem(root: Path) -> str:
    """Return why runs share the network of this machine; "" if each gets its own namespace."""
    return "machine.toml has share_network = true" if read_machine(root).share_network else network.problem()


def on_cards(rules: Rules, root: Path, environ: Environ, gpus: str | None) -> Rules:
    """Return `rules` with a memory preset such as `2 x 80 GB`: the largest that fits the smallest GPU of a run.

    memory_gb of rules.toml overrides the size. Without GPUs and memory_gb, `rules` are returned unchanged. UsageError
    if `gpus`, the flag --gpus, is invalid.
    """
    ids = parse_gpus(gpus, rules.gpu_split) if rules.num_gpus and gpus is not None else None
    if not rules.num_gpus or ids == ():
        return rules
    size: int = chosen_in(root).memory_gb
    with suppress(EngineError):
        least = min(gpu.memory_gb or 0.0 for gpu in choose_gpus(list_gpus(), ids, rules.num_gpus, environ))
        size = size or max((preset for preset in SIZES_GB if preset <= least), default=min(SIZES_GB))
    return replace(rules, memory=f"{len({*(ids or range(rules.num_gpus))})} x {size} GB") if size else rules


def size_of(memory: str) -> tuple[bool, int]:
    """Return whether inference and trainer share a GPU, and the size of the preset in GB, from Rules.memory."""
    num_cards, _, size = memory.removesuffix(" GB").partition(" x ")
    return (False, max(SIZES_GB)) if memory == NO_CARD else (num_cards == "1", int(size))


class NoGradient(EngineError):
    """No gradient is left to learn from. A progress callback raises it to end the training."""


@dataclass(frozen=True)
class PrepareFlags:
    """The flags of prepare.py and doctor."""

    engine: str | None = None
    gpus: str | None = None
    prime_rl: Path | None = None
    smoke: float | None = None  # seconds of training
    prove: bool = False
    gsm8k: Path | None = None
    math: Path | None = None

    @property
    def sources(self) -> dict[str, Path]:
        """The folders with data, by environment."""
        return {name: path for name, path in (("gsm8k", self.gsm8k), ("math", self.math)) if path is not None}

    @property
    def engine_meant(self) -> str | None:
        """The engine that the flags name or imply; a single GPU implies neither."""
        is_pair = self.gpus is not None and not self.gpus.strip().isdecimal()
        return self.engine or ("prime-rl" if self.smoke or is_pair or self.prime_rl else None)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check of doctor. Only a problem that is needed and no warning prevents a run."""

    engine: str  # that the check concerns, or ALL
    name: str
    problem: object = None  # an error with its fix, or its text
    detail: str = ""  # shown if there is no problem
    is_warning: bool = False
    is_needed: bool = True  # False if this machine does not use the engine

    @property
    def ok(self) -> bool:
        return self.problem is None or self.is_warning or not self.is_needed

    def __str__(self) -> str:
        state = "ok" if self.problem is None else "warning" if self.is_needed else "not used"
        text = self.detail if self.problem is None else str(self.problem).rstrip(".")
        return f"{self.engine:10}{self.name:14}{state if self.ok else 'PROBLEM':9}{text}".rstrip()


def look(name: str, read: Callable[[], object]) -> Check:
    """Return a check for all engines with the result of `read` as its detail, or its error as its problem."""
    try:
        return Check(ALL, name, detail=str(read()))
    except NightshiftError as error:
        return Check(ALL, name, error)


class Effective(NamedTuple):
    """The settings of an engine for a config. Two configs with equal `settings` train the same."""

    settings: Settings
    unused: frozenset[str] = frozenset()  # keys that this engine does not use, in train.toml or not


class Session(Policy):
    """One run, whose processes can train when `Engine.open` returns."""

    @abstractmethod
    def train(self, budget_seconds: float, progress: ProgressCallback) -> Training:
        """Train until the budget ends, max_steps is reached or `progress` raises NoGradient. The Training has the cause
        of a failed run."""

    def confirm(self) -> None:
        """Check after the scoring that the weights of `load_final_weights` gave the answers. EngineError if the server
        has other weights."""
        return

    @abstractmethod
    def close(self) -> None:
        """Stop every process of the run, and check that none is left. You may call it twice."""


def training_progress(steps: Sequence[Step], seconds_left: float, note: str = "") -> Progress:
    """Return the argument of a training's progress callback after these steps."""
    return Progress(
        Phase.TRAINING,
        len(steps),
        seconds_left,
        steps[-1].reward_mean if steps else None,
        num_with_gradient=sum(step.has_gradient is True for step in steps),
        num_without_gradient=num_without_gradient(steps),
        note=note,
    )


class Engine(ABC):
    """A way to train. The arguments of `open_engine` are all that an engine needs, so a worker can build the same."""

    name: str

    def __init__(self, rules: Rules, root: Path, environ: Environ, gpus: str | None = None) -> None:
        """`gpus`: the flag --gpus. UsageError for GPUs that this engine cannot use, and for an invalid machine.toml."""
        self.rules, self.root, self._environ = rules, root, environ
        self._gpu_ids = None if gpus is None else parse_gpus(gpus, rules.gpu_split)
        self.machine = read_machine(root)

    @property
    def startup_seconds(self) -> float:
        """The limit of a start: that of the rules, or a higher limit of machine.toml."""
        return max(self.rules.startup_seconds, self.machine.limits.startup_seconds or 0.0)

    @property
    def deadline_seconds(self) -> float:
        """The limit of a run from its start to its last score."""
        return self.rules.deadline_seconds - self.rules.startup_seconds + self.startup_seconds

    @property
    def uses_gpus(self) -> bool:
        """False on a CPU, and with --gpus none."""
        return self.rules.num_gpus > 0 if self._gpu_ids is None else self._gpu_ids != ()

    def gpus(self) -> Sequence[Gpu]:
        """Return the GPUs of a run: for inference, then for the trainer; one GPU may appear twice. () without GPUs.

        EngineError if this machine has too few.
        """
        if not self.uses_gpus:
            return ()
        return choose_gpus(list_gpus(), self._gpu_ids, self.rules.num_gpus, self._environ)

    def gpus_here(self) -> Sequence[Gpu]:
        """Return the GPUs of a run, () if this machine has too few."""
        with suppress(EngineError):
            return self.gpus()
        return ()

    def hardware(self) -> str:
        """Return the hardware of a run, e.g. `2 x NVIDIA H100 80GB HBM3` or `cpu x86_64, 2 cores`, which is the same in
        all runs of a campaign. Different GPUs are joined by ` + `."""
        if not self.uses_gpus:
            return NO_GPU
        names = [gpu.name for gpu in dict.fromkeys(self.gpus_here())]
        if len({*names}) == 1:
            return f"{len(names)} x {names[0]}"
        return " + ".join(names) or "no such GPUs"  # `check` reports this problem before anything starts

    def free_gpus(self) -> Sequence[Gpu]:
        """Return the GPUs of a run. EngineError if there are too few, or another process uses a GPU."""
        mark("driver and memory")
        gpus = self.gpus()
        for problem in gpu_problems(gpus):
            raise problem
        mark("driver and memory", "; ".join(map(_describe, gpus)))
        return gpus

    def under(self, rules: Rules) -> Engine:
        """Return an engine for the same machine, GPUs and installation under other rules."""
        engine = copy(self)
        engine.rules = rules
        return engine

    @abstractmethod
    def prepare(self, flags: PrepareFlags, note: Note) -> None:
        """Download and install what is missing for experiments. A second call resumes.

        EngineError if something cannot be downloaded or installed; UsageError if a flag is for another engine.
        """

    def prepare_at_start(self, note: Note) -> None:
        """Do the part of `prepare` that each start of a run or night does. Call as the controller."""
        return

    def doctor(self) -> list[Check]:
        """Check the GPUs and everything that `prepare` provides, without changing anything."""
        return self.checks()

    def checks(self) -> list[Check]:
        """Check everything that a run needs before it starts."""
        try:
            gpus = self.gpus()
        except EngineError as error:
            return [Check(self.name, "GPUs", error), *self.parts(())]
        details, preset = "; ".join(map(_describe, gpus)), f"preset {self.rules.memory}"
        checks = [Check(self.name, "GPUs", problem, details) for problem in gpu_problems(gpus) or (None,)]
        return [*checks, Check(self.name, "memory", detail=preset), *self.parts(gpus)] if gpus else self.parts(())

    @abstractmethod
    def parts(self, gpus: Sequence[Gpu]) -> list[Check]:
        """Check everything but the GPUs that a run on these GPUs needs."""

    def check(self) -> list[str]:
        """Return the problems that prevent a run, each in one line with its fix."""
        return [str(check.problem) for check in self.checks() if not check.ok]

    def capacity(self) -> Capacity | None:
        """Return how many runs fit side by side on a CPU; None on GPUs, or if the memory of a run is unknown."""
        return None

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the known versions of the software that trains, by name, from metadata."""

    @abstractmethod
    def validate(self, config: Config) -> Effective:
        """Return the engine's settings for a checked train.toml. ConfigError for a value that it cannot express."""

    def describe(self, settings: Settings, seed: int, run_dir: Path, *, verbose: bool = True) -> list[str]:
        """Return the hardware, the model and, if `verbose`, the commands and the config of a run, for --dry-run."""
        ids = ", ".join(str(gpu.index) for gpu in self.gpus_here())
        preset = "" if self.rules.memory == NO_CARD else f"; memory preset {self.rules.memory}"
        lines = [
            f"hardware: {self.hardware()}{ids and f' (GPU {ids})'}{preset}",
            f"model:    {' at revision '.join(filter(None, (self.rules.model, self.rules.model_revision)))}",
        ]
        if verbose:
            commands, config = self.plan(settings, seed, run_dir)
            lines += [f"{name + ':':<13} {shlex.join(words)}" for name, words in commands.items()]
            lines += [f"config:   {name} = {json.dumps(value)}" for name, value in config.items()]
        return lines

    @abstractmethod
    def plan(self, settings: Settings, seed: int, run_dir: Path) -> Plan:
        """Return what `open` would start."""

    def start_proof(self, run_dir: Path, weights: Weights, note: Note) -> ServedProof | None:
        """Start the proof that the weights in `run_dir` were scored. None if the engine needs no proof.

        EngineError if the file of the weights has changed since the scoring.
        """
        return None

    @abstractmethod
    def open(self, settings: Settings, seed: int, run_dir: Path, deadline_seconds: float) -> Session:
        """Start the processes of one run, and wait until they can train. EngineError with the cause if they cannot.

        `deadline_seconds`: the limit of the whole run, counted from this call.
        """


def _describe(gpu: Gpu) -> str:
    major, minor = gpu.compute_capability
    memory = "" if gpu.memory_gb is None else f", {gpu.memory_gb:.1f} GB"
    return f"{gpu}{memory}, compute capability {major}.{minor}, driver {gpu.driver}"


def scaled_rates(config: Config, scale: float) -> tuple[str, ...]:
    """Return a line for each learning rate of train.toml that the rules multiply by `scale` for their model."""
    rates = {path: rate for path in LEARNING_RATES if scale != 1 and (rate := config.get(path))}
    return tuple(
        f"{path} {number_text(rate)} x {scale:g} = {number_text(float(f'{rate * scale:.6g}'))} on this model"
        for path, rate in rates.items()
    )


def used_keys(engine: Engine, config: Config) -> frozenset[str]:
    """Return the keys of the allow-list that the engine uses and that have an effect under its rules."""
    keys = (*KEYS, *keys_with(engine.rules.losses, config.get(LOSS)))
    return frozenset({key.path for key in keys if engine.name in key.engines} - engine.validate(config).unused)

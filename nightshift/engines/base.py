"""What turns (config, seed, budget) into a trained policy: the base class of engines, and their registry.

An engine starts processes; executors/process.py ends them. Metrics come from structured files, never from log
text. Every engine passes the same contract suite (tests/contract). A new one is a folder here and a line in
the registry; nothing outside this folder asks for one by its name.
"""

from __future__ import annotations

import importlib
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nightshift.campaign.metrics import Step, num_without_gradient
from nightshift.campaign.records import Phase, Progress, ProgressCallback, Training, Weights
from nightshift.config.allowlist import KEYS, LOSS, number_text
from nightshift.config.losses import keys_with
from nightshift.config.rules import NO_CARD, Rules
from nightshift.config.rules_toml import chosen_in
from nightshift.config.train_toml import Config
from nightshift.engines.machine import Machine, read_machine
from nightshift.errors import EngineError, NightshiftError, UsageError
from nightshift.evaluation.environment import Policy
from nightshift.executors import network
from nightshift.executors.gpus import SIZES_GB, Gpu, choose_gpus, gpu_problems, gpu_warnings, list_gpus, parse_gpus
from nightshift.executors.local import Capacity
from nightshift.waiting import mark

Note = Callable[[str], None]  # one line of news
Plan = tuple[Mapping[str, Sequence[str]], Mapping[str, Any]]  # the words of each process by its name, and their config

# Name -> module and class; imported when one is opened: prime-rl's loads an HTTP client.
_ENGINES = {
    "trl": ("nightshift.engines.trl.engine", "TrlEngine"),
    "prime-rl": ("nightshift.engines.prime_rl.engine", "PrimeRlEngine"),
}
ENGINES = tuple(_ENGINES)
LEARNING_RATES = ("trainer.optim.lr", "trainer.scheduler.min_lr")
NO_GPU = "no GPU (--gpus none): not comparable"
ALL = "all"  # of a check that decides the readiness of every engine


def open_engine(
    rules: Rules,
    root: Path,
    environ: Mapping[str, str],
    gpus: str | None = None,
    prime_rl: Path | None = None,
) -> Engine:
    """Return the engine that the rules name, for the checkout at `root`. UsageError for a flag that is for another.

    `environ` is the harness's own environment; `gpus` and `prime_rl` are the flags of these names.
    """
    if prime_rl is not None and rules.engine != "prime-rl":
        cause = f"--prime-rl {prime_rl} is for --engine prime-rl, these rules ({rules.name}) are for {rules.engine}"
        raise UsageError(cause, "Leave it out, or add --engine prime-rl.")
    module, name = _ENGINES[rules.engine]
    engine: Engine = getattr(importlib.import_module(module), name)(rules, root, environ, gpus)
    engine.machine  # noqa: B018  a mistake in machine.toml is refused before anything starts
    return engine


def isolate(rules: Rules, root: Path) -> None:
    """Move this process, which must have one thread, into a network namespace if its engine's server has no password
    and the namespace works here. A run whose namespace fails all the same shares the network, as its record says."""
    with suppress(UsageError, OSError):  # UsageError: of machine.toml, `open_engine` raises it again
        if rules.engine == "prime-rl" and not network_problem(root):
            network.enter()


def network_problem(root: Path) -> str:
    """Return why runs share the network of this machine; "" if they get a namespace of their own."""
    return "machine.toml has share_network = true" if read_machine(root).share_network else network.problem()


def on_cards(rules: Rules, root: Path, environ: Mapping[str, str], gpus: str | None) -> Rules:
    """Return `rules` with the memory preset, `2 x 80 GB`, of the smallest GPU that a run would use: the largest that
    fits, or the least. rules.toml may name the size, also where no GPU is visible. Else, without GPUs, `rules` stay as
    they are: the engine's own check reports it. UsageError if `gpus`, which is --gpus, are none."""
    if not rules.num_gpus:
        return rules
    ids = None if gpus is None else parse_gpus(gpus, rules.gpu_split)
    if ids == ():
        return rules
    size: int = chosen_in(root).memory_gb
    num_cards = len({*(ids or range(rules.num_gpus))})
    with suppress(EngineError):
        least = min(gpu.memory_gb or 0.0 for gpu in choose_gpus(list_gpus(), ids, rules.num_gpus, environ))
        size = size or max((preset for preset in SIZES_GB if preset <= least), default=min(SIZES_GB))
    return replace(rules, memory=f"{num_cards} x {size} GB") if size else rules


def size_of(memory: str) -> tuple[bool, int]:
    """Return whether inference and trainer share a card, and the preset's size in GB, by Rules.memory."""
    num_cards, _, size = memory.removesuffix(" GB").partition(" x ")
    return (False, max(SIZES_GB)) if memory == NO_CARD else (num_cards == "1", int(size))


class NoGradient(EngineError):
    """There is nothing left to learn from. Raised by a progress callback, it tells the engine to end the training."""


@dataclass(frozen=True, slots=True)
class PrepareFlags:
    """What prepare.py and doctor are asked for; each engine takes what is for it."""

    engine: str | None = None
    gpus: str | None = None
    prime_rl: Path | None = None
    smoke: float | None = None  # seconds of training
    prove: bool = False
    gsm8k: Path | None = None
    math: Path | None = None

    @property
    def sources(self) -> dict[str, Path]:
        """Return the folders with data, by environment."""
        return {name: path for name, path in (("gsm8k", self.gsm8k), ("math", self.math)) if path is not None}

    @property
    def engine_meant(self) -> str | None:
        """The engine that is named, or that other flags imply; one GPU alone is for both."""
        is_pair = self.gpus is not None and not self.gpus.strip().isdecimal()
        return self.engine or ("prime-rl" if self.smoke or is_pair or self.prime_rl else None)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that doctor looked at: what is wrong with it, with its fix, or else what is there. A warning is a guess
    about this machine: it refuses no run. What is not needed belongs to an engine that this machine does not use."""

    engine: str  # whose readiness it decides
    name: str
    problem: object = None  # an error, or its line
    detail: str = ""
    is_warning: bool = False
    is_needed: bool = True

    @property
    def ok(self) -> bool:
        return self.problem is None or self.is_warning or not self.is_needed

    def __str__(self) -> str:
        text = self.detail if self.problem is None else str(self.problem).rstrip(".")
        state = (
            "PROBLEM" if not self.ok else "ok" if self.problem is None else "warning" if self.is_needed else "not used"
        )
        return f"{self.engine:10}{self.name:14}{state:9}{text}".rstrip()


def look(name: str, read: Callable[[], object]) -> Check:
    """Check what `read` reads, for every engine; what it returns is the detail."""
    try:
        return Check(ALL, name, detail=str(read()))
    except NightshiftError as error:
        return Check(ALL, name, error)


@dataclass(frozen=True, slots=True)
class Effective:
    """What an engine makes of a config: two configs with equal `settings` train the same.

    `unused`: keys of train.toml that this engine does not use. `without_effect`: the same of all keys that apply, in
    train.toml or not. `scaled`: a line for each value of train.toml that the rules multiply for their model.
    """

    settings: Mapping[str, Any]
    unused: tuple[str, ...] = ()
    without_effect: frozenset[str] = frozenset()
    scaled: tuple[str, ...] = ()


class Session(Policy):
    """One run, whose processes can train when `Engine.open` returns."""

    earlier: Mapping[int, Callable[[], None]] = {}  # of a game only

    @abstractmethod
    def train(self, budget_seconds: float, progress: ProgressCallback) -> Training:
        """Train until the budget ends, max_steps is reached or `progress` raises NoGradient. Never raises for a failed
        run."""

    def confirm(self) -> None:
        """Check after the scoring that the weights which answered were those of `load_final_weights`. EngineError if
        other weights were served."""
        return

    @abstractmethod
    def close(self) -> None:
        """Stop every process of the run and check that none is left. Safe to call twice."""


def training_progress(steps: Sequence[Step], seconds_left: float, note: str = "") -> Progress:
    """Return what the callback of a training gets after these steps."""
    return Progress(
        Phase.TRAINING,
        len(steps),
        seconds_left,
        steps[-1].reward_mean if steps else None,
        num_with_gradient=sum(step.has_gradient is True for step in steps),
        num_without_gradient=num_without_gradient(steps),
        note=note,
    )


class Proof(ABC):
    """A child process, for which no slot waits: were the weights in a run's folder those that were scored?"""

    @abstractmethod
    def is_over(self) -> bool:
        """Return True once `result` does not wait any more."""

    @abstractmethod
    def result(self) -> str:
        """Wait for the end of the child. Return one line. EngineError if other weights were scored."""

    @abstractmethod
    def close(self) -> None:
        """End the child. Safe to call twice."""


class Engine(ABC):
    """A way to train. Made from the arguments of `open_engine` alone, so that a worker can make the same one."""

    name: str
    min_driver: int

    def __init__(self, rules: Rules, root: Path, environ: Mapping[str, str], gpus: str | None = None) -> None:
        """`gpus` is the flag of this name. UsageError for GPUs that this engine cannot use."""
        self.rules, self.root, self._environ, self._gpus = rules, root, environ, gpus
        self._gpu_ids = None if gpus is None else parse_gpus(gpus, rules.gpu_split)

    @cached_property
    def machine(self) -> Machine:
        """What machine.toml says of this machine."""
        return read_machine(self.root)

    @property
    def startup_seconds(self) -> float:
        """How long a start may take: by the rules, or longer by machine.toml."""
        return max(self.rules.startup_seconds, self.machine.limits.startup_seconds or 0.0)

    @property
    def deadline_seconds(self) -> float:
        """The hard stop of a run from its start to its last score."""
        return self.rules.deadline_seconds - self.rules.startup_seconds + self.startup_seconds

    def gpus(self) -> Sequence[Gpu]:
        """Return the GPUs of a run, perhaps one GPU twice; none on a CPU. EngineError if this machine has not so many.

        Those of prime-rl are for inference, then for the trainer, as many of each as the rules say.
        """
        num = sum(self.rules.gpu_split)
        return () if self._gpu_ids == () else choose_gpus(list_gpus(), self._gpu_ids, num, self._environ)

    def gpus_here(self) -> Sequence[Gpu]:
        """Return those GPUs, none if this machine has not so many."""
        try:
            return self.gpus()
        except EngineError:
            return ()

    def gpu_ids(self) -> tuple[int, ...]:
        """Return NVML's numbers of the GPUs that a run uses."""
        return tuple(gpu.index for gpu in self.gpus())

    def hardware(self) -> str:
        """Return the kind of hardware, e.g. `2 x NVIDIA H100 80GB HBM3` or `cpu x86_64, 2 cores`: a campaign stays on
        one kind. `1 x`: the processes of a run share a GPU; of unequal GPUs the names of all."""
        if self._gpu_ids == ():
            return NO_GPU
        names = [gpu.name for gpu in dict.fromkeys(self.gpus_here())]
        if not names:
            return "no such GPUs"  # `check` reports it before anything runs
        return f"{len(names)} x {names[0]}" if len(set(names)) == 1 else " + ".join(names)

    def free_gpus(self) -> Sequence[Gpu]:
        """Return the GPUs of a run. EngineError for too few, and for one that another process uses."""
        mark("driver and memory")
        gpus = self.gpus()
        for problem in gpu_problems(gpus):
            raise problem
        mark("driver and memory", "; ".join(map(_describe, gpus)))
        return gpus

    @abstractmethod
    def under(self, rules: Rules) -> Engine:
        """Return an engine for the same machine and installation under other rules."""

    @abstractmethod
    def prepare(self, flags: PrepareFlags, note: Note) -> None:
        """Fetch all that experiments need and that is missing: prepare.py. Repeating it resumes.

        EngineError names what cannot be had, UsageError a flag that is not for this engine.
        """

    def prepare_at_start(self, note: Note) -> None:
        """Do the part of `prepare` that a command does by itself before it trains. Call as the controller."""
        return

    def doctor(self) -> list[Check]:
        """Check the GPUs and all that `prepare` would fetch and `check` refuse, without changing anything."""
        return self.checks()

    def checks(self) -> list[Check]:
        """Check the GPUs, and what else a run needs before it starts."""
        checks = list[Check]()
        gpus: Sequence[Gpu] = ()
        try:
            gpus = self.gpus()
            problems = gpu_problems(gpus)
            details = "; ".join(map(_describe, gpus))
            if gpus:
                checks = [Check(self.name, "GPUs", problem, details) for problem in problems or (None,)]
                checks.append(Check(self.name, "memory", detail=f"preset {self.rules.memory}"))
            warnings = gpu_warnings(gpus, self.min_driver)
            checks += [Check(self.name, "GPUs", warning, is_warning=True) for warning in warnings]
        except EngineError as error:
            checks.append(Check(self.name, "GPUs", error))
        return checks + self.parts(gpus)

    @abstractmethod
    def parts(self, gpus: Sequence[Gpu]) -> list[Check]:
        """Check what else a run on these GPUs needs, and guess what else may make it fail."""

    def check(self) -> list[str]:
        """Return the problems that make a run impossible, each one line with its fix: those of `doctor`."""
        return [str(check.problem) for check in self.checks() if not check.ok]

    def warnings(self) -> list[Check]:
        """Return the guesses of `doctor` about this machine that may make a run fail. They refuse nothing."""
        return [check for check in self.checks() if check.is_warning and check.problem is not None]

    def capacity(self) -> Capacity | None:
        """Return how many runs fit side by side on the cores; None if GPUs decide, or a run's memory is not known."""
        return None

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the versions of what trains, by name, from metadata: nothing is executed. Without unknown ones."""

    @abstractmethod
    def validate(self, config: Config) -> Effective:
        """Return the engine's own settings for a checked train.toml. ConfigError for a value it cannot express."""

    def describe(self, settings: Mapping[str, Any], seed: int, run_dir: Path, *, verbose: bool = True) -> list[str]:
        """Return what `open` would start, for --dry-run; nothing is written or started. Without `verbose`: the hardware
        and the model only."""
        ids = ", ".join(str(gpu.index) for gpu in self.gpus_here())
        if ids and sum(self.rules.gpu_split) > 2:
            ids += f": {' + '.join(map(str, self.rules.gpu_split))}"
        preset = "" if self.rules.memory == NO_CARD else f"; memory preset {self.rules.memory}"
        lines = [
            f"hardware: {self.hardware()}{f' (GPU {ids})' if ids else ''}{preset}",
            f"model:    {' at revision '.join(filter(None, (self.rules.model, self.rules.model_revision)))}",
        ]
        if verbose:
            commands, config = self.plan(settings, seed, run_dir)
            lines += [f"{name + ':':<13} {shlex.join(words)}" for name, words in commands.items()]
            lines += [f"config:   {name} = {json.dumps(value)}" for name, value in config.items()]
        return lines

    @abstractmethod
    def plan(self, settings: Mapping[str, Any], seed: int, run_dir: Path) -> Plan:
        """Return what `open` would start."""

    def start_proof(self, run_dir: Path, weights: Weights, note: Note) -> Proof | None:
        """Start the proof that the weights in `run_dir` were scored; None: they cannot be others. EngineError if the
        file is not the one that was scored."""
        return None

    @abstractmethod
    def open(self, settings: Mapping[str, Any], seed: int, run_dir: Path, deadline_seconds: float) -> Session:
        """Start the processes of one run and wait until they can train. EngineError with the cause.

        `deadline_seconds` is the hard stop of the whole run, counted from this call.
        """


def _describe(gpu: Gpu) -> str:
    major, minor = gpu.compute_capability
    memory = "" if gpu.memory_gb is None else f", {gpu.memory_gb:.1f} GB"
    return f"{gpu}{memory}, compute capability {major}.{minor}, driver {gpu.driver}"


def scaled_rates(config: Config, scale: float) -> tuple[str, ...]:
    """Return a line for each learning rate of train.toml that the rules multiply by `scale` for their model."""
    rates = {path: config.get(path) for path in LEARNING_RATES if scale != 1}
    return tuple(
        f"{path} {number_text(rate)} x {scale:g} = {number_text(float(f'{rate * scale:.6g}'))} on this model"
        for path, rate in rates.items()
        if rate
    )


def used_keys(engine: Engine, config: Config) -> frozenset[str]:
    """Return the open keys that the engine uses, without those that have no effect under its rules."""
    keys = (*KEYS, *keys_with(engine.rules.losses, config.get(LOSS)))
    return frozenset({key.path for key in keys if engine.name in key.engines} - engine.validate(config).without_effect)

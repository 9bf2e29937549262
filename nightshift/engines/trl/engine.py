"""The embedded engine: Hugging Face TRL's GRPOTrainer in one child process, on a CPU or one GPU.

This module checks, maps train.toml to the worker's settings, and talks to the worker; it never
imports torch. trainer.py trains. Events and commands are JSON lines over the worker's pipes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import selectors
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import Any

from nightshift.engines import Check, Effective, Message, Note, PrepareFlags, ProgressCallback
from nightshift.engines.downloads import data_problem, prepare_data, prepare_model
from nightshift.errors import ConfigError, EngineError, UsageError
from nightshift.processes.supervise import ProcessGroup, engine_environment, free_disk_gb
from nightshift.records import Completion, Decoding, Failure, Outcome, Phase, Progress, Training, Weights
from nightshift.rules import Rules
from nightshift.train_toml.config import Config

TRAINER = Path(__file__).with_name("trainer.py")
GRACE_SECONDS = 3.0  # the worker saves nothing on SIGTERM
MIN_FREE_DISK_GB = 0.2  # a run writes a few MB of metrics, completions and weights
_CHECK_SECONDS = 1.0
_NUM_THREADS = 2  # the rules' figures are measured with two

# prepare.py has fetched everything: a worker that asks a hub would only wait for it.
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
_REAL = (int, float)
# What is read of an event, and its types; events that are not here are read by name only.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "step": {"step": int, "time": _REAL, "reward_mean": _REAL},
    "trained": {
        "outcome": str,
        "num_steps": int,
        "training_seconds": _REAL,
        "reward_mean": (*_REAL, type(None)),
        "peak_memory_gb": (*_REAL, type(None)),
    },
    "weights": {"step": int, "sha256": str},
    "completing": {"num_done": int},
    "error": {"cause": str},
}
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
        found = [Check(self.name, "installation", False, problem) for problem in self.check()]
        ready = Check(self.name, "installation", True, f"{self.rules.name}: packages, base model, disk")
        names = ", ".join(environment.package for environment in self.rules.environments)
        return [*(found or [ready]), Check.of(self.name, "data", data_problem(self.root, self.rules), names)]

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
        """The worker's settings. The learning rate is scaled by the rules; lengths are capped by them.

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
        """The worker's command line and what its spec.json would hold."""
        spec = self._spec(settings, seed, run_dir)
        command = shlex.join(map(str, trainer_argv(self._trainer, run_dir / "spec.json")))
        settings_of = spec.pop("settings").items()
        flat = spec | {f"settings.{name}": value for name, value in settings_of}
        return [f"worker:   {command}", *(f"spec:     {name} = {json.dumps(value)}" for name, value in flat.items())]

    def open(self, settings: Mapping[str, Any], seed: int, run_dir: Path, deadline_seconds: float) -> TrlSession:
        """Start the worker and wait until it has loaded model and trainer."""
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


def trainer_argv(trainer: Path, spec_path: Path) -> list[str | Path]:
    """-I: nothing of the current folder or the user's site reaches the worker."""
    return [sys.executable, "-I", trainer, spec_path]


class TrlSession:
    """One worker process, from start-up to its last completion."""

    def __init__(
        self, trainer: Path, spec_path: Path, run_dir: Path, environment: Mapping[str, str], deadline: float
    ) -> None:
        """`deadline` is on the clock of time.monotonic."""
        self._run_dir = run_dir
        self._deadline = deadline
        self._group = ProcessGroup(f"{run_dir.parent.name}-{uuid.uuid4().hex}", GRACE_SECONDS)
        self._buffer = b""
        self._num_steps = 0
        argv = trainer_argv(trainer, spec_path)
        self._trainer = self._group.start(
            "worker", argv, log_path=run_dir / "worker.log", env=environment, cwd=run_dir, stdin=PIPE, stdout=PIPE
        )
        assert self._trainer.popen.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._trainer.popen.stdout, selectors.EVENT_READ)

    def wait_until_ready(self, startup_seconds: float) -> None:
        """Raises EngineError with the worker's last words if it does not come up in time."""
        event = self._next_event(min(self._deadline, time.monotonic() + startup_seconds))
        if event is None:
            raise EngineError(f"the worker was not ready after {startup_seconds:g} s{self._last_words()}")
        if event["event"] != "ready":
            raise EngineError(f"the worker failed to start: {event.get('cause', event['event'])}{self._last_words()}")

    def train(self, budget_seconds: float, progress: ProgressCallback) -> Training:
        """Train until the budget ends; the worker keeps the clock, this side the deadline."""
        self._send({"command": "train", "budget_seconds": budget_seconds})
        try:
            while True:
                event = self._next_event(self._deadline)
                if event is None:
                    cause = f"no end of training before the deadline of the run, after step {self._num_steps}"
                    return self._failed(Outcome.DEADLINE, cause, Failure.TRAINING)
                if event["event"] == "error":
                    return self._failed(Outcome.CRASHED, str(event["cause"]), Failure.TRAINING)
                if event["event"] == "trained":
                    return Training(
                        outcome=Outcome(event["outcome"]),
                        num_steps=event["num_steps"],
                        training_seconds=event["training_seconds"],
                        reward_mean=event["reward_mean"],
                        peak_memory_gb=event["peak_memory_gb"],
                    )
                if event["event"] == "step":
                    self._num_steps = event["step"]
                    left = budget_seconds - event["time"]
                    progress(Progress(Phase.TRAINING, self._num_steps, left, event["reward_mean"]))
        except EngineError as error:
            return self._failed(Outcome.CRASHED, str(error), Failure.MACHINERY)

    def load_final_weights(self) -> Weights:
        """Have the worker write its final policy and load what completes from that very file."""
        event = self._ask({"command": "load_final_weights"}, "weights")
        return Weights(step=event["step"], sha256=event["sha256"])

    def complete(
        self, prompts: Sequence[Sequence[Message]], decoding: Decoding, progress: ProgressCallback
    ) -> list[Completion]:
        """Completions in the order of the prompts; EngineError if the worker fails or the deadline passes."""
        prompts_path, output_path = self._run_dir / "prompts.json", self._run_dir / "completions.jsonl"
        prompts_path.write_text(json.dumps([list(map(dict, prompt)) for prompt in prompts]))
        command = {
            "command": "complete",
            "prompts_path": str(prompts_path),
            "output_path": str(output_path),
            "max_completion_tokens": decoding.max_completion_tokens,
            "temperature": decoding.temperature,
            "batch_size": decoding.batch_size,
        }
        self._ask(
            command,
            "completed",
            lambda num_done: progress(Progress(Phase.EVALUATING, self._num_steps, num_done=num_done)),
        )
        with output_path.open(encoding="utf-8") as file:
            completions = [Completion(**json.loads(line)) for line in file]
        prompts_path.unlink()
        output_path.unlink()  # evaluation.jsonl holds the same texts with their scores
        return completions

    def close(self) -> None:
        """Stop the worker and whatever it started. Raises EngineError if something survives SIGKILL."""
        self._selector.close()
        left = self._group.stop()
        if left:
            raise EngineError(f"processes of {self._run_dir.name} could not be killed: {', '.join(left)}")

    def _ask(
        self, command: Mapping[str, Any], answer: str, completing: Callable[[int], None] = lambda num_done: None
    ) -> dict[str, Any]:
        """Send a command and wait for its answer; `completing` is told how many completions are done."""
        self._send(command)
        while True:
            event = self._next_event(self._deadline)
            if event is None:
                raise EngineError(f"no answer to {command['command']} before the deadline of the run")
            if event["event"] == "error":
                raise EngineError(f"{command['command']} failed: {event['cause']}")
            if event["event"] == answer:
                return event
            if event["event"] == "completing":
                completing(event["num_done"])

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._trainer.popen.stdin is not None
        try:
            self._trainer.popen.stdin.write(json.dumps(command).encode() + b"\n")
            self._trainer.popen.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"the worker is gone: {self._trainer.exit_cause()}{self._last_words()}") from None

    def _next_event(self, deadline: float) -> dict[str, Any] | None:
        """The worker's next event; None once the deadline has passed; EngineError if the worker is gone."""
        assert self._trainer.popen.stdout is not None
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if self._selector.select(min(left, _CHECK_SECONDS)):
                data = os.read(self._trainer.popen.stdout.fileno(), 65536)
                if not data:
                    with suppress(TimeoutExpired):  # it closed its pipe and lives on: close() ends it
                        self._trainer.popen.wait(GRACE_SECONDS)
                    raise EngineError(f"the worker is gone: {self._trainer.exit_cause()}{self._last_words()}")
                self._buffer += data
            else:
                self._group.check()
        line, self._buffer = self._buffer.split(b"\n", 1)
        return _event(line)

    def _failed(self, outcome: Outcome, cause: str, failure: Failure) -> Training:
        return Training(outcome, self._num_steps, cause=cause, failure=failure)

    def _last_words(self) -> str:
        lines = self._trainer.tail(3)
        return f"; last in {self._trainer.log_path.name}: {' | '.join(lines)}" if lines else ""


def _event(line: bytes) -> dict[str, Any]:
    """One event of the worker. EngineError for a line that is none, or lacks what is read of it."""
    try:
        event = json.loads(line, parse_constant=_no_number)
        for name, kinds in _FIELDS.get(event["event"], {}).items():
            if not isinstance(event[name], kinds):
                raise TypeError(f"{name} is {event[name]!r}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise EngineError(f"the worker said {line[:200]!r}: {error}") from None
    return event  # type: ignore[no-any-return]


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _choice(config: Config, key: str, choices: Mapping[str, Sequence[str]]) -> str:
    value = str(config.get(key))
    if value not in choices:
        raise ConfigError(
            f'train.toml: {key} = "{value}" has no equal in TRL',
            f"Write one of {', '.join(choices)}, or use --engine prime-rl.",
        )
    return value

"""What all experiments of a campaign share: frozen constants and the bytes of the code that measures.

Two results compare only if they carry the same rules hash. Nothing in train.toml can change a value
here; a value here that train.toml also names is a locked key (see keys.py).

One list of paths serves twice. `Rules.measuring` is hashed into every record; `Rules.frozen`, the same and the
rest of the harness, may not change while a campaign lives (guard/freeze.py). A path is a file, or a folder with all
below it where it ends with a slash.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nightshift.errors import UsageError
from nightshift.records import DecisionRules, Decoding

RULES_NAME = "rules.toml"
# What turns a config into a number and a number into a verdict, whatever the engine and the environment.
MEASURING_CODE = (
    RULES_NAME,
    "nightshift/campaign/campaign.py",
    "nightshift/campaign/decision.py",
    "nightshift/campaign/index.py",
    "nightshift/engines/__init__.py",
    "nightshift/environments.py",
    "nightshift/evaluation.py",
    "nightshift/train_toml/",
    "nightshift/worker.py",
)
# All that runs beside it. Documents, tests, benchmarks and other environments come and go.
_HARNESS = ("nightshift/", "prepare.py", "pyproject.toml", "run.py")
_NO_PART = ("~", ".md")  # editors' copies, documents
_BUSIEST = 8.0  # wall-clock seconds that a second of CPU may take; on a machine that gives it less, a run is a crash
NO_CARD = "none"  # the preset where no GPU is used, or none is here


@dataclass(frozen=True, slots=True)
class EnvironmentRules:
    """One environment: the folder `environments/<name>/`, the sizes of its sets, the folders that its code `needs`."""

    name: str
    num_selection: int
    num_train: int | None = None  # None: the whole train split
    needs: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """What its folder holds for Python to import, which is also its id for verifiers."""
        return f"nightshift_{self.name}"

    @property
    def folders(self) -> tuple[str, ...]:
        """Paths of all folders that its code lies in, its own first."""
        return tuple(f"environments/{name}/" for name in (self.name, *self.needs))


@dataclass(frozen=True, slots=True)
class Rules:
    """One set-up. `deadline_seconds` is the hard stop of one run, start-up and evaluation included.

    `budget_clock` counts the budget: `cpu` what the trainer's one thread computes, so that a neighbour on the machine
    takes time and few steps (docs/measured.md). On a GPU it is always `wall`: that computes beside the CPU.
    """

    name: str
    engine: str
    model: str
    model_revision: str | None  # None: the model's bytes lie in this repository and are hashed
    environments: tuple[EnvironmentRules, ...]
    num_gpus: int  # that a machine must have for them to be its rules
    budget_seconds: float
    startup_seconds: float
    evaluation_seconds: float
    decoding: Decoding
    decision: DecisionRules
    max_completion_tokens: int  # cap on training rollouts: the model's context allows no more
    budget_clock: Literal["wall", "cpu"] = "wall"
    learning_rate_scale: float = 1.0
    first_seed: int = 1000
    memory: str = NO_CARD  # the preset of memory that its engine keeps to: `2 x 80 GB` (engines/memory.py)

    def __post_init__(self) -> None:
        if len(self.environments) != 1:  # an engine would train on the first and be scored on all
            raise ValueError(f"rules {self.name}: one environment at a time")

    @property
    def deadline_seconds(self) -> float:
        """Hard stop of one run, wall-clock: reaching it is a crash."""
        slowest = _BUSIEST if self.budget_clock == "cpu" else 1.0
        return self.startup_seconds + slowest * self.budget_seconds + self.evaluation_seconds

    @property
    def budget_text(self) -> str:
        """`60 s of CPU time`, which is 60 s on a calm machine; `600 s`."""
        return f"{self.budget_seconds:g} s" + (" of CPU time" if self.budget_clock == "cpu" else "")

    def seed(self, index: int) -> int:
        """Seed of the index-th run of a config, the same for every config (common random numbers)."""
        return self.first_seed + index

    def with_budget(self, budget_seconds: float) -> Rules:
        """The same rules under another budget: another hash, so a campaign of its own."""
        if not 1 <= budget_seconds <= 86_400:
            raise UsageError(f"--budget-seconds {budget_seconds:g} is out of range", "Give 1 to 86400 seconds.")
        return replace(self, budget_seconds=float(budget_seconds))

    @property
    def environment_names(self) -> tuple[str, ...]:
        """As rules.toml writes them."""
        return tuple(environment.name for environment in self.environments)

    @property
    def measuring(self) -> tuple[str, ...]:
        """Paths of all that can move the number or the verdict: what the hash covers, beside the constants here."""
        engine = f"nightshift/engines/{self.engine.replace('-', '_')}/"
        folders = (folder for environment in self.environments for folder in environment.folders)
        model = (f"{self.model}/",) if self.model_revision is None else ()
        return (*MEASURING_CODE, engine, *folders, *model)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Paths of all that may not change while a campaign under these rules lives."""
        return (*_HARNESS, *self.measuring)

    def hash(self, root: Path) -> str:
        """12 hex digits over the constants, and the bytes of `measuring` below `root`."""
        return _digest(root, self.measuring, json.dumps(asdict(self), sort_keys=True))[:12]

    def harness_tree(self, root: Path) -> str:
        """sha256 over the bytes of `frozen` below `root`: the same on two machines that run the same harness."""
        return _digest(root, self.frozen)


def is_covered(name: str, paths: Sequence[str]) -> bool:
    """True if the file `name`, relative to the checkout, is one of these paths or lies below one."""
    if name.endswith(_NO_PART) or any(part.startswith(".") or part == "__pycache__" for part in name.split("/")):
        return False
    return any(name.startswith(path) if path.endswith("/") else name == path for path in paths)


def covered_files(root: Path, paths: Sequence[str]) -> list[str]:
    """Names of the regular files below `root` that `paths` cover, in order."""
    names, top = set(paths), str(root.absolute())
    for path in paths:
        for folder, folders, files in os.walk(f"{top}/{path.rstrip('/')}"):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            names.update(f"{folder}/{name}".removeprefix(f"{top}/") for name in files)
    return [name for name in sorted(names) if is_covered(name, paths) and (root / name).is_file()]


def _digest(root: Path, paths: Sequence[str], constants: str = "") -> str:
    """Hex digits over `constants` and every regular file that `paths` cover: its name, its size, its bytes."""
    digest = hashlib.sha256(constants.encode())
    for name in covered_files(root, paths):
        data = (root / name).read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


GSM8K_PRIME_RL = Rules(
    name="gsm8k-prime-rl",
    engine="prime-rl",
    model="Qwen/Qwen2.5-0.5B-Instruct",
    model_revision="7ae557604adf67be50417f59c2c2f167def9a775",
    environments=(EnvironmentRules("gsm8k", num_selection=1319),),
    num_gpus=2,
    budget_seconds=600.0,
    startup_seconds=300.0,
    evaluation_seconds=300.0,
    decoding=Decoding(max_completion_tokens=1024),
    decision=DecisionRules(),
    max_completion_tokens=2048,
)

GSM8K_TRL = replace(
    GSM8K_PRIME_RL,
    name="gsm8k-trl",
    engine="trl",
    num_gpus=1,
    evaluation_seconds=600.0,  # transformers completes more slowly than vLLM
    decoding=Decoding(max_completion_tokens=1024, batch_size=128),
)

ARITHMETIC_TRL = Rules(
    name="arithmetic-trl",
    engine="trl",
    model="models/arithmetic-base",
    model_revision=None,
    environments=(EnvironmentRules("arithmetic", num_selection=1000, num_train=4000, needs=("gsm8k",)),),
    num_gpus=0,
    budget_seconds=60.0,
    startup_seconds=120.0,
    evaluation_seconds=120.0,
    decoding=Decoding(max_completion_tokens=64),
    # Measured with benchmarks/arithmetic_slope.py: one-key changes move the score by -0.10 to +0.08, eight times
    # GSM8K's spread, and so are means and `take_back`. Runs of one config differ by 0.013 (six settings, five seeds
    # each), also on a machine that is shared.
    decision=DecisionRules(prior_sd=0.08, seed_sd=0.013, take_back=0.008),
    max_completion_tokens=64,
    budget_clock="cpu",
    learning_rate_scale=50.0,
)

ALL_RULES = (GSM8K_PRIME_RL, GSM8K_TRL, ARITHMETIC_TRL)  # what a machine can do best comes first


def pick_rules(engine: str | None, gpu_count: int, names: Sequence[str] = ()) -> Rules:
    """The rules for this machine, --engine, and the environments that rules.toml names; for none what comes first.

    An engine that is named is not replaced where GPUs are missing: its own check says so. UsageError for an
    environment that no model of this machine answers.
    """
    mine = [rules for rules in ALL_RULES if engine in (None, rules.engine)]
    fitting = [rules for rules in mine if rules.num_gpus <= gpu_count] or mine
    for rules in fitting:
        if not names or rules.environment_names == tuple(names):
            return rules
    best, wanted = fitting[0], json.dumps(names)
    others = (rules for rules in ALL_RULES if rules.environment_names == tuple(names))
    places = "".join(f", or use --engine {rules.engine} (GPUs needed: {rules.num_gpus})" for rules in others)
    answered = json.dumps(best.environment_names)
    raise UsageError(
        f"{RULES_NAME}: environments = {wanted}: {best.model} ({best.name}) answers {answered} only",
        f"Write environments = {answered}, or [] for what the machine can do{places}.",
    )


def rules_named(name: str) -> Rules:
    """The rules of that name. UsageError where this version has none."""
    for rules in ALL_RULES:
        if rules.name == name:
            return rules
    raise UsageError(f"rules {name!r} are unknown to this version", "Use the version that wrote them.")


def num_gpus(environ: Mapping[str, str], nvml: Any = None) -> int:
    """NVIDIA GPUs that a program started here would see: CUDA_VISIBLE_DEVICES hides the others. 0 without a driver.

    `nvml` is the pynvml module or a stand-in.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
        count = int(nvml.nvmlDeviceGetCount())
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return 0
    devices = visible_devices(environ)
    return count if devices is None else min(count, len(devices))


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES, as CUDA reads them up to the first -1; None when it is not set."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    return entries[: entries.index("-1")] if "-1" in entries else entries

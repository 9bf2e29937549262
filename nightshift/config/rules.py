"""What all experiments of a campaign share: frozen constants and the bytes of the code that measures.

Two results compare only if they carry the same rules hash. Nothing in train.toml can change a value
here; a value here that train.toml also names is a locked key (see allowlist.toml). Which rules hold: rules_toml.py.

`Rules.measuring` lists the measuring files: they are hashed into every record, and may not change while a campaign
lives (experiment/integrity.py). A path is a file, or a folder with all below it where it ends with a slash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from nightshift.config.decision_rules import RuleConstants
from nightshift.errors import UsageError

RULES_NAME = "rules.toml"
# What turns a config into a number and a number into a verdict, whatever the engine and the environment.
MEASURING_CODE = (
    "nightshift/campaign/campaign.py",
    "nightshift/campaign/commits.py",
    "nightshift/campaign/metrics.py",
    "nightshift/campaign/next_run.py",
    "nightshift/campaign/posterior.py",
    "nightshift/campaign/scores.py",
    "nightshift/config/allowlist.py",
    "nightshift/config/allowlist.toml",
    "nightshift/config/checks.py",
    "nightshift/config/decision_rules.py",
    "nightshift/config/toml_edit.py",
    "nightshift/config/toml_text.py",
    "nightshift/config/train_toml.py",
    "nightshift/config/values.py",
    "nightshift/engines/base.py",
    "nightshift/engines/mixture.py",
    "nightshift/evaluation/environment.py",
    "nightshift/evaluation/episode.py",
    "nightshift/evaluation/evaluate.py",
    "nightshift/evaluation/verifiers_environment.py",
    "nightshift/executors/gpus.py",
    "nightshift/experiment/worker.py",
)
TASKSET_FOLDERS = ("environments/taskset/", "environments/gsm8k/")  # what drives a taskset; the harness for prime-rl
_SCORER_CODE = ("nightshift/evaluation/scorer.py",)
# What nothing loads: compiled code, caches, what editors (and NFS, of a deleted file) leave while a file is open.
_UNREAD = re.compile(
    r"__pycache__|\.(git|venv|DS_Store|mypy_cache|pytest_cache|ruff_cache|ipynb_checkpoints|idea|vscode)"
    r"|.*~|\..*\.sw[a-z]|\.#.*|#.*#|4913|\.nfs[0-9a-f]+"
)
_PART_BYTES = 1 << 24
_BUSIEST = 8.0  # wall-clock seconds that a second of CPU may take; on a machine that gives it less, a run is a crash
NO_CARD = "none"  # the preset where no GPU is used, or none is here


@dataclass(frozen=True, slots=True)
class Decoding:
    """How evaluation samples: greedy when `temperature` is 0."""

    max_completion_tokens: int
    temperature: float = 0.0
    batch_size: int = 250


@dataclass(frozen=True, slots=True)
class TasksetRules:
    """Somebody's verifiers v1 package: the `module` in a `folder` of the checkout, or, where that is "", installed.

    `reward_range`: its lowest and highest reward, read as 0 and 1. `prompt_tokens`: room that a prompt may need.
    """

    module: str
    folder: str
    reward_range: tuple[float, float]
    prompt_tokens: int

    def place(self, root: Path) -> Path:
        """The package: a folder, or one file. UsageError where it is not there."""
        if self.folder:
            folder = root / self.folder
            places = (folder, folder / self.module, folder / "src" / self.module)
            return next((place for place in places if (place / "__init__.py").is_file()), folder)
        found = find_spec(self.module)
        if found is None or found.origin is None:
            raise UsageError(f"{RULES_NAME}: no package {self.module} is installed", "Install it: uv pip install NAME.")
        origin = Path(found.origin)
        return origin.parent if origin.name == "__init__.py" else origin

    def beside(self, root: Path) -> list[Path]:
        """Where packages lie that came with it in its folder."""
        place = self.place(root)
        return [place.parent] if self.folder and place != root / self.folder else []


@dataclass(frozen=True, slots=True)
class EnvironmentRules:
    """One environment: the folder `environments/<name>/`, the sizes of its sets, the folders that its code `needs`.

    `weight`: its share of the score, among those of the other environments. `taskset`: somebody's package in place of
    that folder. `is_bounded`: its answers are scored in a process of their own. `args`: what its data is loaded by, or
    the taskset's config. `versions`: of what its package requires (ours: what they pin), `name==version`;
    `versions_sha256`: of all that it requires, in turn, too.
    """

    name: str
    num_validation: int
    num_train: int | None = None  # None: the whole train split
    needs: tuple[str, ...] = ()
    weight: float = 1.0
    taskset: TasksetRules | None = None
    is_game: bool = False  # of several turns, against an opponent
    is_bounded: bool = False
    args: dict[str, Any] = field(default_factory=dict)
    versions: tuple[str, ...] = ()
    versions_sha256: str = ""

    @property
    def package(self) -> str:
        """What its folder holds for Python to import, which is also its id for verifiers."""
        return f"nightshift_{self.name}"

    @property
    def folders(self) -> tuple[str, ...]:
        """Paths of all folders in the checkout that its code lies in, its own first."""
        if self.taskset is not None:
            return (*([self.taskset.folder] if self.taskset.folder else []), *TASKSET_FOLDERS)
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
    decision: RuleConstants
    max_completion_tokens: int  # cap on training rollouts: the model's context allows no more
    budget_clock: Literal["wall", "cpu"] = "wall"
    learning_rate_scale: float = 1.0
    first_seed: int = 1000
    memory: str = NO_CARD  # the preset of memory that its engine keeps to: `2 x 80 GB` (engines/memory.py)

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
        """Seed of the index-th run of a campaign."""
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
        model = (f"{self.model}/",) if self.model_revision is None and not Path(self.model).is_absolute() else ()
        scored = any(environment.taskset or environment.is_bounded for environment in self.environments)
        return (*MEASURING_CODE, engine, *(_SCORER_CODE if scored else ()), *folders, *model)

    def elsewhere(self, root: Path) -> list[Path]:
        """Files and folders outside the checkout that measure: installed packages of tasksets, a model."""
        tasksets = [environment.taskset for environment in self.environments]
        packages = [taskset.place(root) for taskset in tasksets if taskset is not None and not taskset.folder]
        return [*packages, *([Path(self.model)] if Path(self.model).is_absolute() else [])]

    def hash(self, root: Path) -> str:
        """12 hex digits over the constants, and the bytes of `measuring` below `root`."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        covered = [(place.parent, [f"{place.name}/" * place.is_dir() or place.name]) for place in self.elsewhere(root)]
        for top, paths in [(root, self.measuring), *covered]:
            for name in covered_files(top, paths):
                with (top / name).open("rb") as file:  # a part at a time: a model has gigabytes
                    digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
                    while data := file.read(_PART_BYTES):
                        digest.update(data)
        return digest.hexdigest()[:12]


def is_covered(name: str, paths: Sequence[str]) -> bool:
    """True if the file `name`, relative to the checkout, is one of these paths or lies below one."""
    below = [name[len(path) :] for path in paths if path.endswith("/") and name.startswith(path)]
    return name in paths or any(not any(map(_UNREAD.fullmatch, rest.split("/"))) for rest in below)


def covered_files(root: Path, paths: Sequence[str]) -> list[str]:
    """Names of the regular files below `root` that `paths` cover, in order. UsageError for a link to a folder."""
    names, top = set(paths), str(root.absolute())
    for path in paths:
        for folder, folders, files in os.walk(f"{top}/{path.rstrip('/')}"):
            folders[:] = [name for name in folders if not _UNREAD.fullmatch(name)]
            for link in filter(os.path.islink, (f"{folder}/{name}" for name in folders)):
                raise UsageError(f"{link} is a link to a folder, whose bytes no hash holds", "Put the folder there.")
            names.update(f"{folder}/{name}".removeprefix(f"{top}/") for name in files)
    return [name for name in sorted(names) if is_covered(name, paths) and (root / name).is_file()]

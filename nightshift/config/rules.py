"""The rules of a campaign: constants that all its experiments share, and the paths of the measuring files.

Measuring files determine scores or decisions, so they may not change during a campaign (experiment/checkout.py). In a
list of paths, a path with a slash at its end is a folder with all files below it. The rules hash covers constants and
measuring files: two results are comparable only if their rules hashes are equal.
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
from typing import Annotated, Any, Literal

from msgspec import Meta

from nightshift.errors import UsageError

RULES_NAME = "rules.toml"
# The code that computes scores from configs, and decisions from scores, with every engine and every environment.
MEASURING_CODE = (
    "nightshift/campaign/campaign.py",
    "nightshift/campaign/commits.py",
    "nightshift/campaign/metrics.py",
    "nightshift/campaign/posterior.py",
    "nightshift/config/allowlist.py",
    "nightshift/config/allowlist.toml",
    "nightshift/config/checks.py",
    "nightshift/config/losses.py",
    "nightshift/config/train_toml.py",
    "nightshift/engines/base.py",
    "nightshift/engines/mixture.py",
    "nightshift/evaluation/environment.py",
    "nightshift/evaluation/evaluate.py",
    "nightshift/evaluation/scorer.py",
    "nightshift/executors/gpus.py",
    "nightshift/experiment/worker.py",
)
TASKSET_FOLDERS = ("environments/taskset/", "environments/gsm8k/")  # scores tasksets; runs episodes for prime-rl
# Names of files and folders that the hash leaves out: compiled code, caches, and temporary files of editors and NFS.
_IGNORED = re.compile(
    r"__pycache__|\.(git|venv|DS_Store|mypy_cache|pytest_cache|ruff_cache|ipynb_checkpoints|idea|vscode)"
    r"|.*~|\..*\.sw[a-z]|\.#.*|#.*#|4913|\.nfs[0-9a-f]+"
)
_CHUNK_BYTES = 1 << 24
_MAX_SLOWDOWN = 8.0  # wall-clock seconds per second of CPU time; a run on a slower machine exceeds its deadline
NO_CARD = "none"  # the value of Rules.memory without a GPU

Scale = Annotated[float, Meta(ge=1e-9, le=1e6)]  # never 0, because the decision rule divides by it
Fraction = Annotated[float, Meta(ge=0, le=1)]  # a score or a share
GSM8K_PRIOR_SD = 0.008  # the scale of the effects of changes on GSM8K, for which RuleConstants was chosen


@dataclass(frozen=True, slots=True)
class RuleConstants:
    """The constants of the decision rule (campaign/posterior.py) for GSM8K, chosen by simulation
    (benchmarks/decision_rules.py). Scores and effects are fractions of 1."""

    # Kinds of changes, (mean and sd of the effect, share of all changes): ordinary, bad, bold and disastrous.
    kinds: tuple[tuple[float, float, float], ...] = (
        (0.003, 0.007, 0.50),
        (-0.03, 0.025, 0.35),
        (0.0, 0.05, 0.05),
        (-0.14, 0.10, 0.10),
    )
    # The number of observed changes that the shares above count as. It is small: a campaign learns its own shares.
    shares_worth: float = 5.0
    # Accidents in runs without a new change, (mean, sd, probability): no accident, or a training that collapsed.
    accidents: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.97), (-0.12, 0.10, 0.03))
    seed_sd: float = 0.0125  # standard deviation of the score between training seeds
    # `seed_sd` is uncertain: factors that correct it, with prior probabilities, which each run updates.
    noises: tuple[tuple[float, float], ...] = (
        (0.5, 0.08),
        (0.7, 0.17),
        (1.0, 0.27),
        (1.4, 0.20),
        (2.0, 0.16),
        (2.8, 0.12),
    )
    # Part of a score's sampling variance p (1 - p) / n that two runs on the same n examples do not have in common.
    examples_share: float = 0.38
    # Standard deviation of the drift of scores over eight hours.
    drift_sd: float = 0.02
    # P(it helps) at which a change is kept. With four slots, 0.65 gains 0.3 pp less than 0.6, with 30 % fewer commits.
    keep_at: float = 0.6
    # P(it helps) below which a kept change is reverted: below `keep_at`, so that small updates of P cause no commits.
    revert_below: float = 0.5
    # P(it helps) above which a kept change is confirmed.
    confirmed_above: float = 0.95
    # Least expected improvement for a re-test, because a re-test makes the effect of the new change less certain.
    least_worth: float = 0.0005
    # If a change sets the keys of a discarded change, its prior starts from this share of the discarded effect.
    related: float = 0.5
    # (a, b, n): the reported gain is a + b * max(ln(proposed changes / n), 0) standard deviations below the posterior
    # mean, because the best of many noisy scores is too high (winner's curse).
    shrink: tuple[float, float, float] = (0.5, 0.25, 47.0)
    # Factors that widen the reported interval, for one slot and for several, because effects do not add up exactly.
    widen: tuple[float, float] = (1.1, 1.3)

    def scaled(self, prior_sd: float, seed_sd: float) -> RuleConstants:
        """Return the constants for another environment. `prior_sd`: scale of effects. `seed_sd`: sd between seeds."""
        factor = prior_sd / GSM8K_PRIOR_SD
        kinds = tuple((factor * mean, factor * sd, share) for mean, sd, share in self.kinds)
        return replace(self, kinds=kinds, seed_sd=seed_sd, least_worth=factor * self.least_worth)


@dataclass(frozen=True, slots=True)
class Decoding:
    """The sampling parameters of the evaluation. Sampling is greedy if `temperature` is 0."""

    max_completion_tokens: int
    temperature: float = 0.0
    batch_size: int = 250


@dataclass(frozen=True, slots=True)
class TasksetRules:
    """A user's verifiers environment (docs/environments.md). `module`: the import name of its package or single file.
    `folder`: the folder of the checkout with the package; "" if it is installed."""

    module: str
    folder: str
    reward_range: tuple[float, float]
    prompt_tokens: int
    max_turns: int
    conversation_tokens: int | None
    episode_seconds: float
    seat: str
    tool_parser: str

    def room(self, completion_tokens: int) -> int:
        """Return the most tokens of a conversation."""
        return self.conversation_tokens or self.prompt_tokens + self.max_turns * completion_tokens

    def place(self, root: Path) -> Path:
        """Return the path of the package: a folder, or a single file. UsageError if there is no such package."""
        if self.folder:
            return package_in(root / self.folder)
        spec = find_spec(self.module) if self.module.isidentifier() else None
        if spec is None or spec.origin is None:
            cause = f"{RULES_NAME}: package {self.module} is neither a folder of this checkout nor installed"
            raise UsageError(cause, "Write a folder, or run: uv pip install NAME.")
        return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)

    def beside(self, root: Path) -> list[Path]:
        """Return the folder around the package, from which the package may import others; [] if there is none."""
        package = self.place(root)
        return [package.parent] if self.folder and package != root / self.folder else []


def package_in(folder: Path) -> Path:
    """Return the package in a folder: the folder itself, a package at its top or in src, or a single file."""
    packages = [path.parent for path in (*folder.glob("*/__init__.py"), *folder.glob("src/*/__init__.py"))]
    packages = packages or [*folder.glob("*.py"), *folder.glob("src/*.py")]
    if (folder / "__init__.py").is_file():
        packages = [folder]
    packages = [path for path in packages if path.stem == folder.name] or packages
    if len(packages) != 1:
        names = ", ".join(sorted(path.stem for path in packages)) or "none"
        cause = f"{RULES_NAME}: {len(packages)} packages in {folder} ({names})"
        raise UsageError(cause, "Write the folder of the package itself, with its __init__.py.")
    return packages[0]


@dataclass(frozen=True, slots=True)
class EnvironmentRules:
    """One environment: its code is in `environments/<name>/`, or in the package of a user's `taskset`.

    `is_bounded`: a separate process with a time limit scores the answers. `versions`: `name==version` of direct
    requirements; for an environment of Nightshift only the pinned ones. `versions_sha256`: of all requirements.
    """

    name: str
    num_validation: int
    num_train: int | None = None  # None: the whole train split
    needs: tuple[str, ...] = ()  # other folders in environments/ whose code is used
    weight: float = 1.0
    taskset: TasksetRules | None = None
    is_game: bool = False  # several turns against an opponent
    is_bounded: bool = False
    guard: float | None = None  # percentage points by which the score may fall; None: the environment trains
    args: dict[str, Any] = field(default_factory=dict)
    versions: tuple[str, ...] = ()
    versions_sha256: str = ""

    @property
    def package(self) -> str:
        """The name of the Python package, which is also the id in verifiers."""
        return f"nightshift_{self.name}"

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the checkout with the environment's code, its own first."""
        if self.taskset is not None:
            return tuple(filter(None, (self.taskset.folder, *TASKSET_FOLDERS)))
        return tuple(f"environments/{name}/" for name in (self.name, *self.needs))


@dataclass(frozen=True)
class Parameter:
    """A parameter of a loss: its default value, and its range, which includes `low` and `high`."""

    default: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not -1e6 <= self.low < self.high <= 1e6 or not self.low <= self.default <= self.high:
            raise ValueError(f"default {self.default:g} in {self.low:g} to {self.high:g}: low < high, default between")


@dataclass(frozen=True)
class LossRules:
    """A user's loss: prime-rl imports `import_path` from a package in a `folder` of the checkout."""

    name: str
    folder: str
    import_path: str
    parameters: dict[str, Parameter]


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one campaign. `budget_clock`: `cpu` counts the CPU time of the trainer's only thread, so that other
    processes on the machine have little influence on the number of steps. With a GPU the clock is `wall`."""

    name: str
    engine: str
    model: str
    num_gpus: int
    budget_seconds: float
    startup_seconds: float
    evaluation_seconds: float
    decoding: Decoding
    max_completion_tokens: int  # upper bound of training completions, from the model's context
    model_revision: str | None = None  # commit on the hub; None: a local model, whose files the rules hash covers
    environments: tuple[EnvironmentRules, ...] = ()
    guards: tuple[EnvironmentRules, ...] = ()
    losses: tuple[LossRules, ...] = ()  # the user's losses, which train.toml may choose with prime-rl
    decision: RuleConstants = field(default_factory=RuleConstants)
    budget_clock: Literal["wall", "cpu"] = "wall"
    learning_rate_scale: float = 1.0
    first_seed: int = 1000  # of a campaign's first run; those of later runs count up from it
    memory: str = NO_CARD  # the memory preset, `2 x 80 GB` (engines/base.py)
    infer_gpus: int = 1  # only for an engine that serves and trains on different GPUs
    train_gpus: int = 1
    tensor_parallel: int = 1  # GPUs per served copy of the model

    @property
    def gpu_split(self) -> tuple[int, ...]:
        """(number of GPUs that serve, number of GPUs that train), or (1,) if one GPU does both."""
        return (self.infer_gpus, self.train_gpus) if self.num_gpus > 1 else (1,)

    @property
    def deadline_seconds(self) -> float:
        """The wall-clock limit of a run with start-up and evaluation. A run that reaches the limit is a crash."""
        slowdown = _MAX_SLOWDOWN if self.budget_clock == "cpu" else 1.0
        return self.startup_seconds + slowdown * self.budget_seconds + self.evaluation_seconds

    @property
    def budget_text(self) -> str:
        """The budget in words: `60 s of CPU time`, or `600 s`."""
        return f"{self.budget_seconds:g} s" + (" of CPU time" if self.budget_clock == "cpu" else "")

    def with_budget(self, budget_seconds: float) -> Rules:
        """Return the rules with another budget."""
        return replace(self, budget_seconds=float(budget_seconds))

    @property
    def scored(self) -> tuple[EnvironmentRules, ...]:
        """The environments that score a run: those that train, then the guards."""
        return (*self.environments, *self.guards)

    @property
    def environment_names(self) -> tuple[str, ...]:
        """The names of the environments that train, in the order of rules.toml."""
        return tuple(environment.name for environment in self.environments)

    @property
    def measuring(self) -> tuple[str, ...]:
        """Paths of all files in the checkout that can change a score or a decision."""
        engine = f"nightshift/engines/{self.engine.replace('-', '_')}/"
        folders = [folder for environment in self.scored for folder in environment.folders]
        folders += [loss.folder for loss in self.losses]
        model = (f"{self.model}/",) if self.model_revision is None and not Path(self.model).is_absolute() else ()
        return (*MEASURING_CODE, engine, *folders, *model)

    def elsewhere(self, root: Path) -> list[Path]:
        """Return the measuring files and folders outside the checkout: installed tasksets, and a model."""
        tasksets = [environment.taskset for environment in self.scored]
        packages = [taskset.place(root) for taskset in tasksets if taskset is not None and not taskset.folder]
        return [*packages, *([Path(self.model)] if Path(self.model).is_absolute() else [])]

    def hash(self, root: Path) -> str:
        """Return the rules hash: the first 12 hex digits of the sha256 of the constants and all measuring files."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        outside = [(path.parent, [f"{path.name}{'/' * path.is_dir()}"]) for path in self.elsewhere(root)]
        for top, paths in [(root, self.measuring), *outside]:
            for name in covered_files(top, paths):
                with (top / name).open("rb") as file:  # read in chunks, because a model has gigabytes
                    digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
                    while chunk := file.read(_CHUNK_BYTES):
                        digest.update(chunk)
        return digest.hexdigest()[:12]


def is_covered(name: str, paths: Sequence[str]) -> bool:
    """Return whether the file `name` is one of `paths`, or is below a folder of `paths` and not ignored."""
    subpaths = [name[len(path) :] for path in paths if path.endswith("/") and name.startswith(path)]
    return name in paths or any(not any(map(_IGNORED.fullmatch, subpath.split("/"))) for subpath in subpaths)


def covered_files(root: Path, paths: Sequence[str]) -> list[str]:
    """Return the sorted names of the regular files below `root` that `paths` cover. UsageError for a linked folder."""
    names, top = set(paths), str(root.absolute())
    for path in paths:
        for folder, folders, files in os.walk(f"{top}/{path.rstrip('/')}"):
            folders[:] = [name for name in folders if not _IGNORED.fullmatch(name)]
            for link in filter(os.path.islink, (f"{folder}/{name}" for name in folders)):
                cause = f"{link} is a link to a folder, which the rules hash does not cover"
                raise UsageError(cause, "Replace the link by the folder.")
            names.update(f"{folder}/{name}".removeprefix(f"{top}/") for name in files)
    return [name for name in sorted(names) if is_covered(name, paths) and (root / name).is_file()]

"""The rules of a campaign: the constants of all its experiments, and the measuring files.

Two results are comparable only if they have the same rules hash. train.toml cannot change the rules: allowlist.toml
locks keys with the same meaning. rules_toml.py makes the rules from rules.toml.

`Rules.measuring` lists the measuring files. They are part of the hash, and may not change during a campaign
(experiment/checkout.py). A path that ends with a slash is a folder with all files below.
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
# The files that turn a config into a score and scores into a decision, for every engine and environment.
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
    "nightshift/executors/gpus.py",
    "nightshift/experiment/worker.py",
)
TASKSET_FOLDERS = ("environments/taskset/", "environments/gsm8k/")  # the scorer of tasksets; the harness for prime-rl
# Files that are not hashed: compiled code, caches, and temporary files of editors and of NFS.
_UNREAD = re.compile(
    r"__pycache__|\.(git|venv|DS_Store|mypy_cache|pytest_cache|ruff_cache|ipynb_checkpoints|idea|vscode)"
    r"|.*~|\..*\.sw[a-z]|\.#.*|#.*#|4913|\.nfs[0-9a-f]+"
)
_PART_BYTES = 1 << 24
_BUSIEST = 8.0  # wall-clock seconds per CPU second; on a busier machine a run reaches its deadline
NO_CARD = "none"  # Rules.memory without a GPU

Scale = Annotated[float, Meta(ge=1e-9, le=1e6)]  # never 0, because the rule divides by it
Fraction = Annotated[float, Meta(ge=0, le=1)]  # a score or a share
_Units = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Probability = Annotated[float, Meta(gt=0, lt=1)]
_Some = Meta(min_length=1)
GSM8K_PRIOR_SD = 0.008  # the scale of effects for which RuleConstants was chosen


@dataclass(frozen=True, slots=True)
class RuleConstants:
    """The constants of the rule in campaign/posterior.py, as fractions of 1 at GSM8K's scale.

    They were chosen by simulation with other random numbers than those of benchmarks/decision_rules.py. A kind of
    change is (mean, sd, share): the distribution of its effects, and its share of all changes.
    """

    # Ordinary, bad, bold and disastrous changes.
    kinds: Annotated[tuple[tuple[_Units, Scale, Fraction], ...], _Some] = (
        (0.003, 0.007, 0.50),
        (-0.03, 0.025, 0.35),
        (0.0, 0.05, 0.05),
        (-0.14, 0.10, 0.10),
    )
    # Weight of the shares above, as a number of measured changes. A campaign of 46 changes learns its own shares.
    shares_worth: Scale = 5.0
    # Accidents in runs without a new change: none in 97 % of the runs, else a collapsed training.
    accidents: Annotated[tuple[tuple[_Units, Annotated[float, Meta(ge=0, le=1e6)], Fraction], ...], _Some] = (
        (0.0, 0.0, 0.97),
        (-0.12, 0.10, 0.03),
    )
    # Standard deviation of the score over seeds, and its uncertainty: (factor, prior probability). The runs update the
    # probabilities, so that no second run of the baseline is needed.
    seed_sd: Scale = 0.0125
    noises: Annotated[tuple[tuple[Scale, Scale], ...], _Some] = (
        (0.5, 0.08),
        (0.7, 0.17),
        (1.0, 0.27),
        (1.4, 0.20),
        (2.0, 0.16),
        (2.8, 0.12),
    )
    # Share of the variance over examples, p (1 - p) / n, that differs between two runs on the same examples.
    examples_share: Fraction = 0.38
    # Standard deviation of the drift in eight hours.
    drift_sd: Scale = 0.02
    # P(it helps) at which a change is kept. With four slots, 0.65 gains 0.3 pp less with 30 % fewer commits.
    keep_at: _Probability = 0.6
    # P(it helps) below which a kept change is reverted. The gap to `keep_at` prevents a commit for every new run.
    revert_below: _Probability = 0.5
    # P(it helps) above which a kept change is confirmed.
    confirmed_above: Fraction = 0.95
    # Least expected improvement of a re-test: a smaller one does not justify a less certain result of the new change.
    least_worth: Scale = 0.0005
    # Prior mean of a new value of a discarded change's keys, as a share of the last value's effect.
    related: Fraction = 0.5
    # Standard deviations subtracted from the reported gain, and more for each e-fold of changes beyond the third: the
    # best of many noisy scores is too high (winner's curse).
    shrink: tuple[_Units, _Units, Scale] = (0.5, 0.25, 47.0)
    # Factors of the reported interval with one slot and with several, because effects do not add up exactly.
    widen: tuple[Scale, Scale] = (1.1, 1.3)

    def scaled(self, prior_sd: float, seed_sd: float) -> RuleConstants:
        """Return the constants for another environment with this scale of effects and this noise of seeds."""
        factor = prior_sd / GSM8K_PRIOR_SD
        kinds = tuple((factor * mean, factor * sd, share) for mean, sd, share in self.kinds)
        return replace(self, kinds=kinds, seed_sd=seed_sd, least_worth=factor * self.least_worth)


@dataclass(frozen=True, slots=True)
class Decoding:
    """The sampling of the evaluation, greedy for `temperature` = 0."""

    max_completion_tokens: int
    temperature: float = 0.0
    batch_size: int = 250


@dataclass(frozen=True, slots=True)
class TasksetRules:
    """A user's verifiers package: `module`, a package or one file, in a `folder` of the checkout, or installed ("").

    `reward_range`: the rewards with the scores 0 and 1. `prompt_tokens`: tokens that a prompt may need. `max_turns`:
    the most answers of a seat in an episode; 1 is one question and one answer. `conversation_tokens`: tokens that a
    whole conversation may need; None: see `room`. `episode_seconds`: time limit of an episode. `seat`: the seat whose
    reward is the score; "" is the only seat. `tool_parser`: vLLM's tool parser for the model; "" for no tools.
    """

    module: str
    folder: str
    reward_range: tuple[float, float]
    prompt_tokens: int
    max_turns: int = 1
    conversation_tokens: int | None = None
    episode_seconds: float = 300.0
    seat: str = ""
    tool_parser: str = ""

    def room(self, completion_tokens: int) -> tuple[int, str]:
        """Return the tokens that a conversation may need, and how they were computed."""
        if self.conversation_tokens:
            return self.conversation_tokens, f"conversation_tokens = {self.conversation_tokens}"
        words = f"prompt_tokens {self.prompt_tokens} + {self.max_turns} turns x {completion_tokens}"
        return self.prompt_tokens + self.max_turns * completion_tokens, words

    def place(self, root: Path) -> Path:
        """Return the folder or the file of the package. UsageError if the package is not installed."""
        if self.folder:
            folder = root / self.folder
            places = (folder, folder / self.module, folder / "src" / self.module)
            packages = [place for place in places if (place / "__init__.py").is_file()]
            files = [place.with_suffix(".py") for place in places[1:] if place.with_suffix(".py").is_file()]
            return (packages + files or [folder])[0]
        spec = find_spec(self.module)
        if spec is None or spec.origin is None:
            raise UsageError(f"{RULES_NAME}: package {self.module} is not installed", "Run: uv pip install NAME.")
        return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)

    def beside(self, root: Path) -> list[Path]:
        """Return the folder with further packages of the taskset, if there is such a folder."""
        place = self.place(root)
        return [place.parent] if self.folder and place != root / self.folder else []


@dataclass(frozen=True, slots=True)
class EnvironmentRules:
    """One environment: the folder `environments/<name>/`, the sizes of its splits, and the folders that it `needs`.

    `weight`: share of the score, relative to the other environments. `taskset`: a user's package instead of the folder.
    `is_bounded`: a separate process scores the answers. `args`: arguments of `data.load`, or the taskset's config.
    `versions`: `name==version` of the required packages (for Nightshift's environments: only pinned packages).
    `versions_sha256`: over all packages that are required, directly or indirectly.
    """

    name: str
    num_validation: int
    num_train: int | None = None  # None: the whole train split
    needs: tuple[str, ...] = ()
    weight: float = 1.0
    taskset: TasksetRules | None = None
    is_game: bool = False  # several turns against an opponent
    is_bounded: bool = False
    guard: float | None = None  # a guard is scored, not trained: percentage points by which its score may fall
    args: dict[str, Any] = field(default_factory=dict)
    versions: tuple[str, ...] = ()
    versions_sha256: str = ""

    @property
    def package(self) -> str:
        """The name of the Python package, which is also the id in verifiers."""
        return f"nightshift_{self.name}"

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the checkout with its code, its own folder first."""
        if self.taskset is not None:
            return (*([self.taskset.folder] if self.taskset.folder else []), *TASKSET_FOLDERS)
        return tuple(f"environments/{name}/" for name in (self.name, *self.needs))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a loss: its default, and its range with both ends."""

    default: _Units
    low: _Units
    high: _Units


@dataclass(frozen=True, slots=True)
class LossRules:
    """A user's loss: prime-rl imports `import_path` from a package in a `folder` of the checkout."""

    name: str
    folder: str
    import_path: str
    parameters: dict[str, Parameter]


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one campaign.

    `budget_clock`: `cpu` counts the CPU time of the trainer's only thread, so that other processes on the machine cost
    few steps (docs/measured.md). With a GPU the clock is always `wall`.
    """

    name: str
    engine: str
    model: str
    num_gpus: int  # that the machine must have
    budget_seconds: float
    startup_seconds: float
    evaluation_seconds: float
    decoding: Decoding
    max_completion_tokens: int  # upper bound of training completions, from the model's context
    model_revision: str | None = None  # None: the bytes of a local model are hashed
    environments: tuple[EnvironmentRules, ...] = ()
    guards: tuple[EnvironmentRules, ...] = ()
    losses: tuple[LossRules, ...] = ()  # further losses for train.toml, if the engine can import them
    decision: RuleConstants = field(default_factory=RuleConstants)
    budget_clock: Literal["wall", "cpu"] = "wall"
    learning_rate_scale: float = 1.0
    first_seed: int = 1000
    memory: str = NO_CARD  # the memory preset, `2 x 80 GB` (engines/base.py)
    infer_gpus: int = 1  # only for an engine that serves and trains on different GPUs
    train_gpus: int = 1
    tensor_parallel: int = 1  # GPUs per served copy of the model

    @property
    def gpu_split(self) -> tuple[int, ...]:
        """The numbers of GPUs that serve and that train; one number if the same GPU does both."""
        return (self.infer_gpus, self.train_gpus) if self.num_gpus > 1 else (1,)

    @property
    def deadline_seconds(self) -> float:
        """The wall-clock limit of a run with start-up and evaluation. A run that reaches the limit is a crash."""
        slowest = _BUSIEST if self.budget_clock == "cpu" else 1.0
        return self.startup_seconds + slowest * self.budget_seconds + self.evaluation_seconds

    @property
    def budget_text(self) -> str:
        """The budget in words: `60 s of CPU time`, or `600 s`."""
        return f"{self.budget_seconds:g} s" + (" of CPU time" if self.budget_clock == "cpu" else "")

    def seed(self, index: int) -> int:
        """Return the seed of the index-th run of a campaign."""
        return self.first_seed + index

    def with_budget(self, budget_seconds: float) -> Rules:
        """Return the same rules with another budget, and so with another hash."""
        if not 1 <= budget_seconds <= 86_400:
            raise UsageError(f"--budget-seconds {budget_seconds:g} is out of range", "Give 1 to 86400 seconds.")
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
        scored = any(environment.taskset or environment.is_bounded for environment in self.scored)
        return (*MEASURING_CODE, engine, *(["nightshift/evaluation/scorer.py"] if scored else []), *folders, *model)

    def elsewhere(self, root: Path) -> list[Path]:
        """Return the measuring folders outside the checkout: installed tasksets, and a model."""
        tasksets = [environment.taskset for environment in self.scored]
        packages = [taskset.place(root) for taskset in tasksets if taskset is not None and not taskset.folder]
        return [*packages, *([Path(self.model)] if Path(self.model).is_absolute() else [])]

    def hash(self, root: Path) -> str:
        """Return 12 hex digits over the constants and the bytes of all measuring files."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        outside = [
            (place.parent, [f"{place.name}/" if place.is_dir() else place.name]) for place in self.elsewhere(root)
        ]
        for top, paths in [(root, self.measuring), *outside]:
            for name in covered_files(top, paths):
                with (top / name).open("rb") as file:  # in parts: a model has gigabytes
                    digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
                    while data := file.read(_PART_BYTES):
                        digest.update(data)
        return digest.hexdigest()[:12]


def is_covered(name: str, paths: Sequence[str]) -> bool:
    """True if the file `name`, relative to the checkout, is one of `paths` or lies below one of them."""
    below = [name[len(path) :] for path in paths if path.endswith("/") and name.startswith(path)]
    return name in paths or any(not any(map(_UNREAD.fullmatch, rest.split("/"))) for rest in below)


def covered_files(root: Path, paths: Sequence[str]) -> list[str]:
    """Return the sorted names of the regular files below `root` that `paths` cover. UsageError: a folder is a link."""
    names, top = set(paths), str(root.absolute())
    for path in paths:
        for folder, folders, files in os.walk(f"{top}/{path.rstrip('/')}"):
            folders[:] = [name for name in folders if not _UNREAD.fullmatch(name)]
            for link in filter(os.path.islink, (f"{folder}/{name}" for name in folders)):
                cause = f"{link} is a link to a folder, which the rules hash does not cover"
                raise UsageError(cause, "Replace the link by the folder.")
            names.update(f"{folder}/{name}".removeprefix(f"{top}/") for name in files)
    return [name for name in sorted(names) if is_covered(name, paths) and (root / name).is_file()]

"""Make the rules of this machine from rules.toml, the user's choices.

setups.toml lists the set-ups: an engine with its limits, its budget and its model. [tool.nightshift] in the
pyproject.toml of an environment declares the sizes of its splits, the models that can answer it (its own model first;
`any`: every model outside models/), and the measured size of effects. For a user's taskset rules.toml declares this.
"""

import ast
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from nightshift.config.allowlist import PRIME_RL
from nightshift.config.rules import (
    GSM8K_PRIOR_SD,
    RULES_NAME,
    EnvironmentRules,
    LossRules,
    Parameter,
    RuleConstants,
    Rules,
    Scale,
    TasksetRules,
    package_in,
)
from nightshift.config.train_toml import read_source
from nightshift.errors import UsageError
from nightshift.files import parse_toml, read_file

MODELS = "models/"  # small models, which can answer a few environments only
ANY_MODEL = "any"
# The name of an environment is part of the names of its package and of its scores. Other scores have the excluded ones.
NAME = re.compile(r"\A(?!(agg|eval|incumbent|strict)\Z)[a-z][a-z0-9_]{0,39}\Z")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)([^;]*)(;.*\bextra\b)?")
_OF_ALL = {"weight", "guard", "args"}  # keys of [environment.NAME] that do not need a package
Name = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f]{0,255}\Z")]  # a file or a package
EnvironmentName = Annotated[str, Meta(pattern=NAME.pattern)]
Count = Annotated[int, Meta(ge=1, le=10**6)]
NumGpus = Annotated[int, Meta(ge=1, le=16)]
Models = Annotated[tuple[str, ...], Meta(min_length=1)]

_FILE = Path(__file__).with_name("setups.toml")
_SETUPS = msgspec.toml.decode(_FILE.read_bytes(), type=dict[str, tuple[Rules, ...]])["setups"]
REVISIONS = {setup.model: setup.model_revision for setup in _SETUPS if setup.model_revision}


class Table(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """[environment.NAME] of rules.toml. `guard`: percentage points by which the score of this environment, which does
    not train, may fall."""

    weight: Scale = 1.0
    guard: Annotated[float, Meta(gt=0, le=100)] | None = None
    package: Name = ""
    num_validation: Count | None = None
    num_train: Count | None = None
    args: dict[str, bool | int | float | str | list[Any] | dict[str, Any]] = {}
    reward_range: tuple[float, float] = (0.0, 1.0)
    prompt_tokens: Count = 1024
    max_turns: Annotated[int, Meta(ge=1, le=1000)] = 1
    conversation_tokens: Count | None = None
    episode_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    seat: str = ""
    tool_parser: str = ""
    models: Models = (ANY_MODEL,)

    def __post_init__(self) -> None:
        try:
            json.dumps(self.args, allow_nan=False)
        except TypeError as error:
            raise ValueError(f"args: {error}") from None
        keys = msgspec.to_builtins(self).keys() - _OF_ALL
        if keys and not self.package:
            raise ValueError(f"{min(keys)} needs package")
        if self.package and self.num_validation is None:
            raise ValueError("a package needs num_validation, the size of the split")
        low, high = self.reward_range
        if not -1e9 <= low < high <= 1e9:
            raise ValueError(f"reward_range = [{low:g}, {high:g}] is not [lowest, highest]")


class LossTable(msgspec.Struct, forbid_unknown_fields=True):
    """[loss.NAME] of rules.toml: a function that prime-rl imports from a package in a folder of the checkout."""

    package: Name
    import_path: Annotated[str, Meta(pattern=r"\A[A-Za-z]\w*(\.[A-Za-z_]\w*)+\Z")]
    parameters: dict[Annotated[str, Meta(pattern=r"\A[A-Za-z]\w{0,39}\Z")], Parameter] = {}


class Chosen(msgspec.Struct, forbid_unknown_fields=True):
    """rules.toml. Empty or 0: the best choice for the machine.

    `revision`: the commit of `model` on the hub. `learning_rate_scale`: factor of train.toml's learning rates.
    `memory_gb`: the memory preset. `infer_gpus`, `train_gpus`: numbers of GPUs that serve and that train in a run of
    prime-rl. `tensor_parallel`: GPUs per served copy of the model.
    """

    environments: list[EnvironmentName] = []
    model: Name = ""
    revision: Annotated[str, Meta(pattern=r"\A([0-9a-f]{40})?\Z")] = ""
    learning_rate_scale: Scale | None = None
    memory_gb: Literal[0, 16, 24, 48, 80] = 0
    infer_gpus: NumGpus = 1
    train_gpus: NumGpus = 1
    tensor_parallel: NumGpus = 1
    environment: dict[EnvironmentName, Table] = {}
    loss: dict[Annotated[str, Meta(pattern=r"\A(?!(custom|default|ipo)\Z)[a-z][a-z0-9_]{0,39}\Z")], LossTable] = {}

    def __post_init__(self) -> None:
        if self.revision and not self.model:
            raise ValueError("revision needs model")
        if self.infer_gpus % self.tensor_parallel:
            raise ValueError(f"tensor_parallel = {self.tensor_parallel} does not divide infer_gpus = {self.infer_gpus}")

    def table(self, name: str) -> Table:
        """Return [environment.NAME]."""
        return self.environment.get(name, Table())


class _Measured(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Measurements on an environment: see RuleConstants.scaled."""

    prior_sd: Scale = GSM8K_PRIOR_SD
    seed_sd: Scale = RuleConstants().seed_sd


class _Declared(msgspec.Struct, forbid_unknown_fields=True):
    """[tool.nightshift] of an environment."""

    num_validation: int
    models: Models
    num_train: int | None = None
    needs: list[str] = []
    is_game: bool = False
    is_bounded: bool = False
    max_completion_tokens: int = 0  # tokens that an answer may need, if more than the set-up's
    args: dict[str, Any] = {}  # arguments of `data.load` that [environment.NAME] may change
    requires: list[str] = []  # [project] dependencies
    decision: _Measured = _Measured()

    def accepts(self, model: str) -> bool:
        return model in self.models or (ANY_MODEL in self.models and not model.startswith(MODELS))


def rules_here(root: Path, engine: str | None, gpu_count: int) -> Rules:
    """Return the rules of the checkout at `root`; `engine` is the value of --engine."""
    return rules_of(root, chosen_in(root), engine, gpu_count)


def rules_elsewhere(root: Path, here: Rules, names: Sequence[str], gpu_count: int) -> Rules:
    """Return the rules of other environments with the engine of `here`, and with its model if possible."""
    chosen = chosen_in(root)
    chosen.environments, chosen.model, chosen.revision, chosen.learning_rate_scale = list(names), "", "", None
    chosen.environment = {name: structs.replace(table, guard=None) for name, table in chosen.environment.items()}
    if all(_declared(root, name, chosen.table(name)).accepts(here.model) for name in names):
        chosen.model, chosen.revision = here.model, here.model_revision or ""
        chosen.learning_rate_scale = here.learning_rate_scale
    return rules_of(root, chosen, here.engine, gpu_count)


def rules_of(root: Path, chosen: Chosen, engine: str | None, gpu_count: int) -> Rules:
    """Return the rules of these choices. The engine's own check reports missing GPUs of a chosen engine."""
    setups = [setup for setup in _SETUPS if engine in (None, setup.engine)]
    infer, train = chosen.infer_gpus, chosen.train_gpus
    able = [
        replace(
            setup,
            num_gpus=infer + train,
            infer_gpus=infer,
            train_gpus=train,
            tensor_parallel=chosen.tensor_parallel,
        )
        for setup in setups
        if setup.num_gpus > 1
    ]
    if infer + train > 2 and not able:
        cause = f"{RULES_NAME}: infer_gpus = {infer}, train_gpus = {train}: --engine {setups[0].engine} uses one GPU"
        raise UsageError(cause, "Write 1 for both, or use --engine prime-rl.")
    setups = able + [setup for setup in setups if setup.num_gpus < 2 and infer + train == 2]
    setups = [setup for setup in setups if setup.num_gpus <= gpu_count] or setups
    names = chosen.environments or ["gsm8k" if setups[0].num_gpus else "arithmetic"]
    guards = [name for name, table in chosen.environment.items() if table.guard]
    scored = {name: _declared(root, name, chosen.table(name)) for name in (*names, *guards)}
    for name in guards:
        if name in names or scored[name].is_game:
            cause = f"{RULES_NAME}: [environment.{name}]: guard = {chosen.table(name).guard:g}: a guard is no game"
            raise UsageError(f"{cause}, and does not train", f"Delete guard, or remove {name} from environments.")
    own_models = [entry.models[0] for entry in scored.values() if entry.models[0] != ANY_MODEL]
    models, path = [chosen.model], Path(os.path.normpath(root / chosen.model))
    if not chosen.model:
        models = [*own_models, setups[0].model]
    elif path.is_dir():
        if root.resolve().is_relative_to(path.resolve()):
            cause = f"{RULES_NAME}: model = {json.dumps(chosen.model)} is a folder that contains this checkout"
            raise UsageError(cause, "Put the model into a separate folder.")
        models = [path.relative_to(root).as_posix() if path.is_relative_to(root) else os.path.realpath(path)]
    usable = [
        (setup, model)
        for model in models
        if all(entry.accepts(model) for entry in scored.values())
        for setup in setups
        # a small model does not use a GPU
        if (setup.num_gpus == 0 if model.startswith(MODELS) else setup.num_gpus > 0 or chosen.model)
    ]
    if not usable:
        cause = f"{RULES_NAME}: environments = {json.dumps(names)}: {' and '.join(dict.fromkeys(models))} cannot answer"
        cause += f" {' and '.join(scored)} with {setups[0].num_gpus} GPUs and the engine {setups[0].engine}"
        fix = "Write environments = [] for the best choice of this machine, or another model or engine."
        raise UsageError(cause, fix)
    (setup, model), declared = usable[0], {name: scored[name] for name in names}
    is_folder = (root / model).is_dir()
    # A hub name without a commit may change.
    has_place = is_folder if not chosen.revision else not is_folder and HUB_NAME.fullmatch(model)
    if (model != setup.model or chosen.revision) and not has_place:
        fix = "Write a folder without a revision, or org/name on the hub and its commit: revision = 40 of 0-9 and a-f."
        raise UsageError(f"{RULES_NAME}: model = {json.dumps(model)}, revision = {json.dumps(chosen.revision)}", fix)
    rows = {name: _environment(root, name, chosen, model) for name in scored}
    environments = tuple(rows[name] for name in declared)
    losses = losses_of(root, chosen)
    # prime-rl gets copies of all packages in one folder.
    owners = {e.taskset.module if e.taskset else e.package: e.name for e in environments}
    for loss in losses:
        module = Path(loss.folder).name
        if module.startswith("nightshift") or owners.setdefault(module, loss.folder) != loss.folder:
            cause = f"{RULES_NAME}: [loss.{loss.name}]: the package name {module} is not free"
            raise UsageError(cause, "Rename the package: Nightshift, an environment or another loss has this name.")
    for name in scored:
        if (most := chosen.table(name).max_turns) > 1 and setup.engine != PRIME_RL:
            cause = f"{RULES_NAME}: [environment.{name}]: max_turns = {most}: engine {setup.engine} has one turn only"
            raise UsageError(cause, f"Use --engine {PRIME_RL}, or another environment.")
    total = sum(environment.weight for environment in environments)
    shares = [(e.weight / total, declared[e.name].decision) for e in environments]
    # Of a weighted mean: an upper bound, which assumes perfectly correlated scores of the environments.
    prior_sd = sum(share * decision.prior_sd for share, decision in shares)
    seed_sd = sum(share * decision.seed_sd for share, decision in shares)
    answer = max(setup.decoding.max_completion_tokens, *(entry.max_completion_tokens for entry in scored.values()))
    scale = setup.learning_rate_scale if model == setup.model or model.startswith(MODELS) else 1.0
    # evaluation_seconds of the set-up is for one answer to each example of the environments
    num_turns = sum(entry.num_validation * chosen.table(name).max_turns for name, entry in scored.items())
    return replace(
        setup,
        name=f"{'+'.join(declared)}-{setup.engine}",
        model=model,
        model_revision=chosen.revision or (setup.model_revision if model == setup.model else None),
        learning_rate_scale=chosen.learning_rate_scale or scale,
        evaluation_seconds=setup.evaluation_seconds
        * num_turns
        / sum(entry.num_validation for entry in declared.values()),
        environments=environments,
        guards=tuple(rows[name] for name in guards),
        decoding=replace(setup.decoding, max_completion_tokens=answer),
        max_completion_tokens=max(
            setup.max_completion_tokens, *(entry.max_completion_tokens for entry in declared.values())
        ),
        losses=losses if setup.engine == PRIME_RL else (),
        decision=setup.decision.scaled(prior_sd, seed_sd),
    )


def environments_named(root: Path, names: Sequence[str]) -> tuple[EnvironmentRules, ...]:
    """Return the rules of these environments."""
    chosen = chosen_in(root)
    return tuple(_environment(root, name, chosen, chosen.model or _SETUPS[0].model) for name in names)


def is_own_model(rules: Rules) -> bool:
    """Return whether the user chose the model: it is neither in models/ nor in a set-up."""
    return not rules.model.startswith(MODELS) and rules.model not in {setup.model for setup in _SETUPS}


def chosen_in(root: Path, rules_toml: bytes | None = None) -> Chosen:
    """Return the choices in the rules.toml of the checkout at `root`, or in the bytes `rules_toml`."""
    data = read_source(root / RULES_NAME) if rules_toml is None else rules_toml
    try:
        chosen = msgspec.convert(parse_toml(data), Chosen)
    except ValueError as error:
        raise UsageError(f"{RULES_NAME}: {error}", f"Correct it: comments in {RULES_NAME} explain the keys.") from None
    for name, table in chosen.environment.items():
        _declared(root, name, table)
    return chosen


def losses_of(root: Path, chosen: Chosen) -> tuple[LossRules, ...]:
    """Return the rules of the losses that rules.toml offers on prime-rl."""
    top, losses = root.resolve(), list[LossRules]()
    for name, table in chosen.loss.items():
        module = table.import_path.partition(".")[0]
        place = (root / table.package / module).resolve()
        if not place.is_relative_to(top) or not (place / "__init__.py").is_file():
            cause = f"{RULES_NAME}: [loss.{name}]: package = {json.dumps(table.package)} is not a folder of this "
            cause += f"checkout with a package {module}"
            raise UsageError(cause, f"Write the folder that contains {module}/__init__.py.")
        for path in sorted(filter(Path.is_file, place.rglob("*.py"))):  # an editor's lock is a dangling link
            try:
                ast.parse(path.read_bytes(), path.name)
            except SyntaxError as error:
                cause = f"{RULES_NAME}: [loss.{name}]: {path.relative_to(top)}:{error.lineno}: {error.msg}"
                raise UsageError(cause, "Correct the line, or delete the table.") from None
        folder = f"{place.relative_to(top).as_posix()}/"
        losses.append(LossRules(name, folder, table.import_path, table.parameters))
    return tuple(losses)


def _environment(root: Path, name: str, chosen: Chosen, model: str) -> EnvironmentRules:
    table = chosen.table(name)
    declared = _declared(root, name, table)
    taskset, requires = _taskset(root, name, table, model) if table.package else (None, declared.requires)
    versions = list(_versions(requires))
    # A package of Nightshift's environments whose version is not pinned may differ between machines.
    pinned = tuple(line for depth, line in versions if depth == 0 and (taskset is not None or line in requires))
    text = " ".join(sorted(line for _, line in versions))
    return EnvironmentRules(
        name,
        declared.num_validation,
        declared.num_train,
        needs=tuple(declared.needs),
        weight=table.weight,
        taskset=taskset,
        is_game=declared.is_game,
        is_bounded=declared.is_bounded,
        guard=table.guard,
        args=declared.args | table.args,
        versions=pinned,
        versions_sha256=hashlib.sha256(text.encode()).hexdigest() if versions else "",
    )


def _declared(root: Path, name: str, table: Table) -> _Declared:
    """Return the declaration of an environment from its pyproject.toml, or from rules.toml for a user's taskset."""
    names = sorted(path.parent.name for path in (root / "environments").glob("*/pyproject.toml"))
    if table.package:
        if name in names:
            cause = f"{RULES_NAME}: [environment.{name}]: environments/{name} exists"
            raise UsageError(cause, "Use another name, or delete package.")
        return _Declared(table.num_validation or 0, table.models, table.num_train, args=table.args)
    if name not in names:
        raise UsageError(f"{RULES_NAME}: environments/ has no {json.dumps(name)}", f"Write one of: {', '.join(names)}.")
    path = root / "environments" / name / "pyproject.toml"
    try:
        tables: Any = parse_toml(read_file(path))
        requires = {"requires": tables.get("project", {}).get("dependencies", [])}
        declared = msgspec.convert(tables["tool"]["nightshift"] | requires, _Declared)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: [tool.nightshift]: {error}", "docs/environments.md describes its keys.") from None
    if unknown := sorted(table.args.keys() - declared.args):
        cause = f"{RULES_NAME}: [environment.{name}]: args has {json.dumps(unknown[0])}"
        raise UsageError(cause, f"Its arguments: {', '.join(declared.args) or 'none'}.")
    return declared


def _taskset(root: Path, name: str, table: Table, model: str) -> tuple[TasksetRules, list[str]]:
    """Return the rules of a user's package, which is a folder of the checkout or installed, and its requirements."""
    top, folder = root.resolve(), (root / table.package).resolve()
    if folder.is_dir() and folder.is_relative_to(top) and folder != top:
        module, place = package_in(folder).stem, f"{folder.relative_to(top).as_posix()}/"
        path = folder / "pyproject.toml"
        try:
            project = parse_toml(read_file(path) if path.exists() else b"").get("project", {})
            requires = msgspec.convert(project.get("dependencies", []), list[str])
        except (OSError, ValueError, AttributeError) as error:
            raise UsageError(f"{path}: {error}", "Correct [project] of this file.") from None
    else:
        module, place = table.package.replace("-", "_"), ""
        owners = metadata.packages_distributions().get(module, [])
        requires = [line for owner in owners for line in metadata.requires(owner) or ()]
    if not any(metadata.distributions(name="verifiers")):
        cause = f"{RULES_NAME}: [environment.{name}] needs verifiers, which is not installed"
        raise UsageError(cause, "Run: uv sync --extra verifiers")
    settings = {field.name: getattr(table, field.name) for field in fields(TasksetRules)[2:]}
    # by default vLLM's tool parser for the family of the model that trains
    parser = table.tool_parser or ("hermes" if "qwen" in model.lower() else "")
    rules = TasksetRules(module, place, **settings | {"tool_parser": parser})
    rules.place(root)  # raises if the package is not installed
    return rules, ["verifiers", *requires]


def _versions(requirements: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield depth and `name==version` of each installed distribution that is required; 0 is a direct requirement."""
    waiting, seen = [(0, line) for line in requirements], set[str]()
    for depth, line in waiting:  # which grows
        match = _REQUIREMENT.match(line)
        if match is None or match[3] or (name := re.sub(r"[-_.]+", "-", match[1]).lower()) in seen:
            continue
        seen.add(name)
        with suppress(metadata.PackageNotFoundError):  # required on another platform, or its import will fail
            distribution = metadata.distribution(name)
            yield depth, f"{name}=={distribution.version}"
            waiting += [(depth + 1, requirement) for requirement in distribution.requires or []]

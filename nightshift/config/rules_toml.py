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
from difflib import get_close_matches
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
)
from nightshift.config.train_toml import read_source
from nightshift.errors import UsageError
from nightshift.files import parse_toml, read_file

MODELS = "models/"  # small models, which can answer a few environments only
ANY_MODEL = "any"
ROLLOUT_ENGINE = "prime-rl"  # plays episodes of several turns
_TOOL_PARSERS = {"qwen": "hermes"}  # vLLM's tool parser by a part of the model's name
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")  # of an environment; part of the names of its package and of the rules
_TAKEN = ("agg", "eval", "incumbent", "strict")  # prefixes of other scores and rewards
_MODULE = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)([^;]*)(;.*\bextra\b)?")
Name = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f]{0,255}\Z")]  # a file or a package
Count = Annotated[int, Meta(ge=1, le=10**6)]
NumGpus = Annotated[int, Meta(ge=1, le=16)]
Models = Annotated[tuple[str, ...], Meta(min_length=1)]

_FILE = Path(__file__).with_name("setups.toml")
_SETUPS = msgspec.toml.decode(_FILE.read_bytes(), type=dict[str, tuple[Rules, ...]])["setups"]
REVISIONS = {setup.model: setup.model_revision for setup in _SETUPS if setup.model_revision}


class Table(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """[environment.NAME] of rules.toml. All keys except `weight`, `guard` and `args` need `package`.

    `guard`: percentage points by which the score of this environment may fall, which does not train.
    """

    weight: Scale = 1.0
    guard: Annotated[float, Meta(gt=0, le=100)] | None = None
    package: Name = ""
    num_validation: Count | None = None
    num_train: Count | None = None
    args: dict[str, Any] = {}
    reward_range: tuple[float, float] = (0.0, 1.0)
    prompt_tokens: Count = 1024
    max_turns: Annotated[int, Meta(ge=1, le=1000)] = 1
    conversation_tokens: Count | None = None
    episode_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    seat: Name = ""
    tool_parser: Name = ""
    models: Models = (ANY_MODEL,)


class LossTable(msgspec.Struct, forbid_unknown_fields=True):
    """[loss.NAME] of rules.toml: a function that prime-rl imports from a `package`, a folder of the checkout."""

    package: Name
    import_path: Annotated[str, Meta(pattern=r"\A[A-Za-z]\w*(\.[A-Za-z_]\w*)+\Z")]
    parameters: dict[Annotated[str, Meta(pattern=r"\A[A-Za-z]\w{0,39}\Z")], Parameter] = {}


class Chosen(msgspec.Struct, forbid_unknown_fields=True):
    """rules.toml. Empty or 0: the best choice for the machine.

    `revision`: the commit of `model` on the hub. `learning_rate_scale`: factor of train.toml's learning rates.
    `memory_gb`: the memory preset; 0: by the smallest GPU in use. `infer_gpus`, `train_gpus`: numbers of GPUs that
    serve and that train in a run of prime-rl. `tensor_parallel`: GPUs per served copy of the model.
    """

    environments: list[str] = []
    model: Name = ""
    revision: Annotated[str, Meta(pattern=r"\A([0-9a-f]{40})?\Z")] = ""
    learning_rate_scale: Scale | None = None
    memory_gb: Literal[0, 16, 24, 48, 80] = 0
    infer_gpus: NumGpus = 1
    train_gpus: NumGpus = 1
    tensor_parallel: NumGpus = 1
    environment: dict[str, Table] = {}
    loss: dict[Annotated[str, Meta(pattern=r"\A(?!(custom|default|ipo)\Z)[a-z][a-z0-9_]{0,39}\Z")], LossTable] = {}

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
    if not setups:  # an engine of a record
        engines = dict.fromkeys(setup.engine for setup in _SETUPS)
        raise UsageError(f"there is no engine {engine!a}", f"Write {' or '.join(engines)}.")
    setups = _with_gpus(setups, chosen)
    setups = [setup for setup in setups if setup.num_gpus <= gpu_count] or setups
    names = chosen.environments or ["gsm8k" if setups[0].num_gpus else "arithmetic"]
    declared = {name: _declared(root, name, chosen.table(name)) for name in names}
    guards = {name: _declared(root, name, table) for name, table in chosen.environment.items() if table.guard}
    for name, entry in guards.items():
        if name in names or entry.is_game:
            cause = f"{RULES_NAME}: [environment.{name}]: guard = {chosen.table(name).guard:g}"
            why = (
                "a game cannot be a guard" if entry.is_game else "this environment trains, and a guard is never trained"
            )
            more = f", or remove {name} from environments" if name in names else ""
            raise UsageError(f"{cause}: {why}", f"Delete guard{more}.")
    scored = declared | guards
    own_models = [entry.models[0] for entry in scored.values() if entry.models[0] != ANY_MODEL]
    models = [_portable_path(root, chosen.model)] if chosen.model else [*own_models, setups[0].model]
    for model in models:
        for setup in setups if all(entry.accepts(model) for entry in scored.values()) else ():
            is_small = model.startswith(MODELS)  # a small model does not use a GPU
            if setup.num_gpus == 0 if is_small else setup.num_gpus > 0 or chosen.model:
                return _complete(root, setup, model, declared, guards, chosen)
    refusing = [name for name, entry in scored.items() if not entry.accepts(model)] or ["these environments"]
    cause = f"{RULES_NAME}: environments = {json.dumps(names)}: {model} ({setups[0].name}, GPUs needed: "
    cause += f"{setups[0].num_gpus}) cannot answer {' and '.join(refusing)}"
    models = sorted(set.intersection(*({*entry.models} for entry in scored.values())))
    fix = "Write environments = [] for the best choice of this machine, or use another --engine or model: "
    raise UsageError(cause, f"{fix}{', '.join(models)} ({ANY_MODEL}: every model outside {MODELS}, with a GPU).")


def _with_gpus(setups: list[Rules], chosen: Chosen) -> list[Rules]:
    """Return the set-ups with the chosen numbers of GPUs; for more than 1 + 1 only set-ups that can use them."""
    infer, train, parallel = chosen.infer_gpus, chosen.train_gpus, chosen.tensor_parallel
    if infer % parallel:
        cause = f"{RULES_NAME}: tensor_parallel = {parallel} does not divide infer_gpus = {infer}"
        raise UsageError(cause, "Write a divisor of infer_gpus, or 1.")
    able = [
        replace(setup, num_gpus=infer + train, infer_gpus=infer, train_gpus=train, tensor_parallel=parallel)
        for setup in setups
        if setup.num_gpus > 1
    ]
    if infer + train > 2 and not able:
        cause = f"{RULES_NAME}: infer_gpus = {infer}, train_gpus = {train}: --engine {setups[0].engine} uses one GPU"
        raise UsageError(cause, "Write 1 for both, or use --engine prime-rl.")
    return able if infer + train > 2 else able + [setup for setup in setups if setup.num_gpus < 2]


def environments_named(root: Path, names: Sequence[str]) -> tuple[EnvironmentRules, ...]:
    """Return the rules of these environments."""
    chosen = chosen_in(root)
    model, tables = chosen.model or _SETUPS[0].model, {name: chosen.table(name) for name in names}
    return tuple(_environment(root, name, table, _declared(root, name, table), model) for name, table in tables.items())


def is_own_model(rules: Rules) -> bool:
    """Return whether the user chose the model: it is neither in models/ nor in a set-up."""
    return not rules.model.startswith(MODELS) and rules.model not in {setup.model for setup in _SETUPS}


def _complete(
    root: Path,
    setup: Rules,
    model: str,
    declared: dict[str, _Declared],
    guards: dict[str, _Declared],
    chosen: Chosen,
) -> Rules:
    """Return the rules of a set-up with a model, environments and guards."""
    if model != setup.model or chosen.revision:
        _check_model(root, model, chosen)
    environments = tuple(_environment(root, name, chosen.table(name), entry, model) for name, entry in declared.items())
    losses = losses_of(root, chosen)
    _check_loss_packages(losses, environments)
    shares = [environment.weight / sum(e.weight for e in environments) for environment in environments]
    # Of a weighted mean: an upper bound, which assumes perfectly correlated scores of the environments.
    pairs = list(zip(shares, (entry.decision for entry in declared.values()), strict=True))
    prior_sd = sum(share * decision.prior_sd for share, decision in pairs)
    seed_sd = sum(share * decision.seed_sd for share, decision in pairs)
    longest = max(entry.max_completion_tokens for entry in declared.values())
    answer = max(longest, setup.decoding.max_completion_tokens, *(e.max_completion_tokens for e in guards.values()))
    scale = setup.learning_rate_scale if model == setup.model or model.startswith(MODELS) else 1.0
    num_turns = {
        name: entry.num_validation * chosen.table(name).max_turns for name, entry in (declared | guards).items()
    }
    for name in num_turns:
        if (most := chosen.table(name).max_turns) > 1 and setup.engine != ROLLOUT_ENGINE:
            cause = f"{RULES_NAME}: [environment.{name}]: max_turns = {most}: engine {setup.engine} has one turn only"
            raise UsageError(cause, f"Use --engine {ROLLOUT_ENGINE}, or another environment.")
    usual = sum(entry.num_validation for entry in declared.values())  # evaluation_seconds is for this number of answers
    return replace(
        setup,
        name=f"{'+'.join(declared)}-{setup.engine}",
        model=model,
        model_revision=chosen.revision or (setup.model_revision if model == setup.model else None),
        learning_rate_scale=chosen.learning_rate_scale or scale,
        evaluation_seconds=setup.evaluation_seconds * sum(num_turns.values()) / usual,
        environments=environments,
        guards=tuple(_environment(root, name, chosen.table(name), entry, model) for name, entry in guards.items()),
        decoding=replace(setup.decoding, max_completion_tokens=answer),
        max_completion_tokens=max(longest, setup.max_completion_tokens),
        losses=losses if setup.engine == PRIME_RL else (),
        decision=setup.decision.scaled(prior_sd, seed_sd),
    )


def _check_model(root: Path, model: str, chosen: Chosen) -> None:
    """Raise UsageError unless the model is a folder or a commit on the hub. A hub name without a commit may change."""
    is_folder = (root / model).is_dir()
    if chosen.revision and not chosen.model:
        raise UsageError(f"{RULES_NAME}: revision needs model", "Write the model, or delete revision.")
    if is_folder is bool(chosen.revision) or not (is_folder or HUB_NAME.fullmatch(model)):
        reason = "not a folder" if chosen.revision else "not a folder, and has no revision"
        reason = "a folder, and has a revision" if is_folder else reason
        fix = "Write a folder, or org/name on the hub and its commit: revision = 40 of 0-9 and a-f."
        raise UsageError(f"{RULES_NAME}: model = {json.dumps(model)} is {reason}", fix)


def _portable_path(root: Path, model: str) -> str:
    """Return the path of a model folder, relative if the folder is in the checkout; or a name on the hub."""
    path = Path(os.path.normpath(root / model))
    if not path.is_dir():
        return model
    if root.resolve().is_relative_to(path.resolve()):
        cause = f"{RULES_NAME}: model = {json.dumps(model)} is {path.resolve()}, which contains this checkout"
        raise UsageError(cause, "Put the model into a separate folder.")
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else os.path.realpath(path)


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
    return tuple(_loss(root, name, table) for name, table in chosen.loss.items())


def _loss(root: Path, name: str, table: LossTable) -> LossRules:
    """Return the rules of a user's loss. UsageError: wrong bounds, no such package, or a syntax error in its code."""
    where, module = f"{RULES_NAME}: [loss.{name}]", table.import_path.partition(".")[0]
    for parameter, number in table.parameters.items():
        if not (number.low < number.high and number.low <= number.default <= number.high):
            cause = f"{where}: {parameter} = {number.default:g} in {number.low:g} to {number.high:g}"
            raise UsageError(cause, "Write low below high, and the default between them.")
    top, folder = root.resolve(), (root / table.package).resolve()
    is_package = folder.name == module and (folder / "__init__.py").is_file()
    place = folder if is_package else folder / module
    if not place.is_relative_to(top) or not (place / "__init__.py").is_file():
        cause = (
            f"{where}: package = {json.dumps(table.package)} is not a folder of this checkout with a package {module}"
        )
        raise UsageError(cause, f"Write the folder that contains {module}/__init__.py.")
    for path in sorted(filter(Path.is_file, place.rglob("*.py"))):  # an editor's lock is a dangling link
        try:
            ast.parse(path.read_bytes(), path.name)
        except SyntaxError as error:
            cause = f"{where}: {path.relative_to(top)}:{error.lineno}: {error.msg}"
            raise UsageError(cause, "Correct the line, or delete the table.") from None
    return LossRules(name, f"{place.relative_to(top).as_posix()}/", table.import_path, table.parameters)


def _check_loss_packages(losses: Sequence[LossRules], environments: Sequence[EnvironmentRules]) -> None:
    """Raise UsageError if a loss's package has the name of another package: prime-rl gets copies in one folder."""
    folders = {e.taskset.module if e.taskset else e.package: f"environment {e.name}" for e in environments}
    for loss in losses:
        module = loss.import_path.partition(".")[0]
        other = (
            "a package of Nightshift" if module.startswith("nightshift") else folders.setdefault(module, loss.folder)
        )
        if other != loss.folder:
            cause = f"{RULES_NAME}: [loss.{loss.name}]: the name of the package {module} of {loss.folder} is taken"
            raise UsageError(f"{cause}: {other}", "Rename the package.")


def _environment(root: Path, name: str, table: Table, declared: _Declared, model: str) -> EnvironmentRules:
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
    where = f"{RULES_NAME}: [environment.{name}]"
    if not NAME.fullmatch(name) or name in _TAKEN:
        fix = f"Write up to 40 of a-z, 0-9 and _, and none of: {', '.join(_TAKEN)}."
        raise UsageError(f"{RULES_NAME}: {json.dumps(name)} is not a valid name", fix)
    try:
        json.dumps(table.args, allow_nan=False)
    except (TypeError, ValueError) as error:
        fix = "Write text, numbers, true or false, and lists of them."
        raise UsageError(f"{where}: args: {error}", fix) from None
    path = root / "environments" / name / "pyproject.toml"
    if table.package or not path.exists():
        return _declared_taskset(root, name, table, where)
    try:
        tables: Any = parse_toml(read_file(path))
        requires = {"requires": tables.get("project", {}).get("dependencies", [])}
        declared = msgspec.convert(tables["tool"]["nightshift"] | requires, _Declared)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: [tool.nightshift]: {error}", "docs/environments.md describes its keys.") from None
    if others := sorted(msgspec.to_builtins(table).keys() - {"weight", "guard", "args"}):
        raise UsageError(f"{where}: {others[0]} needs package", f"Write package = ..., or delete {others[0]}.")
    if unknown := sorted(table.args.keys() - declared.args):
        fix = f"Write some of: {', '.join(declared.args)}." if declared.args else "Delete args: there are no arguments."
        raise UsageError(f"{where}: args has {json.dumps(unknown[0])}", fix)
    return declared


def _declared_taskset(root: Path, name: str, table: Table, where: str) -> _Declared:
    names = sorted(path.parent.name for path in (root / "environments").glob("*/pyproject.toml"))
    if not table.package:
        near = get_close_matches(name, names, 1)
        fix = f'Did you mean "{near[0]}"?' if near else f"Write one of: {', '.join(names)}."
        raise UsageError(f"{RULES_NAME}: environments/ has no {json.dumps(name)}", fix)
    if name in names:
        raise UsageError(f"{where}: environments/{name} exists", "Use another name, or delete package.")
    if table.num_validation is None:
        raise UsageError(f"{where} has no num_validation", "Write the size of the split: num_validation = 200.")
    low, high = table.reward_range
    if not -1e9 <= low < high <= 1e9:
        raise UsageError(f"{where}: reward_range = [{low:g}, {high:g}]", "Write [lowest, highest].")
    return _Declared(table.num_validation, table.models, table.num_train, args=table.args)


def _taskset(root: Path, name: str, table: Table, model: str) -> tuple[TasksetRules, list[str]]:
    """Return the rules of a user's package, which is a folder of the checkout or installed, and its requirements.

    `model`: the model that trains. Its family sets the tool parser, unless the table does.
    """
    where = f"{RULES_NAME}: [environment.{name}]: package = {json.dumps(table.package)}"
    top, folder = root.resolve(), (root / table.package).resolve()
    path = folder / "pyproject.toml"
    if folder.is_dir() and folder.is_relative_to(top) and folder != top:
        inside = [path.parent.name for pattern in ("*", "src/*") for path in folder.glob(f"{pattern}/__init__.py")]
        inside = inside or [path.stem for pattern in ("*.py", "src/*.py") for path in folder.glob(pattern)]
        is_package = (folder / "__init__.py").is_file() or folder.name in inside
        modules = [folder.name] if is_package else inside
        if len(modules) != 1:
            cause = f"{where}: {len(modules)} packages in that folder ({', '.join(sorted(inside)) or 'none'})"
            raise UsageError(cause, "Write the folder of the package itself, with its __init__.py, or of one file.")
        module, place = modules[0], f"{folder.relative_to(top).as_posix()}/"
        try:
            project = parse_toml(read_file(path) if path.exists() else b"").get("project", {})
            requires = msgspec.convert(project.get("dependencies", []), list[str])
        except (OSError, ValueError, AttributeError) as error:
            raise UsageError(f"{path}: {error}", "Correct it, or write the folder of the package itself.") from None
    else:
        module, place = table.package.replace("-", "_"), ""
        owners = metadata.packages_distributions().get(module, [])
        requires = [line for owner in owners for line in metadata.requires(owner) or ()]
    if not _MODULE.fullmatch(module):
        raise UsageError(f"{where} is not a folder of this checkout", "Write a folder, or an installed package.")
    if not any(metadata.distributions(name="verifiers")):
        raise UsageError(f"{where} needs verifiers, which is not installed", "Run: uv sync --extra verifiers")
    parsers = [parser for family, parser in _TOOL_PARSERS.items() if family in model.lower()]
    settings = {field.name: getattr(table, field.name) for field in fields(TasksetRules)[2:]}
    rules = TasksetRules(module, place, **settings | {"tool_parser": table.tool_parser or "".join(parsers)})
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

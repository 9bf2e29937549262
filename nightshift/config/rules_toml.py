"""rules.toml: what the person chose; and the rules that come of it on a machine.

A set-up is a way to train: engine, limits, budget, a model of its own. An environment says in [tool.nightshift] of its
pyproject.toml how large its sets are, which models can answer it (its own first; `any`: those that are not in models/),
and what was measured of the effects of changes there; of somebody's taskset rules.toml says it.
`rules_here` puts together what goes together.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nightshift.config.decision_rules import GSM8K_PRIOR_SD, RuleConstants, Scale
from nightshift.config.rules import RULES_NAME, EnvironmentRules, Rules, TasksetRules
from nightshift.config.toml_text import line_of
from nightshift.errors import UsageError
from nightshift.files import read_file

EXTRA = "uv sync --extra verifiers"
Name = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f]{0,255}\Z")]  # of a file or a package
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")  # of an environment: it is part of a package's, and of that of the rules
_TAKEN = ("agg", "eval", "incumbent", "strict")  # names of other scores and rewards begin so
_MODULE = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)([^;]*)(;.*\bextra\b)?")


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """[environment.NAME]: `weight` and `args` of any environment; the rest goes with `package`, num_validation must."""

    weight: Scale = 1.0
    package: Name = ""
    num_validation: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    num_train: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    args: dict[str, Any] = {}
    reward_range: tuple[float, float] = (0.0, 1.0)
    prompt_tokens: Annotated[int, Meta(ge=1, le=10**6)] = 1024
    models: Annotated[tuple[str, ...], Meta(min_length=1)] = ("any",)


def check_environment(root: Path, name: str, table: Table) -> None:
    """UsageError for what does not go together in [environment.NAME]."""
    where = f"{RULES_NAME}: [environment.{name}]"
    if not NAME.fullmatch(name) or name in _TAKEN:
        fix = f"Write up to 40 of a-z, 0-9 and _, and none of: {', '.join(_TAKEN)}."
        raise UsageError(f"{RULES_NAME}: {json.dumps(name)} is no name", fix)
    check_json(where, table.args)
    if not table.package:
        given = msgspec.to_builtins(table).keys() - {"weight", "args"}
        alone = [key for key in sorted(given) if getattr(table, key) != getattr(Table(), key)]
        if alone:
            raise UsageError(f"{where}: {alone[0]} goes with package", "Write package = ..., or leave it out.")
        return
    if (root / "environments" / name).exists():
        raise UsageError(f"{where}: environments/{name} is there already", "Name it otherwise, or leave package out.")
    if table.num_validation is None:
        raise UsageError(f"{where} has no num_validation", "Write how many tasks decide: num_validation = 200.")
    low, high = table.reward_range
    if not -1e9 <= low < high <= 1e9:
        raise UsageError(f"{where}: reward_range = [{low:g}, {high:g}]", "Write [lowest, highest].")


def check_json(where: str, args: dict[str, Any]) -> None:
    """UsageError for what TOML knows and the rules cannot be hashed with."""
    try:
        json.dumps(args, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: args: {error}", "Write text, numbers, true or false, and lists of them.") from None


def taskset_rules(root: Path, name: str, table: Table) -> tuple[TasksetRules, list[str]]:
    """The package that `table` names, a folder relative to the checkout or an installed one, as the rules hold it; and
    what it requires.

    UsageError where there is none, where a part of it lies elsewhere, or without verifiers.
    """
    where = f"{RULES_NAME}: [environment.{name}]: package = {json.dumps(table.package)}"
    folder = (root / table.package).resolve()
    is_folder = folder.is_dir() and folder.is_relative_to(root.resolve()) and folder != root.resolve()
    if is_folder:
        inside = [path.parent.name for pattern in ("*", "src/*") for path in folder.glob(f"{pattern}/__init__.py")]
        own = (folder / "__init__.py").is_file() or folder.name in inside
        modules = [folder.name] if own else inside
        if len(modules) != 1:
            cause = f"{where}: {len(modules)} packages in that folder ({', '.join(sorted(inside)) or 'none'})"
            raise UsageError(cause, "Name the folder of the package itself, with the one __init__.py.")
        path = folder / "pyproject.toml"
        try:
            project = msgspec.toml.decode(read_file(path) if path.exists() else "").get("project", {})
            requires = msgspec.convert(project.get("dependencies", []), list[str])
        except (OSError, ValueError, RecursionError, AttributeError) as error:
            raise UsageError(f"{path}: {error}", "Mend it, or name the folder of the package itself.") from None
        module, place = modules[0], f"{folder.relative_to(root.resolve()).as_posix()}/"
    else:
        module, place = table.package.replace("-", "_"), ""
        owners = metadata.packages_distributions().get(module, [])
        requires = [line for owner in owners for line in metadata.requires(owner) or ()]
    if not _MODULE.fullmatch(module):
        raise UsageError(f"{where} is no folder of this checkout", "Name a folder in it, or an installed package.")
    found = TasksetRules(module, place, table.reward_range, table.prompt_tokens)
    if not found.place(root).is_dir():
        raise UsageError(f"{where} is one file", f"Make it a package: {module}/__init__.py.")
    if not any(metadata.distributions(name="verifiers")):
        raise UsageError(f"{where} needs verifiers, which is not installed", f"Run: {EXTRA}")
    return found, ["verifiers", *requires]


def versions_of(requirements: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Of the installed distributions that they name, `name==version`; and sha256 over those and all that these require
    in turn, "" for none."""
    found = list(_versions(requirements))
    digest = hashlib.sha256(" ".join(sorted(version for _, version in found)).encode()).hexdigest() if found else ""
    return tuple(version for depth, version in found if depth == 0), digest


def _versions(requirements: Sequence[str]) -> Iterator[tuple[int, str]]:
    """0 and `name==version` of every installed distribution that they name; 1 and more for what those require."""
    waiting, seen = [(0, line) for line in requirements], set[str]()
    for depth, line in waiting:  # which grows
        match = _REQUIREMENT.match(line)
        if match is None or match[3] or (name := re.sub(r"[-_.]+", "-", match[1]).lower()) in seen:
            continue
        seen.add(name)
        with suppress(metadata.PackageNotFoundError):  # for another platform, or found missing when it is imported
            distribution = metadata.distribution(name)
            yield depth, f"{name}=={distribution.version}"
            waiting += [(depth + 1, each) for each in distribution.requires or []]


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def portable_path(root: Path, model: str) -> str:
    """A folder as the rules name it, whose bytes are hashed: relative where it lies in the checkout, or is linked.
    UsageError for one that holds the checkout."""
    if not model or not (root / model).is_dir():
        return model
    real = Path(os.path.realpath(root / model))
    if root.resolve().is_relative_to(real):
        cause = f"{RULES_NAME}: model = {json.dumps(model)} is {real}, which holds this checkout"
        raise UsageError(cause, "Put the model into a folder of its own, and name that.")
    for place, top in ((real, root.resolve()), (Path(os.path.normpath(root / model)), root)):
        if place.is_relative_to(top):
            return place.relative_to(top).as_posix()
    return str(real)


def check_model(root: Path, model: str, revision: str | None) -> None:
    """UsageError for what is neither a folder nor a commit on the hub: a name alone could be another model tomorrow."""
    is_folder = (root / model).is_dir()
    if is_folder is bool(revision) or not (is_folder or _HUB_NAME.fullmatch(model)):
        what = (
            "a folder, and has a revision" if is_folder else "no folder here" + ", and has no revision" * (not revision)
        )
        fix = "Name a folder, or org/name on the hub and its commit: revision = 40 of 0-9 and a-f."
        raise UsageError(f"{RULES_NAME}: model = {json.dumps(model)} is {what}", fix)


MODELS = "models/"  # what lies there knows the formats of a few environments only
ANY_MODEL = "any"
_REMOVED = ("early_stop", "score_last")  # keys of 0.2


def _setup(row: dict[str, Any]) -> Rules:
    return msgspec.convert({"model_revision": None, "environments": (), "decision": {}} | row, Rules)


_SETUPS_NAME = Path(__file__).with_name("setups.toml")
_SETUPS = tuple(
    map(_setup, msgspec.toml.decode(_SETUPS_NAME.read_bytes())["setups"])
)  # what a machine can do best first
REVISIONS = {setup.model: setup.model_revision for setup in _SETUPS if setup.model_revision}


class _Measured(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What was measured on an environment: see RuleConstants.scaled."""

    prior_sd: Scale = GSM8K_PRIOR_SD
    seed_sd: Scale = RuleConstants().seed_sd


class _Declared(msgspec.Struct, forbid_unknown_fields=True):
    """[tool.nightshift] of an environment."""

    num_validation: int
    models: Annotated[tuple[str, ...], Meta(min_length=1)]
    num_train: int | None = None
    needs: list[str] = []
    is_game: bool = False
    is_bounded: bool = False
    max_completion_tokens: int = 0  # room that an answer needs, where that is more than the set-up's
    args: dict[str, Any] = {}  # what [environment.NAME] may change of how its data is loaded
    requires: list[str] = []  # [project] dependencies
    decision: _Measured = _Measured()

    def accepts(self, model: str) -> bool:
        return model in self.models or (ANY_MODEL in self.models and not model.startswith(MODELS))


class Chosen(msgspec.Struct, forbid_unknown_fields=True):
    """rules.toml. Empty, or 0: what the machine can do best. `revision` is of a model on the hub; learning rates of
    train.toml are multiplied by `learning_rate_scale`. Both go with a model that is named."""

    environments: list[str] = []
    model: Name = ""
    revision: Annotated[str, Meta(pattern=r"\A([0-9a-f]{40})?\Z")] = ""
    learning_rate_scale: Scale | None = None
    memory_gb: Literal[0, 16, 24, 48, 80] = 0
    environment: dict[str, Table] = {}

    def table(self, name: str) -> Table:
        """What it says of an environment."""
        return self.environment.get(name, Table())


def memory_gb(root: Path) -> int:
    """The card that rules.toml wants experiments to fit on; 0: whatever is here. UsageError as `rules_here`."""
    return _read(root).memory_gb


def rules_here(root: Path, engine: str | None, gpu_count: int) -> Rules:
    """The rules of the checkout here, under --engine. UsageError for what is wrong in rules.toml, and as `rules_of`."""
    return rules_of(root, _read(root), engine, gpu_count)


def rules_elsewhere(root: Path, here: Rules, names: Sequence[str], gpu_count: int) -> Rules:
    """The rules of other environments on the same engine: with the model that there is here, if that can answer them.

    UsageError as `rules_here`.
    """
    chosen = _read(root)
    chosen.environments, chosen.model, chosen.revision, chosen.learning_rate_scale = list(names), "", "", None
    if all(_declared(root, name, chosen.table(name)).accepts(here.model) for name in names):
        chosen.model, chosen.revision = here.model, here.model_revision or ""
        chosen.learning_rate_scale = here.learning_rate_scale
    return rules_of(root, chosen, here.engine, gpu_count)


def rules_of(root: Path, chosen: Chosen, engine: str | None, gpu_count: int) -> Rules:
    """The rules that this choice makes.

    An engine that is named is not replaced where GPUs are missing: its own check says so. UsageError for one that there
    is not, and for environments that no model of this machine can answer.
    """
    if not chosen.model and (chosen.revision or chosen.learning_rate_scale):
        cause = f"{RULES_NAME}: revision and learning_rate_scale go with model"
        raise UsageError(cause, "Name the model, or leave them out.")
    chosen = msgspec.structs.replace(chosen, model=portable_path(root, chosen.model))
    mine = [setup for setup in _SETUPS if engine in (None, setup.engine)]
    if not mine:  # a record said so
        raise UsageError(
            f"there is no engine {engine!a}", f"Say {' or '.join(dict.fromkeys(s.engine for s in _SETUPS))}."
        )
    fitting = [setup for setup in mine if setup.num_gpus <= gpu_count] or mine
    names = chosen.environments or ["gsm8k" if fitting[0].num_gpus else "arithmetic"]
    declared = {name: _declared(root, name, chosen.table(name)) for name in names}
    own = [one.models[0] for one in declared.values() if one.models[0] != ANY_MODEL]
    wanted = [chosen.model] if chosen.model else [*own, fitting[0].model]
    for model in wanted:
        if all(one.accepts(model) for one in declared.values()):
            for setup in fitting:
                if _serves(setup, model, bool(chosen.model)):
                    return _composed(root, setup, model, declared, chosen)
    raise _unanswered(names, declared, wanted, fitting)


def _serves(setup: Rules, model: str, is_chosen: bool) -> bool:
    """GPUs are for models that are worth them; a CPU is for any that a person asks for."""
    return setup.num_gpus == 0 if model.startswith(MODELS) else setup.num_gpus > 0 or is_chosen


def _unanswered(
    names: Sequence[str], declared: dict[str, _Declared], models: Sequence[str], setups: Sequence[Rules]
) -> UsageError:
    """No model of `models` answers them all on one of `setups`: which can, or where."""
    on = f"{models[-1]} ({setups[0].name}, GPUs needed: {setups[0].num_gpus})"
    cause = f"{RULES_NAME}: environments = {json.dumps(names)}: {on} cannot answer "
    cause += " and ".join(name for name, one in declared.items() if not one.accepts(models[-1])) or "them there"
    can = [m for one in declared.values() for m in one.models if all(other.accepts(m) for other in declared.values())]
    fixes = [f'model = "{model}"' for model in can if model.startswith(MODELS)]
    if models[-1] in can:  # but not on that engine
        fixes = ["--engine trl", 'model = ""']
    elif len(fixes) < len(can):
        fixes += [f"--engine {setup.engine} (GPUs needed: {setup.num_gpus})" for setup in _SETUPS if setup.num_gpus]
        fixes += ['model = "a folder with one"']
    fix = " or ".join(dict.fromkeys(fixes))
    return UsageError(cause, f"Write environments = [] for what the machine can do, or use {fix}.")


def is_own_model(rules: Rules) -> bool:
    """True for a model that is neither in models/ nor a set-up's."""
    return not rules.model.startswith(MODELS) and rules.model not in {setup.model for setup in _SETUPS}


def environments_named(root: Path, names: Sequence[str]) -> tuple[EnvironmentRules, ...]:
    """What rules.toml and they themselves say of these environments. UsageError as `rules_here`."""
    chosen = _read(root)
    return tuple(_environment(root, name, chosen.table(name)) for name in names)


def refuse_unused_weights(root: Path) -> None:
    """Raise UsageError for the weight of an environment that rules.toml does not choose."""
    chosen = _read(root)
    names = chosen.environments or ["gsm8k", "arithmetic"]
    for name, table in chosen.environment.items():
        if table.weight != Table().weight and name not in names:
            line = line_of(read_file(root / RULES_NAME).decode(), ("environment", name, "weight"))
            cause = f"{RULES_NAME}:{line}: a weight of {name}, which is not one of environments"
            raise UsageError(cause, "Add the environment there, or delete the line.")


def _environment(root: Path, name: str, table: Table) -> EnvironmentRules:
    declared = _declared(root, name, table)
    taskset, requires = taskset_rules(root, name, table) if table.package else (None, declared.requires)
    sizes, args = (declared.num_validation, declared.num_train), declared.args | table.args
    needs, kind = tuple(declared.needs), (declared.is_game, declared.is_bounded)
    named, digest = versions_of(requires)
    if taskset is None:  # another version elsewhere is no fault of what ours leave open
        named = tuple(version for version in named if version in requires)
    return EnvironmentRules(name, *sizes, needs, table.weight, taskset, *kind, args, named, digest)


def _composed(root: Path, setup: Rules, model: str, declared: dict[str, _Declared], chosen: Chosen) -> Rules:
    environments = tuple(_environment(root, name, chosen.table(name)) for name in declared)
    shares = [environment.weight / sum(e.weight for e in environments) for environment in environments]
    # Of a weighted mean: as large as this where the parts go up and down together, and smaller where they do not.
    measured = {
        field: sum(share * getattr(one.decision, field) for share, one in zip(shares, declared.values(), strict=True))
        for field in _Measured.__struct_fields__
    }
    revision = chosen.revision or (setup.model_revision if model == setup.model else None)
    if model != setup.model or chosen.revision:
        check_model(root, model, revision)
    longest = max(one.max_completion_tokens for one in declared.values())
    answer = max(longest, setup.decoding.max_completion_tokens)
    scale = setup.learning_rate_scale if model == setup.model or model.startswith(MODELS) else 1.0
    return replace(
        setup,
        name=f"{'+'.join(declared)}-{setup.engine}",
        model=model,
        model_revision=revision,
        learning_rate_scale=chosen.learning_rate_scale or scale,
        environments=environments,
        decoding=replace(setup.decoding, max_completion_tokens=answer),
        max_completion_tokens=max(longest, setup.max_completion_tokens),
        decision=setup.decision.scaled(**measured),
    )


def _declared(root: Path, name: str, table: Table) -> _Declared:
    """What the environment says of itself, or rules.toml of somebody's. UsageError where there is no such environment,
    or it says something else."""
    check_environment(root, name, table)
    if table.num_validation is not None:
        return _Declared(table.num_validation, table.models, table.num_train, args=table.args)
    there = sorted(path.parent.name for path in (root / "environments").glob("*/pyproject.toml"))
    if name not in there:
        near = get_close_matches(name, there, 1)
        fix = f'Did you mean "{near[0]}"?' if near else f"Write one of: {', '.join(there)}."
        raise UsageError(f"{RULES_NAME}: environments/ has no {json.dumps(name)}", fix)
    path = root / "environments" / name / "pyproject.toml"
    try:
        tables: Any = msgspec.toml.decode(read_file(path))
        requires = {"requires": tables.get("project", {}).get("dependencies", [])}
        declared = msgspec.convert(tables["tool"]["nightshift"] | requires, _Declared)
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        cause = f"{path}: [tool.nightshift]: {error}"
        raise UsageError(cause, _renamed(error) or "docs/environments.md says what it holds.") from None
    check_json(f"{path}: [tool.nightshift]", declared.args)
    if unknown := sorted(table.args.keys() - declared.args):
        fix = f"Write some of: {', '.join(declared.args)}." if declared.args else "Leave args out: it takes none."
        raise UsageError(f"{RULES_NAME}: [environment.{name}]: args has {json.dumps(unknown[0])}", fix)
    return declared


def _renamed(error: Exception) -> str:
    """Return the remedy for a key of 0.2; empty for other errors."""
    return "It is num_validation since 0.3: rename it." if "`num_selection`" in str(error) else ""


def _read(root: Path) -> Chosen:
    try:
        return chosen_in(root, read_file(root / RULES_NAME))
    except OSError as error:
        raise UsageError(f"{RULES_NAME}: {error}", "Put it back: git checkout rules.toml.") from None


def chosen_in(root: Path, rules_toml: bytes) -> Chosen:
    """What such a text chooses, in this checkout. UsageError for what is wrong in it."""
    try:
        tables: dict[str, Any] = msgspec.toml.decode(rules_toml)
        removed = [name for name in _REMOVED if name in tables]
        chosen = msgspec.convert({name: value for name, value in tables.items() if name not in removed}, Chosen)
    except (ValueError, RecursionError) as error:
        fix = 'Write environments = ["name"], or [], memory_gb = 0, 16, 24, 48 or 80, and what the file explains.'
        raise UsageError(f"{RULES_NAME}: {error}", _renamed(error) or fix) from None
    if removed:
        raise UsageError(f"{RULES_NAME}: {' and '.join(removed)}: gone in 0.3: delete the line")
    if len({*chosen.environments}) < len(chosen.environments):
        raise UsageError(f"{RULES_NAME}: environments = {json.dumps(chosen.environments)}: one twice", "Name it once.")
    for name, table in chosen.environment.items():
        _declared(root, name, table)
    return chosen

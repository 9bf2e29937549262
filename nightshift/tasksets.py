"""[environment.NAME] of rules.toml with a `package`: somebody's verifiers v1 taskset, found without importing it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from nightshift.decision_rules import Scale
from nightshift.errors import UsageError
from nightshift.files import read_file
from nightshift.rules import RULES_NAME, TasksetRules

EXTRA = "uv sync --extra verifiers"
Name = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f]{0,255}\Z")]  # of a file or a package
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")  # of an environment: it is part of a package's, and of that of the rules
_TAKEN = ("agg", "eval", "incumbent", "strict")  # names of other scores and rewards begin so
_MODULE = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)([^;]*)(;.*\bextra\b)?")


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """[environment.NAME]: `weight` and `args` of any environment; the rest goes with `package`, num_selection must."""

    weight: Scale = 1.0
    package: Name = ""
    num_selection: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    num_train: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    args: dict[str, Any] = {}
    reward_range: tuple[float, float] = (0.0, 1.0)
    prompt_tokens: Annotated[int, Meta(ge=1, le=10**6)] = 1024
    models: Annotated[tuple[str, ...], Meta(min_length=1)] = ("any",)


def check(root: Path, name: str, table: Table) -> None:
    """UsageError for what does not go together in [environment.NAME]."""
    where = f"{RULES_NAME}: [environment.{name}]"
    if not NAME.fullmatch(name) or name in _TAKEN:
        fix = f"Write up to 40 of a-z, 0-9 and _, and none of: {', '.join(_TAKEN)}."
        raise UsageError(f"{RULES_NAME}: {json.dumps(name)} is no name", fix)
    check_args(where, table.args)
    if not table.package:
        given = msgspec.to_builtins(table).keys() - {"weight", "args"}
        alone = [key for key in sorted(given) if getattr(table, key) != getattr(Table(), key)]
        if alone:
            raise UsageError(f"{where}: {alone[0]} goes with package", "Write package = ..., or leave it out.")
        return
    if (root / "environments" / name).exists():
        raise UsageError(f"{where}: environments/{name} is there already", "Name it otherwise, or leave package out.")
    if table.num_selection is None:
        raise UsageError(f"{where} has no num_selection", "Write how many tasks decide: num_selection = 200.")
    low, high = table.reward_range
    if not -1e9 <= low < high <= 1e9:
        raise UsageError(f"{where}: reward_range = [{low:g}, {high:g}]", "Write [lowest, highest].")


def check_args(where: str, args: dict[str, Any]) -> None:
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


def versions(requirements: Sequence[str]) -> tuple[tuple[str, ...], str]:
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

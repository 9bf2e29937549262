"""The copy of the environments that prime-rl's processes import, and what their tasksets require there."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from nightshift.rules import TASKSET_FOLDERS, Rules

_TRAINING = """from nightshift_gsm8k.harness import ChatHarness
from nightshift_taskset.training import training_set

__all__ = ["ChatHarness", "TrainingSet"]
"""


def environment_files(root: Path, rules: Rules) -> dict[str, bytes]:
    """What runs need on PYTHONPATH, by name: packages, but for compiled files. Other environments may come and go. Of
    somebody's taskset prime-rl gets the training set, by a package that is written here."""
    folders = {folder for one in rules.environments for folder in (TASKSET_FOLDERS if one.taskset else one.folders)}
    packages = [path.parent for folder in folders for path in (root / folder).glob("*/__init__.py")]
    written = {}
    for one in rules.environments:
        if one.taskset is not None:
            packages.append(one.taskset.place(root))
            packages += [path.parent for beside in one.taskset.beside(root) for path in beside.glob("*/__init__.py")]
            named = {name: getattr(one, name) for name in ("args", "num_selection", "num_train")}
            spec = asdict(one.taskset) | named
            text = f"{_TRAINING}TrainingSet = training_set({spec!r})\n"
            written[f"{one.package}/__init__.py"] = text.encode()
    return files_of(packages) | written


def write_copy(folder: Path, root: Path, rules: Rules) -> None:
    """The files as they are now, below `folder` by the hash of their bytes; never a link to files that may change."""
    files = environment_files(root, rules)
    target = folder / environments_hash(files)
    temporary = target.with_name(f"{target.name}.tmp")
    for place in (temporary, target):
        shutil.rmtree(place, ignore_errors=True)
    for name, data in files.items():
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).write_bytes(data)
    temporary.replace(target)


def environments_hash(files: Mapping[str, bytes]) -> str:
    """16 hex digits over their names and bytes."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16]


def files_of(packages: Sequence[Path]) -> dict[str, bytes]:
    """Their files by name."""
    return {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def missing(rules: Rules, site_packages: Path) -> Iterator[str]:
    """`name==version` of what environments require and one of Python does not have; of ours in that version."""
    for one in rules.environments:
        for version in one.versions:
            name, _, wanted = version.partition("==")
            there = {found.version for found in metadata.distributions(name=name, path=[str(site_packages)])}
            if not there or not (one.taskset or wanted in there):
                yield version

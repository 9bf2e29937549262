"""The model that rules.toml names: a folder, whose bytes are hashed, or a commit on the hub."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from nightshift.errors import UsageError
from nightshift.rules import RULES_NAME

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def placed(root: Path, model: str) -> str:
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

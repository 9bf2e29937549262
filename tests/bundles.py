"""Bundles of a campaign with one keep, made by stand-ins; and bundles that were taken apart and put together."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.chain import sha256
from nightshift.experiment import run_experiment
from nightshift.export.archive import as_archive
from nightshift.export.private import Private
from nightshift.export.story import Story
from nightshift.request import Request
from nightshift.setup import Setup
from tests.conftest import git
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_setup import furnish, make_setup
from tests.stand_ins import small
from tests.waiting import HANG_SECONDS

RULES = replace(
    small(ARITHMETIC_TRL), budget_seconds=1.0, startup_seconds=HANG_SECONDS, evaluation_seconds=HANG_SECONDS
)
GOOD, POOR = "3e-6", "6e-7"


def write(setup: Setup, lr: str) -> None:
    source = f"max_steps = 3\n[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = {lr}\n"
    (setup.root / "train.toml").write_text(source)


def make_kept(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """A campaign with one keep."""
    furnish(checkout)
    setup = make_setup(checkout, RULES, monkeypatch)
    write(setup, POOR)
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline config")
    run_experiment(Request(), setup)
    write(setup, GOOD)
    assert run_experiment(Request(), setup).status == "keep"
    return setup


def bundled(setup: Setup, name: str = "it.tar.gz") -> Path:
    story = Story.of(setup.ledger, None, setup.repo.head().branch)
    path = setup.root.parent / name
    path.write_bytes(as_archive(story, setup.root, Private(setup.root, {}), name))
    return path


Files = dict[str, bytes]


def unpacked(path: Path) -> Files:
    with tarfile.open(path) as archive:
        return {info.name: (archive.extractfile(info) or io.BytesIO()).read() for info in archive.getmembers()}


def packed(path: Path, files: Files, *extra: tarfile.TarInfo, form: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w:gz", format=form) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in extra:
            archive.addfile(info, io.BytesIO(bytes(info.size)) if info.isreg() else None)
    return path


def with_manifest(files: Files, change: Callable[[dict[str, Any]], object]) -> Files:
    manifest = json.loads(files["manifest.json"])
    change(manifest)
    return files | {"manifest.json": json.dumps(manifest).encode()}


def with_file(files: Files, name: str, data: bytes) -> Files:
    """A file changed, and its hash with it."""
    return with_manifest(files | {name: data}, lambda manifest: manifest["files"].update({name: sha256(data)}))

"""Bundles of a campaign with one keep, made by stand-ins; and bundles that were taken apart and put together."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
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
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_setup import keep, make_poor
from tests.stand_ins import quick

RULES = quick(ARITHMETIC_TRL)


def make_kept(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """A campaign with one keep."""
    setup = make_poor(checkout, RULES, monkeypatch)
    run_experiment(Request(), setup)
    return keep(setup)


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

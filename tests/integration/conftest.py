"""Fixtures that several files of whole processes share."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightshift.engines.prime_rl.install import SUBMODULES
from tests.checkouts import ROOT
from tests.conftest import git
from tests.night_checkout import BASELINE, furnish, leftovers
from tests.waiting import wait_for

ORG = "PrimeIntellect-ai"


@pytest.fixture
def root(checkout: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A checkout that run.py and a night can run in, and afterwards no process that names it.

    Its train.toml is the BASELINE of the module, if that has one.
    """
    yield furnish(checkout, getattr(request.module, "BASELINE", BASELINE))
    for process in leftovers(checkout):
        process.kill()
    wait_for(lambda: not leftovers(checkout), "the end of its processes")


def with_stand_in_uv(folder: Path, mode: str) -> dict[str, str]:
    """The variables of a user with an empty home whose uv is stand_in_uv.py."""
    programs, home = folder / "programs", folder / "home"
    programs.mkdir()
    home.mkdir()
    (programs / "uv").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests" / "stand_in_uv.py"} "$@"\n')
    (programs / "uv").chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),
        "UV_STAND_IN": mode,
        "UV_STAND_IN_LOG": str(folder / "uv.log"),
        # As a user's own settings by variables, which must reach git beside ours: submodules from local folders.
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "protocol.file.allow",
        "GIT_CONFIG_VALUE_0": "always",
    }


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """prime-rl and four submodules, which .gitmodules names by SSH addresses of GitHub; and prime-rl's commit."""
    folder = tmp_path_factory.mktemp("upstream")
    for name in ("prime-rl", *(f"{Path(path).name}.git" for path in SUBMODULES)):
        repository = folder / ORG / name
        repository.mkdir(parents=True)
        git(repository, "init", "--quiet", "--initial-branch", "main")
        (repository / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
        git(repository, "add", "--all")
        git(repository, "commit", "--quiet", "-m", "pinned")
    main = folder / ORG / "prime-rl"
    modules = ""
    for path in SUBMODULES:
        name = Path(path).name
        commit = git(folder / ORG / f"{name}.git", "rev-parse", "HEAD").strip()
        git(main, "update-index", "--add", "--cacheinfo", f"160000,{commit},{path}")
        modules += f'[submodule "{name}"]\n\tpath = {path}\n\turl = git@github.com:{ORG}/{name}.git\n'
        (folder / ORG / f"{name}.git" / "later.txt").write_text("after the pin\n")
        git(folder / ORG / f"{name}.git", "add", "--all")
        git(folder / ORG / f"{name}.git", "commit", "--quiet", "-m", "later")
    (main / ".gitmodules").write_text(modules)
    git(main, "add", ".gitmodules")
    git(main, "commit", "--quiet", "-m", "submodules")
    commit = git(main, "rev-parse", "HEAD").strip()
    (main / "later.txt").write_text("after the pin\n")
    git(main, "add", "later.txt")
    git(main, "commit", "--quiet", "-m", "later")
    return folder, commit

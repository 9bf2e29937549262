"""Code that git does not see and Python would run."""

import importlib.util
import marshal
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.experiment.integrity import top_modules, untracked_code

TRACKED = (
    "nightshift/__init__.py",
    "nightshift/campaign/decision.py",
    "environments/one/pkg/__init__.py",
    "train.toml",
)
FROZEN = ("nightshift/", "nightshift/campaign/", "environments/one/")


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for name in TRACKED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("KEEP = False\n")
    return tmp_path


def plant(top: Path, name: str) -> None:
    (top / name).parent.mkdir(parents=True, exist_ok=True)
    (top / name).write_text("KEEP = True\n")


@pytest.mark.parametrize(
    "name",
    [
        "nightshift/decision/__init__.py",
        "nightshift/decision.abi3.so",
        "nightshift/campaign/decision.pyc",
        "nightshift/deep/er/module.py",
        "environments/one/pkg/scoring.py",
        "environments/one/sitecustomize.py",
        *("sitecustomize.py", "usercustomize.py", "sitecustomize/__init__.py", "pkg/__init__.py", "wandb.py"),
    ],
)
def test_an_untracked_module_among_the_code_or_preferred_to_it_is_named(top: Path, name: str) -> None:
    plant(top, name)
    assert untracked_code(top, TRACKED, FROZEN) == [name]


def test_a_link_among_the_code_is_named(top: Path) -> None:
    (top / "nightshift" / "decision").symlink_to(top / "environments")
    assert untracked_code(top, TRACKED, FROZEN) == ["nightshift/decision"]


def test_notes_caches_own_programs_and_other_environments_are_free(top: Path) -> None:
    for name in (
        "nightshift/notes.md",
        "environments/two/pkg/__init__.py",
        "tests/test_mine.py",
    ):
        plant(top, name)
    py_compile.compile(str(top / "nightshift" / "campaign" / "decision.py"))
    plant(top, "nightshift/__pycache__/gone.cpython-311.pyc")  # of no source: never loaded
    assert untracked_code(top, TRACKED, FROZEN) == []


def test_what_can_be_imported_from_the_top_is_known(top: Path) -> None:
    for name in ("wandb.py", "fast.abi3.so", "IPython/__init__.py", "notes.txt", "runs/0001/x.py"):
        plant(top, name)
    names = ["IPython/__init__.py", "fast.abi3.so", "nightshift/__init__.py", "wandb.py"]
    assert [path.relative_to(top).as_posix() for path in top_modules(top)] == names


def test_a_checkout_whose_code_is_not_tracked_is_left_alone(top: Path) -> None:
    plant(top, "nightshift/decision/__init__.py")
    assert untracked_code(top, ["train.toml"], FROZEN) == []


def forge(source: Path, flags: int = 0) -> Path:
    """Bytecode of another module with the header that fits `source`."""
    status, path = source.stat(), Path(importlib.util.cache_from_source(str(source)))
    stamp = int(status.st_mtime).to_bytes(4, "little") + status.st_size.to_bytes(4, "little")
    if flags & 2:
        stamp = importlib.util.source_hash(source.read_bytes())
    code = marshal.dumps(compile("KEEP = True\n", str(source), "exec"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(importlib.util.MAGIC_NUMBER + flags.to_bytes(4, "little") + stamp + code)
    return path


def value_in_python(top: Path) -> str:
    code = "from nightshift.campaign import decision; print(decision.KEEP)"
    return subprocess.run([sys.executable, "-c", code], cwd=top, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("flags", [0, 1, 3])
def test_forged_bytecode_that_python_loads_is_named_whole_and_torn(top: Path, flags: int) -> None:
    path = forge(top / "nightshift" / "campaign" / "decision.py", flags)
    assert untracked_code(top, TRACKED, FROZEN) == [path.relative_to(top).as_posix()]
    assert value_in_python(top) == "True\n"  # what the check is for
    path.write_bytes(path.read_bytes()[:20])
    assert untracked_code(top, TRACKED, FROZEN) == [path.relative_to(top).as_posix()]


def test_bytecode_that_python_does_not_load_or_that_is_honest_is_free(top: Path) -> None:
    source = top / "nightshift" / "campaign" / "decision.py"
    forge(source)
    os.utime(source, (1, 1))
    assert untracked_code(top, TRACKED, FROZEN) == []
    assert value_in_python(top) == "False\n"
    for mode in py_compile.PycInvalidationMode:
        py_compile.compile(str(source), invalidation_mode=mode)
        assert untracked_code(top, TRACKED, FROZEN) == []

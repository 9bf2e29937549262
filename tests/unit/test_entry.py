"""Where processes begin: whose nightshift they load, and what can be imported beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nightshift import entry

TELL = """
import importlib.util, json, os, sys
import nightshift
found = {name: importlib.util.find_spec(name) is not None for name in ("trackio", "brotli", "peft")}
loader = sorted(name for name in os.environ if name.startswith("LD_"))
print(json.dumps([nightshift.__file__, sys.path, found, loader, sys.pycache_prefix, sys.argv[1:]]))
"""


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A checkout whose top holds names that libraries import if they are there."""
    top = tmp_path / "checkout"
    (top / "nightshift").mkdir(parents=True)
    (top / "nightshift" / "__init__.py").touch()
    shutil.copy(str(entry.__file__), top / "nightshift" / "entry.py")
    for name in ("trackio.py", "brotli.py", "json.py"):
        (top / name).write_text("raise SystemExit('an agent ran')\n")
    (top / "peft").mkdir()
    (top / "tell.py").write_text(TELL)
    return top


def told(top: Path, **variables: str) -> Any:
    command = [sys.executable, "-I", str(top / "nightshift" / "entry.py"), str(top / "tell.py"), "word"]
    environment = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(command, cwd=top, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("is_link", [False, True])
def test_a_process_loads_its_own_nightshift_and_nothing_else_of_the_checkout(top: Path, is_link: bool) -> None:
    if is_link:  # the same bytes elsewhere: then the top that Python knows is not the one that holds the code
        (top / "nightshift").rename(top.parent / "moved")
        (top / "nightshift").symlink_to(top.parent / "moved")
    place, path, found, _, _, words = told(top)
    assert place == str(top / "nightshift" / "__init__.py")
    assert str(top) not in path
    assert found == {"trackio": False, "brotli": False, "peft": False}
    assert words == ["word"]


def test_the_top_is_no_place_for_libraries_though_the_environment_names_it(top: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "nightshift.pth").write_text(f"{top}\n")
    command = [tmp_path / "venv" / "bin" / "python", "-I", top / "nightshift" / "entry.py", top / "tell.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    place, path, found, _, compiled, _ = json.loads(done.stdout)
    assert place == str(top / "nightshift" / "__init__.py")
    assert str(top) not in path
    assert not any(found.values())
    assert compiled == str(tmp_path / "venv" / "compiled")  # code that lies beside a source is not read
    assert list((tmp_path / "venv" / "compiled").rglob("__init__*.pyc"))
    assert not list(top.rglob("*.pyc"))


def test_of_the_loaders_variables_only_the_search_path_goes_on(top: Path) -> None:
    variables = {"LD_BIND_NOW": "1", "LD_LIBRARY_PATH": "/nowhere", "LD_AUDIT": "", "LD_PRELOAD": ""}
    assert told(top, **variables)[3] == ["LD_LIBRARY_PATH"]


@pytest.mark.parametrize(
    "name", ["uuid.py", "typing.py", "importlib/__init__.py", "click.py", "nightshift/__init__.py"]
)
def test_pythonpath_chooses_nothing_for_the_command(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nraise SystemExit('an agent ran')\n")
    program = Path(sys.executable).with_name("nightshift")
    code = program.read_text().partition("\n")[2]
    assert "from nightshift.entry import main" in code
    done = subprocess.run(
        [program, "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if name.startswith("nightshift"):  # another package of that name, before ours: not this program at all
        assert "an agent ran" in done.stderr
        return
    assert (done.returncode, (tmp_path / "marker").exists()) == (0, False), done.stderr
    assert done.stdout.startswith("Usage: nightshift ")

"""What the commands import: nothing of foreign PYTHONPATH folders; and what their children get."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.executors import process
from nightshift.executors.process import python_command, python_environment
from tests import stand_in_campaign
from tests.checkouts import ROOT
from tests.conftest import slow

SHOW = "import json, os, signal, sys; from nightshift.startup import begin; begin(); "


def run(command: list[str], cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["enum.py", "click.py", "importlib_metadata/__init__.py"])
@pytest.mark.parametrize("command", ["nightshift", slow("run.py"), slow("prepare.py")])
def test_a_folder_that_module_load_put_on_pythonpath_hides_nothing(tmp_path: Path, command: str, name: str) -> None:
    marker = tmp_path / "marker"
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit('a foreign module ran')\n")
    words = [shutil.which("nightshift") or ""] if command == "nightshift" else [sys.executable, str(ROOT / command)]
    done = run([*words, "--help"], tmp_path, PYTHONPATH=f":{tmp_path}")  # Python reads "" as the working folder
    assert (done.returncode, marker.exists()) == (0, False), done.stderr
    assert done.stdout.startswith("Usage: ")


def test_the_own_folders_of_this_python_stay_on_the_path_and_the_checkout_comes_last(tmp_path: Path) -> None:
    libraries = next(folder for folder in sys.path if folder.endswith("site-packages"))
    named = os.pathsep.join([str(tmp_path), "", libraries, str(ROOT)])
    done = run([sys.executable, "-c", f"{SHOW}print(json.dumps(sys.path))"], PYTHONPATH=named)
    path = json.loads(done.stdout)
    assert str(tmp_path) not in path
    assert libraries in path
    assert path.index(str(ROOT)) == len(path) - 1


@pytest.mark.parametrize("name", ["types.py", "psutil.py"])
def test_nothing_at_the_top_of_the_checkout_or_in_a_variable_hides_a_library_of_a_child(tmp_path, monkeypatch, name):
    (tmp_path / "nightshift").symlink_to(ROOT / "nightshift")
    (folder := tmp_path / "elsewhere").mkdir()
    for path in (tmp_path / name, folder / name, folder / "nightshift.py"):
        path.write_text("raise SystemExit('a note was taken for a library')\n")
    monkeypatch.setattr(process, "CHECKOUT", str(tmp_path))
    injecting = dict.fromkeys(("LD_PRELOAD", "LD_AUDIT", "PYTHONSTARTUP", "PYTHONHOME"), "")
    base = {**os.environ, **injecting, "PYTHONPATH": str(folder), "LD_LIBRARY_PATH": "/nowhere"}
    environment = python_environment(base, {})
    assert not injecting.keys() & environment.keys()
    assert environment["LD_LIBRARY_PATH"] == "/nowhere"
    command = python_command("-m", "nightshift.experiment.worker")
    child = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert "a note was taken" not in child.stderr
    assert f"{tmp_path}/nightshift/experiment/worker.py" in child.stderr
    assert "IndexError" in child.stderr  # the worker began: it has no arguments


# Executes the first argument, then runs the program in the second one, as Python does.
BARE = """
import os, runpy, sys
_, preparation, *sys.argv = sys.argv
sys.path[0] = os.path.dirname(sys.argv[0])
exec(preparation)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("program", ["run.py", "prepare.py"])
@pytest.mark.parametrize(
    ("preparation", "problem"),
    [
        ("sys.version_info = (3, 8, 18)", "is Python 3.8; Nightshift needs 3.11 or newer"),
        ("", "has no package nightshift"),
        ("sys.path.append('packages')", "has no package tomlkit"),
    ],
)
def test_a_python_without_packages_is_refused_with_the_command(tmp_path, program, preparation, problem) -> None:
    metadata = tmp_path / "packages" / "nightshift-1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    requires = "Requires-Dist: scipy==1; extra == 'search'\nRequires-Dist: tomlkit==1\n"
    metadata.write_text(f"Name: nightshift\nVersion: 1\n{requires}")
    command = [sys.executable, "-S", "-c", BARE, preparation, str(ROOT / program), "--help"]
    for variables, words in (({}, "uv run"), ({"UV_NO_SYNC": "1"}, "env -u UV_NO_SYNC uv run")):
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        line = f"{sys.executable} {problem}. Run: {words} {program} (to install uv: pip install uv)\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.parametrize("name", ["run.py", "prepare.py", "nightshift/__init__.py", "nightshift/startup.py"])
def test_an_old_python_can_read_the_files_that_refuse_it(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(), feature_version=(3, 6))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]


# Runs a program with its arguments; at its end, says which of the modules in the first argument it has imported.
WATCH = """
import atexit, runpy, sys
heavy, program, *sys.argv = sys.argv[1].split(","), sys.argv[2], *sys.argv[2:]
atexit.register(lambda: print("HEAVY", [name for name in heavy if name in sys.modules], file=sys.stderr))
sys.path.insert(0, "")
runpy.run_path(program, run_name="__main__")
"""
BAD = b"[trainer.optim]\nlrr = 1e-6\n"
HEAVY = (
    *("torch", "transformers", "trl", "verifiers", "datasets", "vllm", "accelerate"),
    *("matplotlib", "vl_convert", "optuna", "scipy", "sklearn", "pandas", "pyarrow"),
)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a campaign of four experiments and a train.toml that is refused."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("nightshift", "environments", "models", "pyproject.toml"):
        (root / name).symlink_to(ROOT / name)
    for name in ("run.py", "prepare.py", "rules.toml"):
        shutil.copy(ROOT / name, root / name)
    (root / "train.toml").write_bytes(BAD)
    stand_in_campaign.build(root, 4, with_files=False)
    return root


@pytest.mark.parametrize("command", ["status", ""])
def test_what_only_looks_or_refuses_imports_nothing_heavy(campaign: Path, command: str) -> None:
    """`nightshift status`, and run.py, which refuses this train.toml."""
    words = [str(shutil.which("nightshift")), command] if command else ["run.py"]
    heavy = HEAVY if command else (*HEAVY, "numpy")
    done = run([sys.executable, "-c", WATCH, ",".join(heavy), *words], campaign)
    assert done.returncode == (0 if command else 2), done.stderr
    assert done.stderr.splitlines()[-1] == "HEAVY []"

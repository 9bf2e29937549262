"""`nightshift new environment` and `nightshift doctor --environment`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.config.rules import EnvironmentRules
from nightshift.config.rules_toml import rules_here
from nightshift.errors import EngineError, UsageError
from nightshift.evaluation import environment as environments
from nightshift.evaluation import template
from tests.rules import ROOT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout whose environments may be added to."""
    (tmp_path / "environments").mkdir()
    for path in (ROOT / "environments").iterdir():
        (tmp_path / "environments" / path.name).symlink_to(path)
    for name in ("docs", "models", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "rules.toml").write_text('environments = ["boxes"]\n')
    return tmp_path


@pytest.mark.slow
def test_the_skeleton_passes_its_test_and_a_fault_breaks_a_rule(root: Path) -> None:
    for name, check in (("faultless", "== answer"), ("faulty", "== f'+{answer}'")):
        template.create(root, name)
        path = root / "environments" / name / f"nightshift_{name}" / "scoring.py"
        assert path.read_text().count("== answer") == 1
        path.write_text(path.read_text().replace("== answer", check))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-c", "/dev/null", "-p", "no:cacheprovider", "--tb=no"]
    command += map(str, root.glob("environments/fault*/test_*.py"))
    variables = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.run(command, capture_output=True, text=True, cwd=root, env=variables)
    failed = re.findall(r"(?:FAILED|ERROR) \S*/test_(\w+)\.py::TestEnvironment::test_(\w+)", process.stdout)
    assert failed == [("faulty", "right_answers_score_1")], process.stdout + process.stderr


def test_the_skeleton_is_an_environment_and_doctor_shows_a_task_and_what_it_pays(root, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    lines = template.create(root, "boxes")
    assert "uv run nightshift doctor --environment boxes" in "\n".join(lines)
    rules = rules_here(root, None, 0)
    assert (rules.name, rules.model) == ("boxes-trl", "models/arithmetic-base")
    assert rules_here(root, "prime-rl", 2).name == "boxes-prime-rl"
    folder = root / "environments" / "boxes"
    assert "NAME" not in "".join(path.read_text() for path in folder.rglob("*.*"))
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
        process = subprocess.run([*command, str(folder)], capture_output=True, text=True, cwd=root)
        assert process.returncode == 0, process.stdout + process.stderr
    size, chat, empty, right = template.look(root, "boxes")
    assert size.startswith("boxes: 800 training examples, 400 for validation, 400 for test; loaded in ")
    assert chat.startswith("user: Mia has ")
    assert empty.startswith("an empty text (''): score 0.000 over 20 tasks, ")
    assert re.match(r"its answer \('.*'\): score 1\.000 over 20 tasks, ", right)


@pytest.mark.slow
def test_the_skeleton_of_two_turns_passes_its_test_and_doctor_loads_it(root: Path) -> None:
    lines = "\n".join(template.create(root, "pens", has_turns=True)).splitlines()
    table = lines[lines.index("[environment.pens]") :][:4]
    (root / "rules.toml").write_text("\n".join(table))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-c", "/dev/null", "-p", "no:cacheprovider"]
    process = subprocess.run([*command, str(root / "environments" / "pens")], capture_output=True, text=True)
    assert "4 passed" in process.stdout, process.stdout + process.stderr
    (size,) = template.look(root, "pens")
    assert size.startswith("pens: 600 training examples, 200 for validation, 200 for test; loaded in ")


@pytest.mark.parametrize(
    ("file", "code", "line"),
    [
        ("data.py", "x = 1\ndef load(:\n", "SyntaxError: "),
        ("scoring.py", "import sys\nsys.exit(0)\n", "PLACE/scoring.py:2: SystemExit: 0"),
        ("scoring.py", "def score(text, answer):\n    return 1 / 0\n", "PLACE/scoring.py:2: "),
        ("data.py", "def load(split, size):\n    raise ValueError('no x.json. Fetch it')\n", "no x.json. Fetch it"),
    ],
)
def test_a_fault_of_a_package_is_one_line_with_its_place_and_its_own_refusal_stays(root, file, code, line, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "faulty"
    template.create(root, name)
    (root / f"environments/{name}/nightshift_{name}" / file).write_text(code)
    start = line.replace("PLACE", f"environments/{name}/nightshift_{name}")
    with pytest.raises(EngineError, match=f"^{re.escape(start)}") as refused:
        list(template.look(root, name))
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2
    for module in [module for module in sys.modules if module.startswith(f"nightshift_{name}")]:
        del sys.modules[module]


@pytest.mark.parametrize("name", ["", "A", "1st", "a-b", "a/b", "..", "x" * 41, "gsm8k", "taskset"])
def test_a_name_that_is_none_or_taken_is_refused(root: Path, name: str) -> None:
    before = sorted(root.rglob("*"))
    with pytest.raises(UsageError, match=r"is not a valid name|exists"):
        template.create(root, name)
    assert sorted(root.rglob("*")) == before


def package(folder: Path, name: str) -> Path:
    """A package as an environment has it, in `folder`."""
    (folder / name).mkdir(parents=True)
    for module, text in {"__init__": "", "data": "PROMPT_TOKENS = 7", "scoring": ""}.items():
        (folder / name / f"{module}.py").write_text(text)
    return folder / name


def test_folders_come_last_on_the_path_and_a_package_from_elsewhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("one", "two"):
        package(tmp_path / "environments" / name, f"nightshift_{name}")
    (one,) = environments.load(tmp_path, [EnvironmentRules("one", 1)])
    assert (one.prompt_tokens, sys.path[-1]) == (7, str(tmp_path / "environments" / "one"))
    sys.path.insert(0, str(package(tmp_path / "elsewhere", "nightshift_two").parent))
    with pytest.raises(UsageError, match=f"Python imports nightshift_two from {tmp_path / 'elsewhere'}"):
        environments.load(tmp_path, [EnvironmentRules("two", 1)])
    with pytest.raises(UsageError, match=r"nightshift_three is not a package\. Restore it: git checkout env"):
        environments.load(tmp_path, [EnvironmentRules("three", 1)])

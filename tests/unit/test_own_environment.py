"""`nightshift new environment` and `nightshift doctor --environment`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.config.rules_toml import rules_here
from nightshift.errors import EngineError, UsageError
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


# By the only test of the contract that each fault may break: the file of the skeleton, a text in it, the fault.
FAULTS = {
    "no_problem_is_in_two_splits": ("data.py", '("loses", -1)', '("buys", 1.0)'),  # each question twice
    "every_key_is_unique": (
        "data.py",
        "    return found\n",
        "    return [Example(str(i), one.question, one.answer) for i, one in enumerate(found)]\n",
    ),
    "right_answers_score_1": ("scoring.py", "== answer", "== f'+{answer}'"),
    "wrong_and_hostile_answers_score_0": ("scoring.py", "(text) == answer", "(text or '0').startswith(answer)"),
    "an_episode_without_an_answer_scores_as_an_empty_text": ("data.py", '"role": "user"', '"role": "assistant"'),
    "another_process_loads_the_same_bytes": ("data.py", "example: example.key)", "example: hash(example.key))"),
    "a_smaller_set_is_part_of_the_larger": ("data.py", "found[:size]", "found[-(size or 0) :]"),
    "a_set_that_is_not_there_is_refused_in_one_line": ("data.py", "not 0 < size <= len(found)", "size < 1"),
    "another_seed_trains_on_no_held_out_problem": (
        "data.py",
        "(example.key) == split",
        "(example.key) == split or seed",
    ),
}


@pytest.mark.slow
def test_the_skeleton_passes_its_test_and_each_fault_breaks_one_rule(root: Path) -> None:
    template.create(root, "faultless")
    for number, (file, text, fault) in enumerate(FAULTS.values()):
        name = f"fault_{number}"
        template.create(root, name)
        folder = root / "environments" / name
        path = folder / f"nightshift_{name}" / file
        assert path.read_text().count(text) == 1
        path.write_text(path.read_text().replace(text, fault))
        if "hash(" not in fault:  # the rule that costs a process
            with (folder / f"test_{name}.py").open("a") as test:
                test.write("    test_another_process_loads_the_same_bytes = None\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-c", "/dev/null", "-p", "no:cacheprovider", "--tb=no"]
    command += map(str, root.glob("environments/fault*/test_*.py"))
    variables = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.run(command, capture_output=True, text=True, cwd=root, env=variables)
    failed = re.findall(r"(?:FAILED|ERROR) \S*/test_(\w+)\.py::TestEnvironment::test_(\w+)", process.stdout)
    expected = [(f"fault_{number}", rule) for number, rule in enumerate(FAULTS)]
    expected.append(("fault_0", "another_seed_trains_on_no_held_out_problem"))  # what is in two splits is held out
    assert sorted(failed) == sorted(expected), process.stdout + process.stderr


def test_the_skeleton_is_an_environment(root: Path) -> None:
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


def test_doctor_shows_a_task_and_what_it_pays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    template.create(root, "boxes")
    lines = list(template.look(root, "boxes", clock=lambda: 0.0))
    assert lines[0] == "boxes: 800 training examples, 400 for validation, 400 for test; loaded in 0.0 s"
    assert lines[1].startswith("user: Mia has ")
    assert lines[2] == "an empty text: score 0.000 over 20 tasks, 0.0 ms each"
    assert lines[3].startswith("its answer ('")
    assert lines[3].endswith("'): score 1.000 over 20 tasks, 0.0 ms each")


@pytest.mark.parametrize(
    ("file", "code", "line"),
    [
        ("data.py", "x = 1\ndef load(:\n", "data.py:2: SyntaxError: "),
        ("data.py", "raise OSError('no disk')\n", "data.py:1: OSError: no disk"),
        ("scoring.py", "import sys\nsys.exit(0)\n", "scoring.py:2: SystemExit: 0"),
        ("scoring.py", "def score(text, answer):\n    return 1 / 0\n", "scoring.py:2: "),
        ("data.py", "PROMPT_TOKENS = 1\ndef load(split, size):\n    return len(split)['x']\n", "data.py:3: "),
    ],
)
def test_a_fault_of_a_package_is_one_line_with_its_place(root, file, code, line, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "faulty"
    template.create(root, name)
    (root / f"environments/{name}/nightshift_{name}" / file).write_text(code)
    with pytest.raises(EngineError, match=rf"^environments/{name}/nightshift_{name}/{re.escape(line)}") as refused:
        list(template.look(root, name))
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2
    for module in [module for module in sys.modules if module.startswith(f"nightshift_{name}")]:
        del sys.modules[module]


def test_a_weight_of_an_environment_that_is_not_chosen_is_named_with_its_line(root: Path) -> None:
    template.create(root, "boxes")
    (root / "rules.toml").write_text('environments = ["boxes"]\n\n[environment.arithmetic]\nweight = 2.0\n')
    with pytest.raises(UsageError, match=r"rules\.toml:4: a weight of arithmetic, which is not one of environments"):
        list(template.look(root, "boxes"))


@pytest.mark.parametrize("name", ["", "A", "1st", "a-b", "a/b", "..", "x" * 41, "gsm8k", "taskset"])
def test_a_name_that_is_none_or_taken_is_refused(root: Path, name: str) -> None:
    before = sorted(root.rglob("*"))
    with pytest.raises(UsageError, match=r"is no name of an environment|is there already"):
        template.create(root, name)
    assert sorted(root.rglob("*")) == before


def test_an_environment_that_cannot_be_had_is_one_line_and_exit_2() -> None:
    for name, cause in (("nowhere", 'environments/ has no "nowhere"'), ("../gsm8k", '"../gsm8k" is no name')):
        argv = ["nightshift", "doctor", "--environment", name]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert cause in done.stderr
        assert done.stderr.count("\n") == 1

"""Imports point one way, without cycles, and importing the package is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nightshift"
# From the top to the bottom, as docs/architecture.md draws it: a module imports what stands further down, and, in a
# folder, its neighbours. Names on one line do not import each other.
LINE = """
    cli
    cli_exports
    command
    shell
    status
    export
    views
    night
    live
    running
    console report
    certify own_environment
    experiment
    baseline
    runs
    setup
    worker
    proposers
    executors
    guard
    evaluation health sealed
    engines
    campaign
    git
    environments
    taskset_environment
    scorer
    train_toml processes
    metrics
    policy
    records
    cost rules_toml
    rules
    decision_rules
    files
    entry errors
    waiting
    text
"""
STEPS = [line.split() for line in LINE.split("\n") if line.strip()]
# Only these are told of the whole set-up; what lies below is given the parts that it needs.
USE_SETUP = {"cli", "command", "night", "certify", "experiment", "baseline", "runs"}
# Child processes of engines: they import nothing of nightshift but these.
CHILDREN = {
    "engines/prime_rl/reader.py": set[str](),
    "engines/prime_rl/validate.py": set[str](),
    "engines/trl/grpo.py": {"engines", "environments"},
    "engines/trl/sampler.py": set[str](),
    "agents/sandbox_entry.py": set[str](),
    "executors/watchdog.py": set[str](),
}
PRINTING = {"cli/output.py", "engines/prime_rl/validate.py"}
HEAVY = ("torch", "transformers", "trl", "verifiers", "datasets", "vllm", "matplotlib", "accelerate", "scipy")


def sources() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def unit_of(name: str) -> str:
    """The step's name of a file: its folder, or itself at the top."""
    return name.partition("/")[0].removesuffix(".py")


def imported(tree: ast.Module) -> set[str]:
    """Dotted modules of nightshift that a file imports, anywhere in it, but for type checking."""
    found = set()
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {inner for guard in guards for inner in ast.walk(guard)}
    for node in set(ast.walk(tree)) - skipped:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("nightshift.") for name in found if name.startswith("nightshift.")}


def test_every_file_has_a_place() -> None:
    assert {unit_of(name) for name in sources()} == {name for step in STEPS for name in step} | {"__init__"}


def test_imports_point_down_only() -> None:
    rank = {name: number for number, step in enumerate(STEPS) for name in step}
    for name, tree in sources().items():
        unit = unit_of(name)
        for module in imported(tree) if unit != "__init__" else ():
            other = module.partition(".")[0]
            assert other in (unit, "__init__") or rank[other] > rank[unit], f"{name} imports {module}"
            assert other != "setup" or unit in USE_SETUP, f"{name} imports {module}"


def test_no_two_files_import_each_other() -> None:
    """Also not in a circle: a file can be read after those that it imports."""
    trees = sources()
    names = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): name for name in trees}

    def imports(name: str) -> set[str]:
        found = {module for path in imported(trees[names[name]]) for module in (path, path.rpartition(".")[0])}
        return {module for module in found if module in names and module != name}

    graph = {name: imports(name) for name in names if name != "__init__"}
    while free := {name for name, below in graph.items() if not below & graph.keys()}:
        graph = {name: below for name, below in graph.items() if name not in free}
    assert graph == {}


@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_process_imports_nothing_else_of_the_harness(child: str) -> None:
    assert {module.partition(".")[0] for module in imported(sources()[child])} <= CHILDREN[child]


@pytest.mark.parametrize(
    "module",
    [
        "nightshift",
        "nightshift.experiment.setup",
        "nightshift.cli.main",
        "nightshift.experiment.experiment",
        "nightshift.experiment.worker",
    ],
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_two_test_files_have_one_name() -> None:
    """pytest takes the second for the first, and collects neither."""
    names = sorted(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert names == sorted(set(names))


def test_only_the_console_prints() -> None:
    for name, tree in sources().items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        prints = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert not prints or name in PRINTING, name

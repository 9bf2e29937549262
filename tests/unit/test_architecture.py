"""Imports point one way between folders."""

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nightshift"
# From the top to the bottom, as docs/architecture.md draws it: a module imports from its own folder and from what is
# further down. What is at the bottom imports nothing of the folders.
FOLDERS = (
    "cli", "night", "report", "agents", "experiment", "engines", "evaluation", "executors", "campaign", "config",
)  # fmt: skip
BOTTOM = {"errors", "files", "text", "waiting", "startup"}
RANK = {name: number for number, name in enumerate(FOLDERS)} | dict.fromkeys(BOTTOM, len(FOLDERS))
USE_SETUP = {"cli", "night", "experiment"}  # what lies below is given the parts of the set-up that it needs
# Child processes of engines: they import nothing of nightshift but these.
CHILDREN = {
    "engines/prime_rl/reader.py": (),
    "engines/prime_rl/validate.py": (),
    "engines/trl/grpo.py": ("engines.trl", "evaluation.environment"),
    "engines/trl/sampler.py": (),
    "executors/network.py": (),
}


@cache
def sources() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def unit_of(name: str) -> str:
    """The folder of a file, or the file itself at the top."""
    return name.partition("/")[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    """Dotted modules of nightshift that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("nightshift.") for name in found if name.startswith("nightshift.")}


def at_run_time(tree: ast.Module) -> ast.Module:
    """The file without what only type checkers read."""
    body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return ast.Module(body, [])


def test_every_file_has_a_place() -> None:
    assert {unit_of(name) for name in sources()} == RANK.keys() | {"__init__"}


def test_imports_point_down_only() -> None:
    for name, tree in sources().items():
        unit = unit_of(name)
        for module in imported(tree) if unit != "__init__" else ():
            other = unit_of(module.replace(".", "/"))
            assert other in (unit, "__init__") or RANK[other] > RANK[unit] or {unit, other} <= BOTTOM, (
                f"{name} imports {module}"
            )
            assert not module.startswith("experiment.controller") or unit in USE_SETUP, f"{name} imports {module}"


@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_process_imports_nothing_else_of_the_harness(child: str) -> None:
    modules = imported(at_run_time(sources()[child]))
    assert not {
        module for module in modules if not f"{module}.".startswith(tuple(f"{name}." for name in CHILDREN[child]))
    }

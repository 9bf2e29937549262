"""Imports point down only, and importing the package is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nightshift"
# From the bottom to the top: a module may import those above it in this list only.
LAYERS = [
    "errors",
    "records",
    "campaign.lineage",
    "metrics",
    "trends",
    "health",
    "processes.gpus",
    "rules",
    "train_toml.values",
    "train_toml.text",
    "train_toml.locks",
    "train_toml.keys",
    "train_toml.checks",
    "train_toml.config",
    "train_toml.diff",
    "train_toml.edit",
    "night",
    "proposers.boxes",
    "proposers.space",
    "processes.watchdog",
    "processes.supervise",
    "guard.untracked",
    "files",
    "git.repo",
    "campaign.results",
    "campaign.ledger",
    "campaign.noise",
    "campaign.decision",
    "campaign.posterior",
    "campaign.campaign",
    "proposers.history",
    "engines",
    "engines.downloads",
    "engines.doctor",
    "engines.prime_rl.git",
    "engines.prime_rl.installation",
    "engines.prime_rl.installer",
    "engines.prime_rl.metrics",
    "engines.prime_rl.weights",
    "engines.prime_rl.rollouts",
    "engines.prime_rl.server",
    "engines.prime_rl.causes",
    "engines.prime_rl.ports",
    "engines.prime_rl.effective",
    "engines.prime_rl.launch",
    "engines.prime_rl.errors",
    "engines.prime_rl.session",
    "engines.prime_rl.prepare",
    "engines.prime_rl.engine",
    "engines.trl.base_model",
    "engines.trl.engine",
    "evaluation",
    "setup",
    "git.settlement",
    "experiment",
    "certify",
    "certify.looks",
    "certify.certificate",
    "certify.plan",
    "certify.run",
    "report.diff",
    "report.show",
    "report",
    "report.data",
    "report.timing",
    "report.keys",
    "report.labels",
    "report.runs",
    "report.text",
    "report.chart",
    "report.panels",
    "report.png",
    "report.markdown",
    "report.page",
    "campaign.replay",
    "proposers.proposers",
    "guard.seal",
    "guard.surroundings",
    "guard.clone",
    "proposers.brief",
    "proposers.agent",
    "night.interrupt",
    "night.state",
    "night.text",
    "night.loop",
    "night.begin",
    "console",
    "night.command",
    "command",
    "cli",
]
STAND_ALONE = {
    "engines.prime_rl.validator",
    "engines.trl.trainer",
    "engines.trl.sampler",
    "engines.trl.grpo",
}  # child processes: import nothing of nightshift
HEAVY = ("torch", "transformers", "trl", "verifiers", "datasets", "vllm", "matplotlib", "accelerate", "scipy")


def modules() -> dict[str, Path]:
    names = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        names[name.removesuffix(".__init__")] = path
    del names["__init__"]
    return names


def imported(path: Path) -> set[str]:
    """Modules of nightshift that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    known = modules()
    inside = {name.removeprefix("nightshift.") for name in found if name.startswith("nightshift.")}
    return {name for name in inside if name in known}


def test_every_module_has_a_place() -> None:
    assert set(modules()) == set(LAYERS) | STAND_ALONE & set(modules())


def test_imports_point_down_only() -> None:
    for name, path in modules().items():
        below = set() if name in STAND_ALONE else set(LAYERS[: LAYERS.index(name)])
        assert imported(path) <= below, f"{name} imports upwards: {sorted(imported(path) - below)}"


@pytest.mark.parametrize("module", ["nightshift", "nightshift.setup", "nightshift.cli", "nightshift.experiment"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_only_the_console_prints() -> None:
    for name, path in modules().items():
        if name in {"console", *STAND_ALONE}:
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], name

"""The doctor's table: both engines, nothing changed, the exit code that run.py would have for missing parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.engines import Check, PrepareFlags
from nightshift.engines.doctor import ALL, checks, is_ready, table
from nightshift.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL
from tests.unit.test_gpus import Card, StandInNvml
from tests.waiting import cpu_seconds_of_children

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> list[Card]:
    """The GPUs of this machine: none, until a test adds some."""
    nvml = StandInNvml([])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml.cards


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with a good train.toml."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("environments", "models", "pyproject.toml"):
        (checkout / name).symlink_to(ROOT / name)
    (checkout / "rules.toml").write_bytes((ROOT / "rules.toml").read_bytes())
    (checkout / "train.toml").write_bytes(b"[orchestrator]\nbatch_size = 64\ngroup_size = 8\n")
    return checkout


def names(found: list[Check], engine: str, ok: bool) -> list[str]:
    return [check.name for check in found if check.engine == engine and check.ok is ok]


def test_a_laptop_is_ready_for_the_embedded_engine_and_sees_what_prime_rl_lacks(root: Path, tmp_path: Path) -> None:
    found = checks(root, ARITHMETIC_TRL, {"XDG_CACHE_HOME": str(tmp_path)}, PrepareFlags())
    assert names(found, ALL, ok=True) == ["train.toml"]
    assert names(found, "trl", ok=False) == []
    assert {"GPUs", "checkout"} <= set(names(found, "prime-rl", ok=False))
    assert is_ready(found, "trl")
    assert not is_ready(found, "prime-rl")
    assert [check for check in found if not check.ok and "Run" not in str(check.problem)] == []  # each has its fix
    lines = table(found, ARITHMETIC_TRL).splitlines()
    assert lines[-1] == "ready: --engine trl (arithmetic-trl), which this machine would use"
    assert {line[24:33].strip() for line in lines[:-1]} == {"ok", "PROBLEM"}  # aligned
    assert list(tmp_path.iterdir()) == [root]  # nothing was made


def test_two_gpus_are_described_and_the_installation_is_what_is_missing(
    root: Path, tmp_path: Path, cards: list[Card]
) -> None:
    cards += [Card(), Card()]
    found = checks(root, GSM8K_PRIME_RL, {}, PrepareFlags(prime_rl=tmp_path / "none"))
    [gpus] = [check for check in found if check.name == "GPUs"]
    assert gpus.ok
    assert gpus.detail.startswith("GPU 0 (NVIDIA H100 80GB HBM3), 80.0 GB, compute capability 9.0, driver 570.86.15; ")
    [checkout] = [check for check in found if check.name == "checkout"]
    fix = "Run: uv run prepare.py --engine prime-rl."
    assert str(checkout.problem) == f"prime-rl is not installed in {tmp_path / 'none'}. {fix}"
    assert table(found, GSM8K_PRIME_RL).splitlines()[-1].startswith("not ready: --engine prime-rl")


@pytest.mark.parametrize(
    ("present", "gpus", "detail"),
    [
        ([Card(), Card("Tesla T4", (7, 5))], None, "GPU 1 (Tesla T4) has compute capability 7.5"),
        ([Card(), Card(used_gb=40.0)], None, "40.0 of 80.0 GB in use"),
        ([Card(), Card()], "0,5", "GPU 5 does not exist"),
        ([Card(lost=True)], None, "NVML cannot read the GPUs"),
    ],
)
def test_unfit_gpus_are_named(
    root: Path, cards: list[Card], present: list[Card], gpus: str | None, detail: str
) -> None:
    cards += present
    found = checks(root, GSM8K_PRIME_RL, {}, PrepareFlags(gpus=gpus))
    assert any(detail in str(check.problem) for check in found if check.name == "GPUs" and not check.ok)


def test_no_gpus_by_request_are_not_looked_for(root: Path) -> None:
    found = checks(root, GSM8K_PRIME_RL, {}, PrepareFlags(gpus="none"))
    assert "GPUs" not in [check.name for check in found]


def test_a_broken_train_toml_concerns_both_engines(root: Path) -> None:
    (root / "train.toml").write_text("trainer.optim.lr = 'fast'\n")
    found = checks(root, ARITHMETIC_TRL, {}, PrepareFlags())
    assert names(found, ALL, ok=False) == ["train.toml"]
    assert not is_ready(found, "trl")
    assert "train.toml:1" in table(found, ARITHMETIC_TRL)


@pytest.mark.parametrize(("engine", "code"), [("trl", 0), ("prime-rl", 2)])
def test_the_command_exits_as_run_py_could_start(engine: str, code: int) -> None:
    """Without GPUs and without prime-rl. Two seconds are promised; here of CPU time, whatever the machine does."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NIGHTSHIFT_PRIME_RL": "/does/not/exist"}
    command = [sys.executable, "-c", "from nightshift.cli import commands; commands()", "doctor", "--engine", engine]
    began = cpu_seconds_of_children()
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (code, "")
    assert cpu_seconds_of_children() - began < 2
    assert "/does/not/exist" in result.stdout

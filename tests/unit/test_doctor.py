"""The doctor's table: both engines, nothing changed, the exit code that run.py would have for missing parts."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.cli.run import checkout_checks
from nightshift.config.rules_toml import rules_here
from nightshift.engines.base import ALL, Check, PrepareFlags, on_cards
from nightshift.engines.doctor import Doctor, checks
from nightshift.engines.prime_rl.install import shape_problem
from tests.checkouts import linked_checkout
from tests.conftest import git
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, ROOT
from tests.stand_in_nvml import Card, StandInNvml


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> list[Card]:
    """The GPUs of this machine: none, until a test adds some."""
    nvml = StandInNvml([])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml.cards


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with a good train.toml."""
    return linked_checkout(tmp_path / "checkout", b"[orchestrator]\nbatch_size = 64\ngroup_size = 8\n")


def names(found: list[Check], engine: str, ok: bool) -> list[str]:
    return [check.name for check in found if check.engine == engine and check.ok is ok]


def test_a_laptop_is_ready_for_the_embedded_engine_and_sees_what_prime_rl_lacks(root: Path, tmp_path: Path) -> None:
    found = checks(root, ARITHMETIC_TRL, {"XDG_CACHE_HOME": str(tmp_path)}, PrepareFlags())
    assert names(found, ALL, ok=True) == ["train.toml", "machine.toml"]
    assert names(found, "trl", ok=False) == []
    assert names(found, "prime-rl", ok=False) == [], "an engine that this machine does not use has no PROBLEM"
    lacks = {check.name: str(check) for check in found if check.engine == "prime-rl" and check.problem}
    assert {"GPUs", "checkout"} <= lacks.keys()
    assert "not used" in lacks["checkout"]
    assert Doctor.of(found, ARITHMETIC_TRL).is_ready
    last = Doctor.of(found, ARITHMETIC_TRL).table().splitlines()[-1]
    assert last == "ready: --engine trl (arithmetic-trl), which this machine would use"
    found = checks(root, GSM8K_PRIME_RL, {"XDG_CACHE_HOME": str(tmp_path)}, PrepareFlags())
    assert {"GPUs", "checkout"} <= set(names(found, "prime-rl", ok=False))
    assert not Doctor.of(found, GSM8K_PRIME_RL).is_ready
    assert [check for check in found if not check.ok and "Run" not in str(check.problem)] == []  # each has its fix
    assert list(tmp_path.iterdir()) == [root]  # nothing was made


def test_no_gpus_by_request_are_not_looked_for(root: Path) -> None:
    found = checks(root, GSM8K_PRIME_RL, {}, PrepareFlags(gpus="none"))
    assert "GPUs" not in names(found, "prime-rl", ok=True) + names(found, "prime-rl", ok=False)


def test_two_gpus_are_described_and_the_installation_is_what_is_missing(root, tmp_path, cards):
    cards += [Card(), Card()]
    found = checks(root, GSM8K_PRIME_RL, {"NIGHTSHIFT_PRIME_RL": str(tmp_path / "none")}, PrepareFlags())
    [gpus] = [check for check in found if (check.engine, check.name) == ("prime-rl", "GPUs")]
    assert gpus.ok
    assert gpus.detail.startswith("GPU 0 (NVIDIA H100 80GB HBM3), 80.0 GB, compute capability 9.0, driver 570.86.15; ")
    [checkout] = [check for check in found if check.name == "checkout"]
    fix = "Run: uv run prepare.py --engine prime-rl."
    assert str(checkout.problem) == f"prime-rl is not installed in {tmp_path / 'none'}. {fix}"
    last = Doctor.of(found, GSM8K_PRIME_RL).table("prime-rl").splitlines()[-1]
    assert last == "not ready: --engine prime-rl (gsm8k-prime-rl), which you asked for"


def test_a_split_of_gpus_is_checked_whole_and_no_other_engine_takes_it(root, tmp_path, cards):
    cards += [Card() for _ in range(8)]
    cards[5].used_gb, cards[6].used_gb = 7.0, 40.0  # vLLM needs nine tenths free
    text = 'environments = ["arithmetic"]\nmodel = "mine"\ninfer_gpus = 6\ntrain_gpus = 2\ntensor_parallel = 3\n'
    (root / "rules.toml").unlink()
    (root / "rules.toml").write_text(text)
    shutil.copytree(ROOT / "models" / "arithmetic-base", root / "mine")
    rules = on_cards(rules_here(root, None, 8), root, {}, None)
    found = checks(root, rules, {"NIGHTSHIFT_PRIME_RL": str(tmp_path / "none")}, PrepareFlags())
    [problem] = [str(check.problem) for check in found if check.name == "GPUs" and not check.ok]
    assert problem.startswith("GPU 6 (NVIDIA H100 80GB HBM3) has 40.0 of 80.0 GB in use. Wait, or end the other")
    assert [check.detail for check in found if check.name == "memory"] == ["preset 8 x 80 GB"]
    assert str(shape_problem(rules, root)) == (
        "rules.toml: tensor_parallel = 3 does not divide the 4 attention heads of mine. Write a divisor, or 1."
    )
    assert shape_problem(replace(rules, tensor_parallel=2), root) is None
    [other] = [check for check in found if check.engine == "trl"]
    assert "not used rules.toml: infer_gpus = 6, train_gpus = 2: --engine trl uses one GPU" in str(other)
    assert other.ok


def test_a_broken_train_toml_concerns_both_engines(root: Path) -> None:
    (root / "train.toml").write_text("trainer.optim.lr = 'fast'\n")
    found = checks(root, ARITHMETIC_TRL, {}, PrepareFlags())
    assert names(found, ALL, ok=False) == ["train.toml"]
    assert not Doctor.of(found, ARITHMETIC_TRL).is_ready
    assert "train.toml:1" in Doctor.of(found, ARITHMETIC_TRL).table()


def test_an_unfinished_merge_and_a_wrong_direction_are_problems_of_a_checkout(checkout: Path) -> None:
    assert checkout_checks(checkout) == []
    (checkout / ".git" / "MERGE_HEAD").write_text(git(checkout, "rev-parse", "HEAD"))
    (checkout / "program.md").write_text("## Direction\nOnly: trainer.optim.lrr\n")
    found = checkout_checks(checkout)
    assert [(check.name, check.ok) for check in found] == [("git", False), ("direction", False)]

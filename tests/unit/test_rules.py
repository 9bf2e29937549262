"""The rules hash moves with everything that can move a number, and with nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.errors import UsageError
from nightshift.rules import ALL_RULES, ARITHMETIC_TRL, EnvironmentRules

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("environments", "models"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "nightshift").mkdir()
    for name in ("evaluation.py", "noise.py", "decision.py", "console.py"):
        shutil.copy(ROOT / "nightshift" / name, tmp_path / "nightshift" / name)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "environments/gsm8k/nightshift_gsm8k/scoring.py",
        "environments/arithmetic/nightshift_arithmetic/data.py",
        "nightshift/evaluation.py",
        "nightshift/campaign/noise.py",
        "nightshift/campaign/decision.py",
        "models/arithmetic-base/model.safetensors",
        "models/arithmetic-base/chat_template.jinja",
    ],
)
def test_one_byte_of_what_measures_changes_the_hash(root: Path, name: str) -> None:
    before = ARITHMETIC_TRL.hash(root)
    path = root / name
    path.write_bytes(path.read_bytes() + b"\n")
    assert ARITHMETIC_TRL.hash(root) != before


def test_what_does_not_measure_does_not_change_the_hash(root: Path) -> None:
    before = ARITHMETIC_TRL.hash(root)
    (root / "nightshift" / "console.py").write_text("")
    (root / "models" / "arithmetic-base" / "README.md").write_text("")
    cache = root / "environments" / "gsm8k" / "__pycache__"
    cache.mkdir()
    (cache / "x.pyc").write_bytes(b"x")
    assert ARITHMETIC_TRL.hash(root) == before
    assert ARITHMETIC_TRL.hash(ROOT) == before  # wherever the checkout lies


def test_a_file_cannot_be_moved_into_its_neighbour(root: Path) -> None:
    before = ARITHMETIC_TRL.hash(root)
    one = root / "environments" / "a.py"
    one.write_bytes(b"ab")
    moved = ARITHMETIC_TRL.hash(root)
    one.write_bytes(b"a")
    (root / "environments" / "b.py").write_bytes(b"b")
    assert len({before, moved, ARITHMETIC_TRL.hash(root)}) == 3


def test_another_budget_is_another_set_of_rules() -> None:
    assert ARITHMETIC_TRL.with_budget(10).hash(ROOT) != ARITHMETIC_TRL.hash(ROOT)
    assert ARITHMETIC_TRL.with_budget(60).hash(ROOT) == ARITHMETIC_TRL.hash(ROOT)
    with pytest.raises(UsageError, match="out of range"):
        ARITHMETIC_TRL.with_budget(float("nan"))
    assert len({rules.hash(ROOT) for rules in ALL_RULES}) == len(ALL_RULES)


def test_selection_sets_of_unequal_size_are_refused() -> None:
    two = (EnvironmentRules("a", 10), EnvironmentRules("b", 20))
    with pytest.raises(ValueError, match="one size"):
        replace(ARITHMETIC_TRL, environments=two)

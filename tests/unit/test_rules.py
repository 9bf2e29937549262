"""The rules hash moves with everything that can move a number, and with nothing else."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.errors import UsageError
from nightshift.rules import ALL_RULES, ARITHMETIC_TRL, EnvironmentRules, pick_rules

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("environments", "models", "nightshift"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "rules.toml", tmp_path)
    shutil.copy(ROOT / "run.py", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "rules.toml",
        "environments/gsm8k/nightshift_gsm8k/scoring.py",
        "environments/arithmetic/nightshift_arithmetic/data.py",
        "environments/arithmetic/nightshift_arithmetic/words.json",
        "nightshift/environments.py",
        "nightshift/evaluation.py",
        "nightshift/engines/trl/grpo.py",
        "nightshift/train_toml/keys.py",
        "nightshift/campaign/decision.py",
        "models/arithmetic-base/model.safetensors",
        "models/arithmetic-base/chat_template.jinja",
    ],
)
def test_one_byte_of_what_measures_changes_hash_and_tree(root: Path, name: str) -> None:
    before = ARITHMETIC_TRL.hash(root), ARITHMETIC_TRL.harness_tree(root)
    with (root / name).open("ab") as file:
        file.write(b"\n")
    assert ARITHMETIC_TRL.hash(root) != before[0]
    assert ARITHMETIC_TRL.harness_tree(root) != before[1]


def test_what_does_not_measure_does_not_change_the_hash(root: Path) -> None:
    before, tree = ARITHMETIC_TRL.hash(root), ARITHMETIC_TRL.harness_tree(root)
    free = ("environments/other/new.py", "environments/gsm8k/__pycache__/x.pyc", "models/arithmetic-base/README.md")
    for name in (*free, "nightshift/engines/trl/grpo.py~", "environments/gsm8k/.venv/x.py", "docs/x.md", "tests/x.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    assert (ARITHMETIC_TRL.hash(root), ARITHMETIC_TRL.harness_tree(root)) == (before, tree)
    for name in ("nightshift/console.py", "nightshift/engines/prime_rl/engine.py", "run.py"):
        (root / name).write_text("")
    assert ARITHMETIC_TRL.hash(root) == before == ARITHMETIC_TRL.hash(ROOT)  # wherever the checkout lies
    assert ARITHMETIC_TRL.harness_tree(root) != tree


def test_a_pipe_in_place_of_a_file_is_not_waited_for(root: Path) -> None:
    before = ARITHMETIC_TRL.hash(root)
    (root / "rules.toml").unlink()
    os.mkfifo(root / "rules.toml")
    assert ARITHMETIC_TRL.hash(root) != before


def test_a_file_cannot_be_moved_into_its_neighbour(root: Path) -> None:
    before = ARITHMETIC_TRL.hash(root)
    one = root / "environments" / "gsm8k" / "a.py"
    one.write_bytes(b"ab")
    moved = ARITHMETIC_TRL.hash(root)
    one.write_bytes(b"a")
    (root / "environments" / "gsm8k" / "b.py").write_bytes(b"b")
    assert len({before, moved, ARITHMETIC_TRL.hash(root)}) == 3


def test_another_budget_is_another_set_of_rules() -> None:
    assert ARITHMETIC_TRL.with_budget(10).hash(ROOT) != ARITHMETIC_TRL.hash(ROOT)
    assert ARITHMETIC_TRL.with_budget(60).hash(ROOT) == ARITHMETIC_TRL.hash(ROOT)
    with pytest.raises(UsageError, match="out of range"):
        ARITHMETIC_TRL.with_budget(float("nan"))
    assert len({rules.hash(ROOT) for rules in ALL_RULES}) == len(ALL_RULES)


def test_two_environments_are_refused_until_both_are_trained_on() -> None:
    two = (EnvironmentRules("a", 10), EnvironmentRules("b", 10))
    with pytest.raises(ValueError, match="one environment at a time"):
        replace(ARITHMETIC_TRL, environments=two)


@pytest.mark.parametrize(
    ("engine", "num_gpus", "names", "expected"),
    [
        (None, 0, (), "arithmetic-trl"),
        (None, 1, (), "gsm8k-trl"),
        (None, 2, (), "gsm8k-prime-rl"),
        ("trl", 0, (), "arithmetic-trl"),
        ("trl", 8, (), "gsm8k-trl"),
        ("prime-rl", 0, (), "gsm8k-prime-rl"),  # whose check says what is missing
        (None, 1, ("gsm8k",), "gsm8k-trl"),
        (None, 2, ("arithmetic",), "arithmetic-trl"),
        (None, 0, ("gsm8k",), 'models/arithmetic-base (arithmetic-trl) answers ["arithmetic"] only'),
        ("prime-rl", 2, ("arithmetic",), '(gsm8k-prime-rl) answers ["gsm8k"] only'),
        ("prime-rl", 2, ("arithmetic",), "or use --engine trl (GPUs needed: 0)."),
    ],
)
def test_machine_engine_and_rules_toml_pick_the_rules(
    engine: str | None, num_gpus: int, names: tuple[str, ...], expected: str
) -> None:
    if "(" not in expected:
        assert pick_rules(engine, num_gpus, names).name == expected
        return
    with pytest.raises(UsageError, match=re.escape(expected)):
        pick_rules(engine, num_gpus, names)

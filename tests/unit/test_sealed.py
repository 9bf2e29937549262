"""The sealed set is read in one place, after the look was counted."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from nightshift_arithmetic import data

from nightshift.errors import EngineError, UsageError
from nightshift.evaluation import test_split
from nightshift.evaluation.test_split import Look
from tests.rules import ARITHMETIC_TRL
from tests.stand_ins import small

ROOT = Path(__file__).parents[2]
RULES = small(ARITHMETIC_TRL, 8)
FIRST = Look(
    1, "2026-11-21T00:00:00+00:00", "autoresearch/x", "abc", baseline="b", incumbent="i", num_seeds=3, token="k"
)


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Everything that is not a test, by its path below the root."""
    for folder in ("nightshift", "environments", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
    for name in ("run.py", "prepare.py"):
        yield name, ast.parse((ROOT / name).read_text())


def users_of(name: str) -> set[str]:
    """Files that mention a name: as a variable, an attribute, an import or a definition."""
    found = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            names = (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
            if name in names:
                found.add(path)
    return found


def test_one_function_loads_the_sealed_set_and_only_a_worker_calls_it() -> None:
    passed_on = {
        path
        for path, tree in sources()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(value, ast.Constant) and value.value in ("sealed", "test.jsonl")
    }
    # gsm8k's own data module reads the file to hold its problems out of training.
    assert passed_on == {"nightshift/evaluation/test_split.py", "environments/gsm8k/nightshift_gsm8k/data.py"}
    assert users_of("selection_set") == {"nightshift/evaluation/evaluate.py", "nightshift/experiment/worker.py"}
    assert users_of("sealed_set") == {"nightshift/evaluation/test_split.py", "nightshift/experiment/worker.py"}


def test_no_split_of_an_environment_is_chosen_at_run_time_elsewhere() -> None:
    """A variable in place of "sealed" would pass the test above; there is none but in the tasksets', whose
    splits are train and selection (tests/integration/test_tasksets.py)."""
    found = set()
    for path, tree in sources():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            is_of_data = name == "load" and getattr(getattr(call.func, "value", None), "id", "") == "data"
            split = call.args[-1:] if name == "examples" else call.args[:1] if is_of_data else ()
            if any(not isinstance(argument, ast.Constant) for argument in split):
                found.add(path)
    assert found == {f"environments/{name}/nightshift_{name}/taskset.py" for name in ("gsm8k", "tictactoe")}


def root_with(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    return tmp_path


def test_the_set_is_read_for_a_job_of_the_last_look_only(tmp_path: Path) -> None:
    root = root_with(tmp_path)
    test_split.count(root / "runs", FIRST)
    examples = test_split.sealed_set(RULES, root, 1, "k")
    assert {example.key for _, example in examples} == {e.key for e in data.load("sealed", 8)}
    assert [look.number for look in test_split.counted_looks(root / "runs")] == [1]
    for number, token in ((1, "x"), (1, ""), (2, "k"), (None, "k")):
        with pytest.raises(EngineError, match="for the jobs of the last look"):
            test_split.sealed_set(RULES, root, number, token)
    test_split.count(root / "runs", replace(FIRST, number=2, token="l"))
    with pytest.raises(EngineError, match="for the jobs of the last look"):  # the first one is over
        test_split.sealed_set(RULES, root, 1, "k")


def test_nothing_is_read_when_no_look_was_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_with(tmp_path)
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("the sealed set was read"))
    with pytest.raises(EngineError, match="for the jobs of the last look"):
        test_split.sealed_set(RULES, root, 1, "k")
    (root / "runs" / test_split.LOOKS_NAME).mkdir()
    with pytest.raises(UsageError, match="is damaged"):
        test_split.count(root / "runs", FIRST)


def test_each_job_of_a_look_adds_a_line_and_the_look_counts_once(tmp_path: Path) -> None:
    runs = root_with(tmp_path) / "runs"
    for token in ("k", "l"):
        test_split.count(runs, replace(FIRST, token=token))
    assert [look.number for look in test_split.counted_looks(runs)] == [1]
    assert test_split.sealed_set(RULES, tmp_path, 1, "k")
    assert test_split.sealed_set(RULES, tmp_path, 1, "l")
    test_split.count(runs, replace(FIRST, number=2, incumbent="j", token="m"))
    assert [(look.number, look.incumbent) for look in test_split.counted_looks(runs)] == [
        (1, FIRST.incumbent),
        (2, "j"),
    ]
    with pytest.raises(ValueError, match="look 1 after 2 looks"):
        test_split.count(runs, FIRST)


def test_looks_of_version_0_2_are_counted(tmp_path: Path) -> None:
    runs = root_with(tmp_path) / "runs"
    old = {name: getattr(FIRST, name) for name in FIRST.__slots__} | {"baseline": 1, "incumbent": 4}
    (runs / test_split.LOOKS_NAME).write_text(json.dumps(old) + "\n")
    assert [look.baseline for look in test_split.counted_looks(runs)] == [1]


def test_a_damaged_count_stops_everything(tmp_path: Path) -> None:
    runs = root_with(tmp_path) / "runs"
    test_split.count(runs, FIRST)
    path = runs / test_split.LOOKS_NAME
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="every look at the sealed set counts"):
        test_split.count(runs, replace(FIRST, number=2))

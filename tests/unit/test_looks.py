"""The sealed set is read in one place, after the look was counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from nightshift.certify.looks import Look
from nightshift_arithmetic import data

from nightshift.certify import looks
from nightshift.errors import UsageError
from nightshift.rules import ARITHMETIC_TRL

ROOT = Path(__file__).parents[2]
RULES = replace(ARITHMETIC_TRL, environments=(replace(ARITHMETIC_TRL.environments[0], num_selection=8),))
FIRST = Look(1, "2026-11-21T00:00:00+00:00", "autoresearch/x", "abc", baseline=1, incumbent=4, num_seeds=3)


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


def test_one_function_loads_the_sealed_set_and_only_certify_calls_it() -> None:
    passed_on = {
        path
        for path, tree in sources()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(value, ast.Constant) and value.value in ("sealed", "test.jsonl")
    }
    # gsm8k's own data module reads the file to hold its problems out of training.
    assert passed_on == {"nightshift/certify/looks.py", "environments/gsm8k/nightshift_gsm8k/data.py"}
    readers = {"nightshift/certify/looks.py", "nightshift/experiment.py", "nightshift/preparation.py"}
    assert users_of("examples_of") == readers | {"nightshift/evaluation.py", "nightshift/report/runs.py"}
    assert users_of("open_sealed") == {"nightshift/certify/looks.py", "nightshift/certify/run.py"}


def test_the_guard_would_see_another_reader() -> None:
    assert "nightshift/certify/looks.py" in users_of("open_sealed")
    assert users_of("no_such_name") == set()


def test_no_split_of_an_environment_is_chosen_at_run_time_elsewhere() -> None:
    """A variable in place of "sealed" would pass the test above; besides the way of all examples there is none but
    the tasksets', whose splits are train and selection (tests/integration/test_tasksets.py)."""
    found = set()
    for path, tree in sources():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            is_of_data = name == "load" and getattr(getattr(call.func, "value", None), "id", "") == "data"
            split = call.args[-1:] if name in ("examples", "examples_of") else call.args[:1] if is_of_data else ()
            if any(not isinstance(argument, ast.Constant) for argument in split):
                found.add(path)
    assert found == {
        "nightshift/evaluation.py",
        "environments/arithmetic/nightshift_arithmetic/taskset.py",
        "environments/gsm8k/nightshift_gsm8k/taskset.py",
    }


def test_a_look_is_counted_before_the_set_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, counted = data.load, []

    def watched(split: str, size: int) -> object:
        counted.append((split, looks.counted_looks(tmp_path)))
        return load(split, size)

    monkeypatch.setattr(data, "load", watched)
    examples = looks.open_sealed(RULES, ROOT, tmp_path, FIRST)
    assert counted == [("sealed", [FIRST])]
    assert {example.key for _, example in examples} == {e.key for e in load("sealed", 8)}


def test_nothing_is_read_when_the_look_cannot_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / looks.LOOKS_NAME).mkdir()
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("the sealed set was read"))
    with pytest.raises(UsageError, match="is damaged"):
        looks.open_sealed(RULES, ROOT, tmp_path, FIRST)


def test_a_look_that_goes_on_is_the_same_look_and_the_next_one_is_another(tmp_path: Path) -> None:
    for _ in range(3):
        looks.open_sealed(RULES, ROOT, tmp_path, FIRST)
    second = replace(FIRST, number=2, incumbent=9)
    looks.open_sealed(RULES, ROOT, tmp_path, second)
    assert looks.counted_looks(tmp_path) == [FIRST, second]
    with pytest.raises(ValueError, match="look 2 after 2 looks"):
        looks.open_sealed(RULES, ROOT, tmp_path, replace(second, incumbent=11))


def test_a_damaged_count_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks.open_sealed(RULES, ROOT, tmp_path, FIRST)
    path = tmp_path / looks.LOOKS_NAME
    path.write_bytes(path.read_bytes()[:-20])
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("the sealed set was read"))
    with pytest.raises(UsageError, match="every look at the sealed set counts"):
        looks.open_sealed(RULES, ROOT, tmp_path, replace(FIRST, number=2))

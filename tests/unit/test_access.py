"""The test split is read in one place, after the journal holds the access."""

import ast
from functools import cache
from pathlib import Path

import pytest
from nightshift_arithmetic import data

from nightshift.campaign.journal import Access, Journal
from nightshift.errors import EngineError
from nightshift.evaluation.evaluate import examples_of_test_split
from tests.campaigns import replace
from tests.rules import ARITHMETIC_TRL
from tests.stand_ins import small

ROOT = Path(__file__).parents[2]
RULES = small(ARITHMETIC_TRL, 8)
FIRST = Access(
    number=1, branch="autoresearch/x", rules_hash="abc", configs={"baseline": "b", "incumbent": "i"}, token="k"
)


@cache
def sources() -> list[tuple[str, ast.Module]]:
    """Everything that is not a test, by its path below the root."""
    paths = [path for folder in ("nightshift", "environments", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    paths += [ROOT / "run.py", ROOT / "prepare.py"]
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in paths]


def users_of(name: str) -> set[str]:
    """Files that mention a name: as a variable, an attribute, an import or a definition."""
    found = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            names = (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
            if name in names:
                found.add(path)
    return found


def test_one_function_loads_the_test_split_and_only_a_worker_calls_it() -> None:
    passed_on = {
        (path, getattr(call.func, "attr", getattr(call.func, "id", "")))
        for path, tree in sources()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(value, ast.Constant) and value.value in ("test", "test.jsonl")
    }
    # gsm8k's own data module reads the file to hold its problems out of training.
    assert passed_on == {
        ("nightshift/evaluation/evaluate.py", "examples"),
        ("environments/gsm8k/nightshift_gsm8k/data.py", "_examples"),
    }
    assert users_of("examples_of_validation_split") == {
        "nightshift/evaluation/evaluate.py",
        "nightshift/experiment/worker.py",
    }
    assert users_of("examples_of_test_split") == {
        "nightshift/evaluation/evaluate.py",
        "nightshift/experiment/worker.py",
    }


def root_with(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    return tmp_path


def add(root: Path, access: Access) -> None:
    """The line of a job that reads the test split, as certify writes it."""
    name = f"certify/0001/baseline-{access.token}/job.json"
    Journal(root / "runs").add("access", name, access=access)


def test_the_split_is_read_for_a_job_of_the_last_access_only(tmp_path: Path) -> None:
    root = root_with(tmp_path)
    for token in ("k", "l"):
        add(root, replace(FIRST, token=token))
    for token in ("k", "l"):
        examples = examples_of_test_split(RULES, root, token)
        assert {example.key for _, example in examples} == {e.key for e in data.load("test", 8)}
    for token in ("x", ""):
        with pytest.raises(EngineError, match="holds no access to the test split for this job"):
            examples_of_test_split(RULES, root, token)
    add(root, replace(FIRST, number=2, token="m"))
    with pytest.raises(EngineError, match="holds no access"):  # the first one is over
        examples_of_test_split(RULES, root, "k")
    assert [(access.number, access.token) for access in Journal(root / "runs").accesses()] == [
        (1, "k"), (1, "l"), (2, "m"),
    ]  # fmt: skip


def test_nothing_is_read_without_an_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_with(tmp_path)
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("the test split was read"))
    for _ in range(2):
        with pytest.raises(EngineError, match="holds no access"):
            examples_of_test_split(RULES, root, "k")
        (root / "runs" / "journal.jsonl").touch()

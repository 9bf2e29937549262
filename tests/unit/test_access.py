"""runs/journal.jsonl: a line for each event; and the test split, which is read after the journal holds the access."""

import ast
import json
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
ACCESS = Access(number=1, branch="autoresearch/x", rules_hash="abc", configs={"baseline": "b"}, token="k")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path)
    journal.add("begun", "certify/0001/plan.json")
    journal.add("access", "certify/0001/baseline-7/job.json", access=ACCESS)
    return journal


def events(journal: Journal) -> list[tuple[str, str]]:
    return [(line.event, line.file) for line in journal.lines()]


def test_a_line_has_the_time_the_event_and_the_file_and_no_content(journal: Journal) -> None:
    first, second = map(json.loads, journal.path.read_text().splitlines())
    assert first == {"time": first["time"], "event": "begun", "file": "certify/0001/plan.json"}
    assert second["access"]["number"] == 1
    assert events(journal) == [("begun", "certify/0001/plan.json"), ("access", "certify/0001/baseline-7/job.json")]
    assert journal.accesses() == [ACCESS]


@pytest.mark.parametrize("num_bytes", [1, 40])
def test_a_last_line_that_a_kill_cut_is_not_read_and_the_next_line_replaces_it(journal: Journal, num_bytes) -> None:
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + whole[:num_bytes])
    assert len(events(journal)) == 2
    journal.add("decided", "0001/record.json")
    assert events(journal)[2:] == [("decided", "0001/record.json")]
    assert journal.path.read_bytes().startswith(whole)


@pytest.mark.parametrize("damage", [b"x", b'{"time":"2026', b"[" * 200_000, b"\xff\x00", b"null", b""])
def test_a_damaged_line_is_skipped(journal: Journal, damage: bytes) -> None:
    journal.path.write_bytes(damage + b"\n" + journal.path.read_bytes())
    journal.add("decided", "0001/record.json")
    assert len(events(journal)) == 3
    assert journal.accesses() == [ACCESS]


def test_a_journal_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(EngineError, match=r"cannot write .*journal\.jsonl"):
        Journal(tmp_path).add("begun", "0001/record.json")


# The test split is read in one place


def test_one_function_loads_the_test_split_and_only_a_worker_calls_it() -> None:
    paths = [path for folder in ("nightshift", "environments", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    paths += [ROOT / "run.py", ROOT / "prepare.py"]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    passed_on = {
        (path, getattr(call.func, "attr", getattr(call.func, "id", "")))
        for path, text in texts.items()
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(value, ast.Constant) and value.value in ("test", "test.jsonl")
    }
    # gsm8k's own data module reads the file to hold its problems out of training.
    assert passed_on == {
        ("nightshift/evaluation/evaluate.py", "examples"),
        ("environments/gsm8k/nightshift_gsm8k/data.py", "_examples"),
    }
    for split in ("validation", "test"):
        users = {path for path, text in texts.items() if f"examples_of_{split}_split" in text}
        assert users == {"nightshift/evaluation/evaluate.py", "nightshift/experiment/worker.py"}


def test_the_split_is_read_for_a_job_of_the_last_access_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    (root / "runs").mkdir(parents=True)
    (root / "environments").symlink_to(ROOT / "environments")
    journal = Journal(root / "runs")
    assert journal.lines() == []
    with monkeypatch.context() as patch:
        patch.setattr(data, "load", lambda *_: pytest.fail("the test split was read"))
        with pytest.raises(EngineError, match="holds no access"):
            examples_of_test_split(RULES, root, "k")

    def add(access: Access) -> None:
        journal.add("access", f"certify/0001/baseline-{access.token}/job.json", access=access)

    for token in ("k", "l"):
        add(replace(ACCESS, token=token))
    for token in ("k", "l"):
        examples = examples_of_test_split(RULES, root, token)
        assert {example.key for _, example in examples} == {e.key for e in data.load("test", 8)}
    for token in ("x", ""):
        with pytest.raises(EngineError, match="holds no access to the test split for this job"):
            examples_of_test_split(RULES, root, token)
    add(replace(ACCESS, number=2, token="m"))
    with pytest.raises(EngineError, match="holds no access"):  # the first one is over
        examples_of_test_split(RULES, root, "k")
    assert [(access.number, access.token) for access in journal.accesses()] == [(1, "k"), (1, "l"), (2, "m")]

"""runs/journal.jsonl: a line for each job; and the test split, which is read after the journal holds the access."""

import ast
import json
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from tests.rules import ROOT

ACCESS = {"number": 1, "branch": "autoresearch/x", "rules_hash": "abc"}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path)
    ledger.runs_dir.mkdir()
    ledger.log(ledger.runs_dir / "0001/job.json")
    ledger.log(ledger.runs_dir / "certify/0001/baseline-7/job.json", **ACCESS)
    return ledger


@pytest.fixture
def path(ledger: Ledger) -> Path:
    return ledger.runs_dir / "journal.jsonl"


def events(ledger: Ledger) -> list[tuple[str, str]]:
    return [(line.event, line.file) for line in ledger.journal()]


def test_a_line_has_the_time_the_event_and_the_file_and_no_content(ledger: Ledger, path: Path) -> None:
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"time": first["time"], "event": "submitted", "file": "0001/job.json"}
    assert second.items() >= ACCESS.items()
    assert events(ledger) == [("submitted", "0001/job.json"), ("access", "certify/0001/baseline-7/job.json")]
    assert [line.number for line in ledger.accesses()] == [1]


@pytest.mark.parametrize("num_bytes", [1, 40])
def test_a_last_line_that_a_kill_cut_is_not_read_and_the_next_line_replaces_it(ledger, path, num_bytes) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:num_bytes])
    assert len(events(ledger)) == 2
    ledger.log(ledger.run_dir(2) / "job.json")
    assert events(ledger)[2:] == [("submitted", "0002/job.json")]
    assert path.read_bytes().startswith(whole)


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
    assert passed_on == {("environments/gsm8k/nightshift_gsm8k/data.py", "_examples")}
    users = {path for path, text in texts.items() if "examples_of(" in text}
    assert users == {"nightshift/evaluation/evaluate.py", "nightshift/experiment/worker.py"}

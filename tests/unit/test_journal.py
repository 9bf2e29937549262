"""runs/journal.jsonl: one line for each event, whatever a kill leaves of the last one."""

import json
from pathlib import Path

import pytest

from nightshift.campaign.journal import Access, Journal
from nightshift.errors import EngineError

ACCESS = Access(number=1, branch="autoresearch/x", rules_hash="abc", configs={"baseline": "b"}, token="k")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path)
    journal.add("begun", "certify/0001/plan.json")
    journal.add("access", "certify/0001/baseline-7/job.json", access=ACCESS)
    return journal


def events(journal: Journal) -> list[tuple[str, str]]:
    return [(line.event, line.file) for line in journal.lines()[0]]


def test_a_line_has_the_time_the_event_and_the_file_and_no_content(journal: Journal) -> None:
    first, second = map(json.loads, journal.path.read_text().splitlines())
    assert first == {"time": first["time"], "event": "begun", "file": "certify/0001/plan.json"}
    assert second["access"]["number"] == 1
    assert events(journal) == [("begun", "certify/0001/plan.json"), ("access", "certify/0001/baseline-7/job.json")]
    assert journal.accesses() == [ACCESS]


def test_no_journal_is_no_lines(tmp_path: Path) -> None:
    assert Journal(tmp_path / "runs").lines() == ([], 0)


@pytest.mark.parametrize("num_bytes", [1, 40])
def test_a_last_line_that_a_kill_cut_is_not_read_and_the_next_line_replaces_it(journal: Journal, num_bytes) -> None:
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + whole[:num_bytes])
    assert (len(events(journal)), journal.lines()[1]) == (2, 0)
    journal.add("decided", "0001/record.json")
    assert events(journal)[2:] == [("decided", "0001/record.json")]
    assert journal.path.read_bytes().startswith(whole)


@pytest.mark.parametrize("damage", [b"x", b'{"time":"2026', b"[" * 200_000, b"\xff\x00", b"null", b""])
def test_a_damaged_line_is_skipped_and_counted(journal: Journal, damage: bytes) -> None:
    journal.path.write_bytes(damage + b"\n" + journal.path.read_bytes())
    journal.add("decided", "0001/record.json")
    assert (len(events(journal)), journal.lines()[1]) == (3, 1)
    assert journal.accesses() == [ACCESS]


def test_a_journal_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(EngineError, match=r"cannot write .*journal\.jsonl"):
        Journal(tmp_path).add("begun", "0001/record.json")

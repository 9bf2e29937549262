"""The ledger survives torn files, power cuts and hostile text; results.tsv is only a view of it."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Action, Change, Decision, Judgement, Proposal, Record, Run
from nightshift.campaign.results import COLUMNS, last_campaign
from nightshift.cli import run
from nightshift.cli.main import commands
from nightshift.errors import EngineError, UsageError
from tests.campaigns import a_record, a_result, campaign, replace


def closed(ledger: Ledger, **changes: object) -> Record:
    record = ledger.reserve(a_record(run=Run(new=Change(keys={"trainer.optim.lr": "5e-6"}))), b"x = 1\n")
    decision = Decision(change=record.run.new, action=Action.KEEP, effect=0.01, effect_stderr=0.01)
    judgement = Judgement(why="why", decisions=(decision,))
    record = replace(record, status="keep", judgement=judgement, result=a_result(), total_seconds=80.0)
    record = replace(record, **changes)
    ledger.close(record)
    return record


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def table(ledger: Ledger) -> list[dict[str, str]]:
    lines = ledger.tsv_path.read_text().splitlines()
    return [dict(zip(lines[0].split("\t"), line.split("\t"), strict=True)) for line in lines[1:]]


def test_not_measured_is_an_empty_cell(ledger: Ledger) -> None:
    judgement = Judgement(why="loss is nan")
    closed(ledger, status="crash", judgement=judgement, result=None)
    closed(ledger, commits={"keep 0002": "abcdef0123", "revert 0001": "c0ffee"}, proposal=Proposal(description="\t=1"))
    assert COLUMNS[:5] == ("commit", "eval_score", "memory_gb", "status", "description")
    cells, kept = table(ledger)
    assert (cells["commit"], kept["commit"], kept["description"]) == ("", "abcdef0", "'=1")
    for column in ("eval_score", "effect_at_decision", "p_helps", "memory_gb", "reward_mean", "num_steps", "parent"):
        assert cells[column] == "", column


def test_results_tsv_is_rebuilt_from_runs(ledger: Ledger) -> None:
    for _ in range(3):
        closed(ledger)
    whole = ledger.tsv_path.read_bytes()
    for data in (None, whole[:-20], whole.replace(b"\t0.5\t", b"\t0.9\t", 1), b"\xff\x00" * 100):
        ledger.tsv_path.unlink()
        if data:
            ledger.tsv_path.write_bytes(data)
        ledger.sync_tsv()
        assert ledger.tsv_path.read_bytes() == whole


def test_a_number_is_never_one_that_something_in_runs_has(ledger: Ledger) -> None:
    closed(ledger)
    ledger.run_dir(2).mkdir()  # its record was never written
    assert [r.number for r in ledger.records()] == [1]
    assert closed(ledger).number == 3
    (ledger.runs_dir / "0041").mkdir()
    assert closed(ledger).number == 42
    assert ledger.numbers() == [1, 2, 3, 41, 42]


def test_runs_of_another_version_are_refused_in_one_line_that_names_where_to_move_them(ledger):
    paths = [ledger.run_dir(closed(ledger).number) / "record.json" for _ in range(2)]
    for path in paths:
        record = json.loads(path.read_text())
        del record["proposal"], record["decision_rules"]
        path.write_text(json.dumps(record | {"version": 2, "description": "as 0.2 wrote it"}))
    cause = "runs/0001/record.json is of another version of Nightshift"
    for read in (Ledger(ledger.tsv_path.parent).records, Ledger(ledger.tsv_path.parent).readable):
        with pytest.raises(EngineError) as refused:
            read()
        assert str(refused.value) == f"{cause}. Move the folder: mv runs runs-old"


@pytest.mark.parametrize("how", ["cut", "a mean above 1", "a pipe"])
def test_a_damaged_record_is_one_line_and_all_that_looks_goes_on(tmp_path, how, monkeypatch):
    campaign(ledger := Ledger(tmp_path), ["3e-6", "5e-6", "7e-6"])
    path = ledger.run_dir(3) / "record.json"
    text = path.read_text()
    path.unlink()
    if how == "a pipe":
        os.mkfifo(path)
    else:
        path.write_text(text[:28] if how == "cut" else text.replace('"eval_score":0.55', '"eval_score":55', 1))

    def believe() -> None:
        records = Ledger(tmp_path).records()
        Campaign.of(records, *last_campaign(records))

    with pytest.raises(UsageError, match=r"0003/record\.json is damaged: .*Move .*0003 out of runs/"):
        believe()
    monkeypatch.setattr(run, "process_root", lambda: tmp_path)
    for words in (["status"], ["history"], ["show", "2"]):
        done = CliRunner().invoke(commands, words)
        assert done.exit_code == 0, (words, done.output)
        assert ("0003/record.json is damaged" in done.output) == (words[0] != "show")

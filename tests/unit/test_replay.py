"""A recorded campaign decided again: the same constants give the same verdicts, others may not."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.replay import campaigns, replay, table
from nightshift.decision_rules import DecisionRules
from nightshift.errors import UsageError
from nightshift.records import Failure, Record
from tests.campaigns import a_record, judged, stored
from tests.night_checkout import nightshift

# A baseline, keeps, a near tie, a collapse, a crash, a last keep.
STORY = [[0.25, 0.26], [0.33], [0.44], [0.445], [0.20], [], [0.52]]
UNSURE = {"seed_sd": 0.5}  # one run says next to nothing: nothing is kept


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`runs/` of a small campaign, with what was never decided."""
    records = [*judged(STORY, num_examples=1000), a_record(status="crash", failure=Failure.MACHINERY), a_record()]
    told = [replace(record, description=f"idea {number}") for number, record in enumerate(records, 1)]
    return stored(tmp_path_factory.mktemp("campaign"), told).runs_dir


def records_of(runs_dir: Path) -> list[Record]:
    (records,) = campaigns(Ledger(runs_dir, runs_dir).records())
    return records


def test_the_recorded_constants_give_the_recorded_verdicts_and_numbers(recorded: Path) -> None:
    records = records_of(recorded)
    result = replay(records, {})
    assert [record.number for record in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [replace(record, runs=()) for record in result.decided] == [replace(record, runs=()) for record in records]
    kept = [r for r in records if r.is_keep]
    assert len(kept) >= 3, "the campaign has no story to replay"
    text = table(records, result, "as recorded")
    assert "verdicts that differ (*): 0" in text
    assert f"incumbent at the end: {kept[-1].number:04d}" in text
    assert "what would have been proposed" not in text


def test_a_doubtful_rule_keeps_less_and_says_what_cannot_be_known(recorded: Path) -> None:
    records = records_of(recorded)
    result = replay(records, UNSURE)
    assert [record.number for record in result.decided if record.is_keep] == [1]
    assert {record.parent for record in result.decided[1:]} == {1}  # they meet the replayed incumbent
    assert result.standing.incumbent < 0.4
    first = next(old.number for old, new in zip(records, result.decided, strict=True) if old.status != new.status)
    text = table(records, result, "")
    assert f"what would have been proposed after {first:04d}" in text
    assert f"{first:04d}*" in text


def test_a_run_that_was_never_made_is_named_and_not_made_up(recorded: Path) -> None:
    records = records_of(recorded)
    result = replay(records, {"baseline_runs": 6})
    assert "not known: further runs of the baseline were never made" in table(records, result, "")
    assert len(result.kept[0].runs) == 2
    fewer = replay(records, {"baseline_runs": 1})
    assert "further runs of the baseline" not in table(records, fewer, "")
    assert len(fewer.kept[0].runs) == 1


@pytest.mark.parametrize(("wanted", "used"), [(50, 50), (5000, 1000)])
def test_fewer_examples_use_less(recorded: Path, wanted: int, used: int) -> None:
    result = replay(records_of(recorded), {}, wanted)
    for record in result.decided:
        assert all(len(evaluation.example_scores) == used for evaluation in record.evaluations)


@pytest.mark.parametrize("score", ['"1"', "1.5", "-1e-9", "[[[]]]", "null"])
@pytest.mark.parametrize("num_examples", [None, 10])
def test_damaged_scores_are_one_line(tmp_path: Path, score: str, num_examples: int | None) -> None:
    runs_dir = stored(tmp_path, judged(STORY)).runs_dir
    path = runs_dir / "0003" / "record.json"
    path.write_text(path.read_text().replace('"scores":[1.0', f'"scores":[{score}', 1))
    with pytest.raises(UsageError, match=r"^runs/0003/record\.json is damaged: .*\. Move runs/0003 out of runs/"):
        replay(records_of(runs_dir), {}, num_examples)


def test_the_command(recorded: Path) -> None:
    code, stdout, _ = nightshift(recorded, "replay", str(recorded), "--seed-sd", "0.2", "--num-examples", "400")
    assert code == 0
    assert "constants: seed_sd 0.2; 400 examples" in stdout
    assert len([line for line in stdout.splitlines() if "idea " in line]) == len(STORY)
    _, shown, _ = nightshift(recorded, "replay", "--help")
    for field in fields(DecisionRules):
        is_number = field.name not in ("kinds", "priors", "noises", "shrinkage", "many")
        assert (f"--{field.name.replace('_', '-')} " in shown) == is_number, field.name


def test_an_empty_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    code, _, stderr = nightshift(tmp_path, "replay", str(tmp_path / "runs"))
    assert code == 2
    assert stderr.splitlines() == [f"{tmp_path}/runs holds no decided experiment. Name a folder runs/ with records."]

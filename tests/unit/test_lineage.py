"""Which keeps stand, and where it is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.lineage import incumbent_number, lineage, taken_back
from nightshift.proposers.brief import describe
from nightshift.proposers.history import history, incumbent, load_configs
from nightshift.records import Judgement, Record, Verdict
from nightshift.report.diff import kept_chain
from tests.campaigns import campaign
from tests.unit.test_ledger import a_record

KEEP, DISCARD = Verdict.KEEP, Verdict.DISCARD


def experiment(number: int, parent: int | None, verdict: Verdict, back: int | None = None) -> Record:
    judgement = Judgement(verdict, "why", taken_back_to=back)
    return a_record(number=number, parent=parent, status=str(verdict), judgement=judgement)


RECORDS = [experiment(1, None, KEEP), experiment(2, 1, KEEP), experiment(3, 2, KEEP), experiment(4, 3, DISCARD)]


def numbers(records: list[Record]) -> list[int]:
    return [record.number for record in records]


def test_the_lineage_of_the_incumbent_leaves_out_what_was_taken_back() -> None:
    assert numbers(lineage(RECORDS)) == [1, 2, 3]
    assert taken_back(RECORDS) == []
    back = [*RECORDS, experiment(5, 3, DISCARD, back=2)]
    assert (numbers(lineage(back)), numbers(taken_back(back))) == ([1, 2], [3])
    later = [*back, experiment(6, 2, KEEP)]
    assert (numbers(lineage(later)), numbers(taken_back(later))) == ([1, 2, 6], [3])
    again = [*later, experiment(7, 6, DISCARD, back=3)]  # what was taken back may return
    assert (numbers(lineage(again)), numbers(taken_back(again))) == ([1, 2, 3], [6])
    assert incumbent_number(again) == 3


def test_of_several_branches_the_one_that_is_asked_for() -> None:
    branch = RECORDS[0].branch
    elsewhere = [replace(experiment(9, None, KEEP), branch="other")]
    assert numbers(kept_chain([*RECORDS, *elsewhere], branch)) == [1, 2, 3]
    assert numbers(kept_chain([*RECORDS, *elsewhere], "other")) == [9]
    assert kept_chain(RECORDS, "nowhere") == []


def test_damaged_parents_end_the_lineage() -> None:
    assert lineage([]) == []
    assert incumbent_number([experiment(1, None, DISCARD)]) is None
    circle = [experiment(1, 2, KEEP), experiment(2, 1, KEEP)]
    assert numbers(lineage(circle)) == [1, 2]
    assert numbers(lineage([experiment(7, 4, KEEP)])) == [7]


def test_history_and_brief_say_that_a_keep_was_taken_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    records = campaign(ledger, ["3e-6", "9e-6"])
    assert [r.status for r in records] == ["keep", "keep", "discard"]
    configs = load_configs(ledger, records)
    (trials,) = (each.trials for each in history(records, configs) if each.key == "trainer.optim.lr")
    assert [trial.said for trial in trials] == ["keep", "discard"]
    assert incumbent(records, configs) == configs[2]
    last = records[-1]
    assert last.judgement is not None
    records[-1] = replace(last, judgement=replace(last.judgement, taken_back_to=1))
    (after,) = history(records, configs)
    assert [trial.said for trial in after.trials] == ["taken back", "discard"]
    assert after.now == "6e-7"
    assert incumbent(records, configs) == configs[1]
    assert describe(records[1], is_taken_back=True).startswith("0002 keep, taken back since: +25.0")

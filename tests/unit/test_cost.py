"""What a campaign cost, and how that is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import json

from nightshift.campaign.cost import STATE_NAME, Spent, cost_of, gpus_of, paid_until, spent
from nightshift.campaign.ledger import Ledger
from nightshift.cost import NO_BILL, Bill, Cost, together
from nightshift.night.state import NightRequest, NightState, save
from nightshift.records import Outcome, Record, Result, Training
from tests.campaigns import BRANCH, a_record


def record_of(hardware: str, *seconds: float, cost: Cost | None = None) -> Record:
    runs = tuple(Result(1, Training(Outcome.BUDGET, 10), total_seconds=each) for each in seconds)
    return replace(a_record(number=2), hardware=hardware, runs=runs, cost=cost)


@pytest.mark.parametrize(
    ("hardware", "number"),
    [
        ("cpu x86_64, 2 cores", None),
        ("cpu x86_64, 8 cores, 2 side by side, 4 cores each", None),
        ("1 x NVIDIA H100 80GB HBM3", 1),
        ("2 x NVIDIA H100 80GB HBM3, 2 side by side, 8 cores each", 2),
        ("NVIDIA A100-SXM4-80GB + NVIDIA H100 80GB HBM3", 2),
        ("no GPU", None),
        ("", None),
    ],
)
def test_gpus_of_a_run(hardware: str, number: int | None) -> None:
    assert gpus_of(hardware) == number


def test_nothing_is_none_and_never_zero() -> None:
    assert cost_of([]) == Spent(None, None, NO_BILL)
    assert str(cost_of([])) == "nothing yet"
    assert cost_of([record_of("cpu x86_64, 2 cores", 90.0)]) == Spent(90.0, None, NO_BILL)
    assert Cost() + Cost() == Cost()


def test_runs_gpus_and_agents_are_summed() -> None:
    records = [
        record_of("2 x H100", 3600.0, 1800.0),
        record_of("2 x H100", 1800.0, cost=Cost(1_000, 10, 0.5, 360.0)),
        record_of("2 x H100", 1800.0, cost=Cost(2_000, None, None, 360.0)),
        replace(record_of("2 x H100", 9999.0), baseline=1),  # made before there was this campaign
    ]
    found = cost_of(records)
    assert found == Spent(9000.0, 18000.0, Bill(Cost(3_000, 10, 0.5, 720.0), 2, 1, 2, 1))
    assert str(found) == (
        "2.50 h of runs, 5.00 GPU-hours; 2 proposals: 0.20 h, 3,000 tokens in, 10 out (told of 1), $0.50 (told of 1)"
    )
    told = Bill(Cost(seconds=36.0), 1, 0)
    assert str(cost_of(records[:1], told)) == (
        "1.50 h of runs, 3.00 GPU-hours; 1 proposal: 0.01 h, tokens not told, dollars not told"
    )
    assert "? tokens in, 7 out" in str(cost_of([], Bill(Cost(tokens_out=7), 1, 0, 0, 1)))


def test_a_record_holds_its_cost_and_an_old_one_is_read_without() -> None:
    record = record_of("cpu", 1.0, cost=Cost(5, 6, 0.25, 7.5))
    data = json.encode(record)
    assert json.decode(data, type=Record).cost == record.cost
    old = json.decode(data)
    del old["cost"]
    assert json.decode(json.encode(old), type=Record).cost is None
    for wrong in ({"dollars": -1.0}, {"tokens_in": -1}, {"dollars": 1e300}, {"seconds": "1"}):
        with pytest.raises(ValueError, match=r"cost"):
            json.decode(json.encode({**old, "cost": wrong}), type=Record)


def test_a_bill_counts_what_was_asked_and_what_was_priced() -> None:
    bill = NO_BILL.plus(None).plus(Cost(dollars=1.0)).plus(Cost(tokens_in=3))
    assert bill == Bill(Cost(3, None, 1.0), 2, 1, 1, 0)
    assert bill.and_of(bill) == Bill(Cost(6, None, 2.0), 4, 2, 2, 0)


def test_what_one_of_a_team_does_not_tell_is_missing_of_the_whole() -> None:
    assert together([None, None]) is None
    whole = together([Cost(1, 2, 0.25, 1.0), None, Cost(3, 4, 0.5, 2.0)])
    assert whole == Cost(4, 6, 0.75, 3.0)
    part = together([Cost(1, 2, 0.5, 1.0), Cost(3, 4, None, 2.0)])
    assert part == Cost(4, 6, 0.5, 3.0, ("dollars",))
    killed = together([Cost(seconds=900.0), Cost(3, 4, 0.5, 2.0)])
    assert killed == Cost(3, 4, 0.5, 902.0, ("tokens_in", "tokens_out", "dollars"))
    assert together([Cost(seconds=1.0), Cost(seconds=2.0)]) == Cost(seconds=3.0)  # told by nobody: None says it
    assert together([together([Cost(dollars=0.5), Cost()]), Cost(dollars=0.5)]) == Cost(
        dollars=1.0, untold=("dollars",)
    )
    bill = NO_BILL.plus(part)
    assert bill == Bill(Cost(4, 6, 0.5, 3.0), 1, 0, 1, 1)
    assert str(cost_of([], bill)).endswith("4 tokens in, 6 out, $0.50 (told in part)")
    assert str(cost_of([], bill.plus(whole))).endswith("8 tokens in, 12 out, $1.25 (told of 1)")
    record = record_of("cpu", 1.0, cost=part)
    assert json.decode(json.encode(record), type=Record).cost == part


def test_what_nights_refused_stays_in_the_cost_when_the_next_one_begins(tmp_path: Path) -> None:
    """Also where a night of another campaign is between. Each proposal here costs a dollar."""
    ledger = Ledger(tmp_path)

    def experiment(number: int, rules_hash: str) -> None:
        ledger.run_dir(number).mkdir(parents=True)
        ledger.write(a_record(number=number, rules_hash=rules_hash, cost=Cost(dollars=1.0)))

    def night(first: int, rules_hash: str, num_asked: int, num_taken: int) -> None:
        request, started = NightRequest("claude"), "2026-11-21T22:00:00+00:00"
        earlier = paid_until(first, ledger)
        bill = Bill(Cost(dollars=float(num_asked)), num_asked, num_asked)
        save(ledger, NightState(request, BRANCH, rules_hash, started, first, bill=bill, earlier=earlier))
        for number in range(first, first + num_taken):
            experiment(number, rules_hash)

    def dollars() -> list[float | None]:
        ours = [[record for record in ledger.records() if record.rules_hash == name] for name in ("a", "b")]
        return [spent(ledger, records).agents.total.dollars for records in ours]

    experiment(1, "a")  # before all nights
    assert dollars() == [1.0, None]
    night(2, "a", 4, num_taken=1)
    assert dollars() == [5.0, None]
    night(3, "b", 2, num_taken=1)
    assert dollars() == [5.0, 2.0]
    night(4, "a", 3, num_taken=2)
    assert dollars() == [8.0, 2.0]
    night(6, "a", 1, num_taken=0)
    assert dollars() == [9.0, 2.0]
    (tmp_path / "runs" / STATE_NAME).unlink()
    assert dollars() == [4.0, 1.0]

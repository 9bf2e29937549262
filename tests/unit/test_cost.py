"""What a campaign cost, and how that is told."""

from pathlib import Path

from msgspec import json

from nightshift.campaign.ledger import PROPOSALS_NAME, ProposalCost, append, campaign_cost, proposals_cost, runs_cost
from nightshift.campaign.records import NOTHING, Cost, Outcome, Record, Result, Training, together
from tests.campaigns import BRANCH, a_record, replace


def record_of(hardware: str, seconds: float | None = None, cost: Cost | None = None) -> Record:
    result = None if seconds is None else Result(1, Training(Outcome.BUDGET, 10), total_seconds=seconds)
    return replace(a_record(number=2), hardware=hardware, result=result, cost=cost)


def test_nothing_is_none_and_never_zero() -> None:
    assert runs_cost([]) == NOTHING
    assert str(runs_cost([])) == "nothing yet"
    assert runs_cost([record_of("cpu x86_64, 2 cores", 90.0)]) == Cost(num_proposals=0, run_seconds=90.0)
    assert NOTHING + NOTHING == NOTHING
    assert (Cost() + Cost()).dollars is None


def test_runs_gpus_and_agents_are_summed() -> None:
    records = [record_of("2 x H100", 5400.0), record_of("2 x H100", 1800.0), record_of("2 x H100", 1800.0)]
    cost = runs_cost(records) + Cost(1_000, 10, 0.5, 360.0) + Cost(2_000, None, None, 360.0)
    assert cost == Cost(3_000, 10, 0.5, 720.0, ("tokens_out", "dollars"), 2, 9000.0, 18000.0)
    assert str(cost) == (
        "2.50 h of runs, 5.00 GPU-hours, 0.20 h of agents, 2 proposals, 3,000 tokens in, at least 10 tokens out, "
        "at least $0.50"
    )
    told = str(runs_cost(records[:1]) + Cost(tokens_out=7))
    assert told.endswith("1 proposal, tokens in not reported, 7 tokens out, dollars not reported")


def test_what_one_of_a_team_does_not_tell_is_said_as_at_least() -> None:
    assert together([None, None]) is None
    whole = together([Cost(1, 2, 0.25, 1.0), None, Cost(3, 4, 0.5, 2.0)])
    assert whole == Cost(4, 6, 0.75, 3.0)
    part = together([Cost(1, 2, 0.5, 1.0), Cost(3, 4, None, 2.0)])
    assert part == Cost(4, 6, 0.5, 3.0, ("dollars",))
    killed = together([Cost(seconds=900.0), Cost(3, 4, 0.5, 2.0)])
    assert killed == Cost(3, 4, 0.5, 902.0, ("tokens_in", "tokens_out", "dollars"))
    assert together([Cost(seconds=1.0), Cost(seconds=2.0)]) == Cost(seconds=3.0)  # nobody told: None says it
    twice = together([together([Cost(dollars=0.5), Cost()]), Cost(dollars=0.5)])
    assert twice == Cost(dollars=1.0, at_least=("dollars",))
    assert str(part).endswith("4 tokens in, 6 tokens out, at least $0.50")
    assert str(part + whole).endswith("2 proposals, 8 tokens in, 12 tokens out, at least $1.25")
    record = record_of("cpu", 1.0, cost=part)
    assert json.decode(json.encode(record), type=Record).proposal.cost == part


def test_what_nights_refused_stays_in_the_cost_of_the_campaign(tmp_path: Path) -> None:
    """Also where a night of another campaign is between. Each proposal here costs a dollar."""
    for night, rules_hash, num_asked in (("1", "a", 4), ("2", "b", 2), ("3", "a", 3), ("4", "a", 1)):
        for _ in range(num_asked):
            append(tmp_path / PROPOSALS_NAME, ProposalCost(BRANCH, rules_hash, night, Cost(dollars=1.0)))
    assert [proposals_cost(tmp_path, BRANCH, name).dollars for name in ("a", "b")] == [8.0, 2.0]
    assert proposals_cost(tmp_path, BRANCH, "a", "3") == Cost(dollars=3.0, num_proposals=3)
    assert proposals_cost(tmp_path, BRANCH, "c") == NOTHING
    records = [replace(record_of("cpu", 90.0), branch=BRANCH, rules_hash="b")]
    assert campaign_cost(tmp_path, records) == Cost(dollars=2.0, num_proposals=2, run_seconds=90.0)

"""benchmarks/proposers.py: nights in the emulator are decided by the package's rule."""

import sys
from pathlib import Path

import pytest

from nightshift.agents.search import SearchProposer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from proposers import Night, summary


@pytest.mark.parametrize("proposer", ["random", "tpe"])
def test_a_night_in_the_emulator_is_the_same_for_the_same_seed(proposer: str) -> None:
    nights = [Night(SearchProposer(proposer, 1), 1, has_rider=True, num_runs=20) for _ in range(2)]
    first, second = [night.play() for night in nights]
    assert first == second
    campaign = nights[0].campaign
    assert len(campaign.decided) == 20
    assert first["changes"] == len(campaign.kept)
    assert [record.run.is_baseline for record in campaign.decided[-4:]] == [
        True,
        True,
        not campaign.kept,
        not campaign.kept,
    ]
    assert campaign.decided[-1].run.kept == campaign.kept


def test_the_summary_compares_the_same_nights() -> None:
    figures = {"holds": True, "told_too_high": 0.0, "half_interval": 1.0, "commits_in": 1, "commits_out": 0}
    figures |= {"changes": 1, "far_worse": 0.0}
    rows = [
        {"proposer": proposer, "rider": rider, "night": night, "gain": gain + night, **figures}
        for proposer, rider, gain in (("random", False, 1.0), ("tpe", False, 2.0), ("tpe", True, 5.0))
        for night in range(2)
    ]
    _, without, with_rider = summary(rows)
    assert (without["lead"], without["by_rider"]) == (1.0, None)
    assert (with_rider["lead"], with_rider["by_rider"], with_rider["by_rider_stderr"]) == (4.0, 3.0, 0.0)

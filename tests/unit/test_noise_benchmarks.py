"""benchmarks/seeds.py, agreement.py and aa.py: what two runs have in common, of made-up runs of which it is known."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import aa
import agreement
import seeds

from nightshift.campaign.records import packed
from tests.campaigns import a_record, a_result, judged, replace


def scores_of(common: float, num_seeds: int) -> list[dict[int, float]]:
    """Two configs whose scores share a part of that sd, by seed, and have one of sd 1 each."""
    rng = np.random.default_rng(3)
    shared = rng.normal(0, common, num_seeds)
    return [dict(enumerate(shared + rng.normal(0, 1, num_seeds))) for _ in range(2)]


@pytest.mark.parametrize("common", [0.0, 2.0])
def test_seeds_are_worth_what_they_share(common: float) -> None:
    worth = seeds.worth(*scores_of(common, 1000))
    assert worth["same"] == pytest.approx(2**0.5, rel=0.06)
    assert worth["different"] == pytest.approx((2 + 2 * common**2) ** 0.5, rel=0.06)
    assert worth["seeds"] == 1000


def test_two_seeds_tell_nothing() -> None:
    with pytest.raises(ValueError, match="2 seeds in common are too few"):
        seeds.worth({0: 0.5, 1: 0.6, 2: 0.5}, {1: 0.5, 2: 0.6})


def test_runs_of_the_same_settings_agree_more_than_others() -> None:
    rng = np.random.default_rng(0)
    records = []
    for pair in range(4):
        base = rng.random(2000) < 0.5
        for seed in (1, 2):
            answers = np.where(rng.random(2000) < 0.2, rng.random(2000) < 0.5, base).astype(float)
            one = a_result(0.5, 2000, seed)
            object.__setattr__(one.evaluation, "scores", packed(answers.tolist()))
            number = len(records) + 1
            records.append(a_record(number=number, decided=number, effective_hash=f"{pair}", result=one))
    found = agreement.agreements(records)
    assert found["same settings"]["median"] == pytest.approx(0.64, abs=0.06)  # (1 - 0.2)^2
    assert found["other settings"]["median"] == pytest.approx(0.0, abs=0.06)
    assert (found["same settings"]["pairs"], found["other settings"]["pairs"]) == (4, 1)


def test_runs_of_equal_settings_are_decided_as_changes_that_do_nothing() -> None:
    """As a ledger has them: made from the incumbent's own set of ideas, with no key changed."""
    story = judged([0.505, *(0.50 + 0.02 * (number % 3 - 1) for number in range(9))])
    recorded = [replace(record, effective_hash="same", diff=(), base=()) for record in story]
    found = aa.decided_anew(recorded)
    said = [record.judgement.p_better for record in found[1:] if record.judgement]
    assert len(said) == 9
    assert all(p is not None and p != 0.5 for p in said), said
    assert {record.status for record in found} == {"keep", "discard"}

"""benchmarks/seeds.py and aa.py: what two runs have in common, of made-up runs of which it is known."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import aa
import seeds

from nightshift.config.decision_rules import RuleConstants


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


def test_changes_that_do_nothing_are_decided_one_by_one() -> None:
    """Of four runs of one config the second scores far above the others, and the third far below."""
    figures = aa.decide([0.50, 0.56, 0.44, 0.50], RuleConstants())
    assert figures["kept"] == 1
    assert figures["standing"] == figures["kept"] + figures["adopted"] - figures["reverted"]


def test_the_simulated_share_is_that_of_the_rule() -> None:
    shares = aa.simulate([0.49, 0.51] * 10, RuleConstants(), repetitions=20)
    assert shares.shape == (20,)
    assert 0.02 < shares.mean() < 0.4

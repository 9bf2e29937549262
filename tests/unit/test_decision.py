"""The decision rule with GSM8K's constants, and with one world, on 1,319 examples; its belief and the textbook.

What several worlds are for: test_worlds.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from nightshift.campaign import decision
from nightshift.campaign.worlds import UNUSED, Posterior
from nightshift.config.decision_rules import DecisionRules
from tests.rules import ONE_WORLD

RULES = DecisionRules()
BOTH = pytest.mark.parametrize("rules", [RULES, ONE_WORLD], ids=["today", "one world"])
Floats = NDArray[np.float64]
E2 = 0.4 * 0.25 / 1319  # what `pairing` sees in two ordinary runs


def after(*scores: float, start: Posterior | None = None, rules: DecisionRules = RULES) -> Posterior:
    """The belief after children of the incumbents that scored so, on a baseline of 0.475 that was run twice."""
    belief = start or decision.baseline(0.475, 1319, rules)
    if start is None:
        again = decision.observe(belief, 0, 0.475, E2, rules.of_a_repeat, number=UNUSED)
        belief = decision.settle(again, np.False_, rules)
    for score in scores:
        tested = decision.observe(belief, belief.incumbent, score, E2, rules)
        belief = decision.settle(tested, tested.keep, rules)
    return belief


def first_run(score: float, rules: DecisionRules = RULES) -> decision.Tested:
    return decision.observe(after(rules=rules), 0, score, E2, rules)


def in_one_world(means: list[float]) -> Posterior:
    """Scores of kept configs that are known, each the baseline and one idea."""
    k, sets = len(means), np.eye(len(means))
    sets[:, 0] = 1.0
    known = np.array([[means[0], *(mean - means[0] for mean in means[1:])]])
    ideas, covariance = np.arange(k), np.zeros((1, k, k))
    return replace(after(rules=ONE_WORLD), means=known, covariance=covariance, ideas=ideas, sets=sets)


@BOTH
@pytest.mark.parametrize(
    ("gain_pp", "keep"), [(-3.0, False), (-0.5, False), (0.0, False), (0.9, True), (2.4, True), (9.0, True)]
)
def test_reading_of_a_first_run(gain_pp: float, keep: bool, rules: DecisionRules) -> None:
    assert first_run(0.475 + gain_pp / 100, rules).keep == keep


@BOTH
def test_a_tie_with_the_parent_is_no_keep(rules: DecisionRules) -> None:
    tested = first_run(0.480, rules)
    alike = np.zeros_like(tested.belief.means)
    alike[:, 0] = 0.475
    assert not replace(tested, belief=replace(tested.belief, means=alike)).keep


@BOTH
def test_a_lucky_score_is_shrunk_to_the_tested_value(rules: DecisionRules) -> None:
    assert 100 * after(0.51, rules=rules).mean == pytest.approx(49.1, abs=0.25)


@BOTH
def test_a_discard_moves_the_incumbent_belief_and_its_idea_is_remembered(rules: DecisionRules) -> None:
    belief = after(0.465, rules=rules)
    assert belief.mean < 0.475
    assert belief.sd < after(rules=rules).sd
    assert belief.sets.tolist() == [[1.0, 0.0]], "of no config that was kept"
    assert belief.effects[1] < 0


@pytest.mark.parametrize(
    ("rules", "moved", "shrunk", "p_better"), [(RULES, 0.002, 0.015, 0.98), (ONE_WORLD, 0.005, 0.01, 0.99)]
)
def test_a_collapse_hardly_moves_the_incumbent_and_a_leap_is_believed_at_once(
    rules: DecisionRules, moved: float, shrunk: float, p_better: float
) -> None:
    collapse, leap = first_run(0.05, rules), first_run(0.575, rules)
    assert collapse.belief.mean == pytest.approx(0.475, abs=moved)
    assert collapse.delta == pytest.approx(-0.42, abs=0.02)
    assert leap.delta == pytest.approx(0.10, abs=shrunk)
    assert leap.p_better > p_better


@BOTH
def test_the_variance_of_a_run_is_that_of_its_seed_and_its_examples_in_every_world(rules: DecisionRules) -> None:
    belief = decision.baseline(0.475, 1319, rules)
    seeds = rules.seed_sd * np.tile([noise for _, noise in rules.noises], len(rules.priors))
    np.testing.assert_allclose(belief.run_variance(rules), seeds**2 + 0.4 * 0.475 * 0.525 / 1319)
    np.testing.assert_allclose(belief.covariance[:, 0, 0], belief.run_variance(rules))
    noisy = replace(belief, pairing_variance=0.01)
    assert (noisy.run_variance(replace(rules, seed_sd=0.0)) == 0.01).all(), "the examples alone bound it from below"


def test_more_noise_of_a_run_is_believed_less() -> None:
    calm, busy = (decision.observe(after(), 0, 0.51, E2, RULES, extra) for extra in (0.0, 0.02**2))
    assert 0 < busy.delta < calm.delta
    assert busy.belief.mean == pytest.approx(0.475, abs=float(calm.belief.mean) - 0.475)
    assert decision.baseline(0.475, 1319, RULES, 0.02**2).sd > 1.2 * after().sd


def test_pairing_is_the_variance_of_one_run_from_the_spread_of_differences() -> None:
    run, parent = [1.0, 0.0, 1.0, 0.0], [0.5, 0.0, 1.0, 1.0]
    assert decision.pairing(run, parent) == pytest.approx(np.var([0.5, 0, 0, -1], ddof=1) / (4 * 2))
    assert decision.pairing([1.0], [0.0]) == 0.0


@BOTH
def test_a_keep_whose_children_disappoint_is_taken_back(rules: DecisionRules) -> None:
    belief = after(0.495, rules=rules)
    assert belief.incumbent == 1
    children = 0
    while belief.incumbent == 1 and children < 20:
        belief = after(0.462, start=belief, rules=rules)
        children += 1
    assert 2 <= children < 15
    assert belief.incumbent == 0
    assert belief.sets.shape[-2] == 2


def test_a_child_of_another_config_than_the_incumbent_must_beat_both() -> None:
    belief = after(0.520)
    below, between, best = (decision.observe(belief, 0, score, E2, RULES) for score in (0.470, 0.490, 0.540))
    assert (below.keep, between.keep, best.keep) == (False, False, True)
    assert between.delta > 0
    assert decision.settle(between, between.keep, RULES).incumbent == 1, "the parent does not become the incumbent"
    judgement = decision.judge(between, np.ones(4), np.zeros(4), [1, 7], RULES)
    assert judgement.taken_back_to is None
    assert judgement.incumbent_score == between.belief.expected[0]
    assert judgement.why == f"expected {100 * between.delta:+.1f} pp over 0001 after 1 run"


@pytest.mark.parametrize(("third", "incumbent"), [(0.5005, 1), (0.5015, 2)])
def test_a_discard_goes_back_to_what_beats_the_incumbent_by_a_margin(third: float, incumbent: int) -> None:
    known = replace(in_one_world([0.475, 0.500, third, 0.400]), incumbent=1)
    tested = decision.Tested(replace(known, sets=known.sets[:3]), known.sets[3], 0, np.array(0.5))
    assert decision.settle(tested, tested.keep, RULES).incumbent == incumbent


def test_what_the_ledger_says_was_kept_is_the_incumbent() -> None:
    tested = first_run(0.470)
    assert not tested.keep
    assert decision.settle(tested, True, RULES).incumbent == 1


def test_nothing_is_divided_by_where_all_answers_are_the_same() -> None:
    judgement = decision.judge(first_run(0.48), np.ones(4), np.ones((2, 4)), [1], RULES)
    assert judgement.diagnostics == {"paired_delta": 0.0}


@dataclass(frozen=True)
class Tried:
    """What a new idea was tried on, beside the config that it is compared with; the ideas that it replaces."""

    parent: int
    made_from: Floats
    replaced: Floats


@dataclass(frozen=True)
class World:
    """What the textbook says of one of them after a run; moments are of the belief's numbers with the new idea's."""

    evidence: float
    mean: Floats
    covariance: Floats
    p_better: float


def conditioned(
    belief: Posterior, world: int, tried: Tried, score: float, s2: float, shares: Sequence[float], rules: DecisionRules
) -> World:
    """Each kind's joint Gaussian of numbers and effect conditioned on the run, then the moments of the mixture."""
    k = belief.means.shape[-1]
    run, apart = np.append(tried.made_from, 1), np.append(tried.made_from - belief.set_of(tried.parent), 1)
    numbers = np.vstack([np.eye(k + 1)[:k], np.append(tried.replaced, 1)])  # a new idea stands for what it replaces
    weights, means, covariances, better = [], [], [], []
    for share, (effect, sd) in zip(shares, rules.kinds, strict=True):
        m, v = np.append(belief.means[world], effect * rules.prior_sd), np.zeros((k + 1, k + 1))
        v[:k, :k], v[k, k] = belief.covariance[world], (sd * rules.prior_sd) ** 2
        innovation, surprise = run @ v @ run + s2, score - run @ m
        weights.append(share * NormalDist(0, math.sqrt(innovation)).pdf(surprise))
        m, v = m + v @ run * surprise / innovation, v - np.outer(v @ run, run @ v) / innovation
        means.append(numbers @ m)
        covariances.append(numbers @ v @ numbers.T)
        better.append(1 - NormalDist(apart @ m, math.sqrt(apart @ v @ apart)).cdf(0))
    w = np.array(weights) / sum(weights)
    mean = w @ np.array(means)
    spread = [c + np.outer(m - mean, m - mean) for m, c in zip(means, covariances, strict=True)]
    return World(sum(weights), mean, np.tensordot(w, np.array(spread), axes=1), float(w @ better))


@BOTH
@pytest.mark.parametrize(
    ("parent", "made_from", "replaced"),
    [
        (0, [1, 0, 0, 0], [0, 0, 0, 0]),
        (1, [1, 1, 0, 0], [0, 0, 0, 0]),
        (2, [1, 1, 1, 0], [0, 0, 0, 0]),
        (2, [1, 1, 1, 0], [0, 0, 1, 0]),
        (2, [1, 0, 1, 1], [0, 0, 1, 1]),
        (0, [1, 0, 0, 1], [0, 0, 0, 0]),
    ],
)
def test_a_run_is_conditioned_on_kind_by_kind_and_world_by_world(
    parent: int, made_from: list[int], replaced: list[int], rules: DecisionRules
) -> None:
    """Against the textbook: conditioned in each world, and the worlds weighed by what they said of the run."""
    belief, score = after(0.490, 0.510, 0.480, rules=rules), 0.520
    assert belief.sets.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], "the last is a discard"
    assert belief.incumbent == 2
    tried = Tried(parent, np.array(made_from, float), np.array(replaced, float))
    told = {"made_from": tried.made_from, "replaced": tried.replaced}
    if made_from == belief.sets[parent].tolist() and not any(replaced):
        told = {}  # as by hand
    tested = decision.observe(belief, parent, score, E2, rules, **told)
    close = 1e-12 if rules is ONE_WORLD else 1e-7  # a share of 0 is one of 1e-9
    shares = [shares for _, shares in rules.priors for _ in rules.noises]
    assert len(shares) == len(belief.weights)
    s2 = tested.belief.run_variance(rules)
    worlds = [conditioned(belief, i, tried, score, float(s2[i]), each, rules) for i, each in enumerate(shares)]
    weights = belief.weights * [world.evidence for world in worlds]
    weights /= weights.sum()
    np.testing.assert_allclose(tested.belief.weights, weights, atol=close)
    np.testing.assert_allclose(tested.belief.means, [world.mean for world in worlds], atol=close)
    np.testing.assert_allclose(tested.belief.covariance, [world.covariance for world in worlds], atol=close)
    mean = sum(w * world.mean for w, world in zip(weights, worlds, strict=True))
    apart = [world.mean - mean for world in worlds]
    spread = [world.covariance + np.outer(m, m) for world, m in zip(worlds, apart, strict=True)]
    covariance = np.tensordot(weights, np.array(spread), axes=1)
    sets = np.pad(belief.sets, ((0, 0), (0, 1)))
    np.testing.assert_allclose(tested.belief.expected, sets @ mean, atol=close)
    assert tested.belief.sd == pytest.approx(math.sqrt(sets[2] @ covariance @ sets[2]), abs=close), "of the incumbent"
    assert tested.candidate.tolist() == [*(tried.made_from - tried.replaced), 1]
    difference = tested.candidate - sets[parent]
    assert tested.expected == pytest.approx(tested.candidate @ mean, abs=close)
    assert tested.delta == pytest.approx(difference @ mean, abs=close)
    assert tested.delta_stderr == pytest.approx(math.sqrt(difference @ covariance @ difference), abs=close)
    better = float(weights @ [world.p_better for world in worlds])
    calibrated = NormalDist().cdf(rules.calibration * NormalDist().inv_cdf(better))
    assert tested.p_better == pytest.approx(calibrated, abs=close)


@BOTH
def test_a_batch_is_the_same_campaigns_one_by_one(rules: DecisionRules) -> None:
    rng, size = np.random.default_rng(0), 12
    runs = rng.normal(0.475, 0.02, size)
    batch, alone = decision.baseline(runs, 1319, rules), [decision.baseline(one, 1319, rules) for one in runs]
    for _ in range(32):
        score, e2 = rng.normal(0.485, 0.02, size), rng.uniform(0, 2 * E2, size)
        parent = np.array([rng.integers(belief.sets.shape[-2]) for belief in alone])
        tested = decision.observe(batch, parent, score, e2, rules)
        batch = decision.settle(tested, tested.keep, rules)
        for i, belief in enumerate(alone):
            one = decision.observe(belief, int(parent[i]), score[i], e2[i], rules)
            for value in ("delta", "delta_stderr", "p_better", "keep"):
                assert getattr(tested, value)[i] == pytest.approx(getattr(one, value), abs=1e-12), value
            alone[i] = decision.settle(one, one.keep, rules)
    sizes = [belief.sets.shape for belief in alone]
    assert min(sizes) < max(sizes) == batch.sets.shape[1:], "no campaign is shorter than another"
    assert min(k for _, k in sizes) < batch.ideas.shape[1], "none has forgotten more than another"
    for i, ((c, k), belief) in enumerate(zip(sizes, alone, strict=True)):
        np.testing.assert_allclose(batch.weights[i], belief.weights, atol=1e-12)
        np.testing.assert_allclose(batch.means[i, :, :k], belief.means, atol=1e-12)
        assert (batch.ideas[i, k:] == UNUSED).all()
        assert not batch.means[i, :, k:].any()
        np.testing.assert_allclose(batch.covariance[i, :, :k, :k], belief.covariance, atol=1e-12)
        assert not batch.covariance[i, :, k:].any() | batch.covariance[i, :, :, k:].any()
        assert batch.sets[i, :c, :k].tolist() == belief.sets.tolist()
        assert not batch.sets[i, c:].any() | batch.sets[i, :, k:].any()
        assert batch.incumbent[i] == belief.incumbent
        assert (batch.mean[i], batch.sd[i]) == pytest.approx((belief.mean, belief.sd), abs=1e-12)

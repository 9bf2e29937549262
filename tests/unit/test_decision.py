"""The decision rule with GSM8K's constants on 1,319 examples; its belief against the textbook."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nightshift.campaign import decision
from nightshift.campaign.decision import Belief
from nightshift.campaign.version_1 import DECISION
from nightshift.decision_rules import DecisionRules
from nightshift.records import Verdict

RULES = DecisionRules()
CAMPAIGNS = Path(__file__).parents[2] / "benchmarks" / "campaigns"
E2 = 0.4 * 0.25 / 1319  # what `pairing` sees in two ordinary runs


def after(*scores: float, start: Belief | None = None) -> Belief:
    """The belief after children of the incumbents that scored so, on a baseline of 0.475 twice."""
    belief = start or decision.baseline([0.475, 0.475], 1319, RULES)
    for score in scores:
        tested = decision.observe(belief, belief.incumbent, score, E2, RULES)
        belief = decision.settle(tested, tested.keep, RULES)
    return belief


def first_run(score: float) -> decision.Tested:
    return decision.observe(after(), 0, score, E2, RULES)


@pytest.mark.parametrize(
    ("gain_pp", "keep"), [(-3.0, False), (-0.5, False), (0.0, False), (0.9, True), (2.4, True), (9.0, True)]
)
def test_reading_of_a_first_run(gain_pp: float, keep: bool) -> None:
    assert first_run(0.475 + gain_pp / 100).keep == keep


def test_a_tie_with_the_parent_is_no_keep() -> None:
    tested = first_run(0.480)
    assert not replace(tested, belief=replace(tested.belief, means=np.array([0.475, 0.475]))).keep


def test_a_lucky_score_is_shrunk_to_the_tested_value() -> None:
    # docs/history/decision-rule.md, section 7 step 7: "after a 51.0 on 47.5 the tested m was 49.1".
    assert 100 * after(0.51).mean == pytest.approx(49.1, abs=0.25)


def test_a_discard_moves_the_incumbent_belief_and_is_forgotten() -> None:
    belief = after(0.465)
    assert belief.mean < 0.475
    assert belief.variance < after().variance
    assert belief.means.shape == (1,)


def test_a_collapse_hardly_moves_the_incumbent_and_a_leap_is_believed_at_once() -> None:
    collapse, leap = first_run(0.05), first_run(0.575)
    assert collapse.belief.mean == pytest.approx(0.475, abs=0.004)
    assert collapse.delta == pytest.approx(-0.42, abs=0.02)
    assert leap.delta == pytest.approx(0.10, abs=0.01)
    assert leap.p_better > 0.99


def test_the_baseline_s_runs_inform_the_run_variance() -> None:
    wild, calm = (decision.baseline(scores, 1319, RULES) for scores in ([0.40, 0.55], [0.475, 0.475]))
    assert wild.mean == pytest.approx(calm.mean)
    assert wild.squares == pytest.approx(0.15**2 / 2)
    prior = RULES.seed_sd**2 + 0.4 * 0.475 * 0.525 / 1319
    assert wild.run_variance(RULES) == pytest.approx((RULES.seed_df * prior + wild.squares) / (RULES.seed_df + 1))
    assert calm.variance == pytest.approx(calm.run_variance(RULES) / 2)
    noisy = replace(calm, pairing_variance=0.01)
    assert noisy.run_variance(replace(RULES, seed_sd=0.0)) == 0.01, "the examples alone bound it from below"


def test_pairing_is_the_variance_of_one_run_from_the_spread_of_differences() -> None:
    run, parent = [1.0, 0.0, 1.0, 0.0], [0.5, 0.0, 1.0, 1.0]
    assert decision.pairing(run, parent, 2) == pytest.approx(np.var([0.5, 0, 0, -1], ddof=1) / (4 * 1.5))
    assert decision.pairing([1.0], [0.0], 1) == 0.0


def test_a_keep_whose_children_disappoint_is_taken_back() -> None:
    belief = after(0.495)
    assert belief.incumbent == 1
    children = 0
    while belief.incumbent == 1 and children < 20:
        belief = after(0.462, start=belief)
        children += 1
    assert 2 <= children < 15
    assert belief.incumbent == 0
    assert len(belief.means) == 2


def test_a_child_of_another_config_than_the_incumbent_must_beat_both() -> None:
    belief = after(0.520)
    below, between, best = (decision.observe(belief, 0, score, E2, RULES) for score in (0.470, 0.490, 0.540))
    assert (below.keep, between.keep, best.keep) == (False, False, True)
    assert between.delta > 0
    assert decision.settle(between, between.keep, RULES).incumbent == 1, "the parent does not become the incumbent"
    judgement = decision.judge(between, np.ones(4), np.zeros(4), [1, 7], RULES)
    assert (judgement.verdict, judgement.taken_back_to) == (Verdict.DISCARD, None)
    assert judgement.incumbent_score == between.belief.means[0]
    assert judgement.why == f"expected {100 * between.delta:+.1f} pp over 0001 after 1 run"


@pytest.mark.parametrize(("third", "incumbent"), [(0.5005, 1), (0.5015, 2)])
def test_a_discard_goes_back_to_what_beats_the_incumbent_by_a_margin(third: float, incumbent: int) -> None:
    means, zeros = np.array([0.475, 0.500, third, 0.400]), np.zeros((4, 4))
    tested = decision.Tested(replace(after(), means=means, covariance=zeros, incumbent=1), 0, np.array(0.5))
    assert decision.settle(tested, tested.keep, RULES).incumbent == incumbent


def test_what_the_ledger_says_was_kept_is_the_incumbent() -> None:
    tested = first_run(0.470)
    assert not tested.keep
    assert decision.settle(tested, True, RULES).incumbent == 1


def test_nothing_is_divided_by_where_all_answers_are_the_same() -> None:
    judgement = decision.judge(first_run(0.48), np.ones(4), np.ones((2, 4)), [1], RULES)
    assert judgement.diagnostics == {"paired_delta": 0.0}


@pytest.mark.parametrize("parent", [0, 1, 2])
def test_a_run_is_conditioned_on_kind_by_kind(parent: int) -> None:
    """Against the textbook: each kind's joint Gaussian conditioned on the run, then the moments of the mixture."""
    belief, score = after(0.490, 0.510), 0.520
    assert (len(belief.means), belief.incumbent) == (3, 2)
    tested = decision.observe(belief, parent, score, E2, RULES)
    s2, run = float(tested.belief.run_variance(RULES)), np.zeros(4)
    run[[parent, 3]] = 1  # a run sees its parent plus the effect
    configs = np.vstack([np.eye(4)[:3], run])
    weights, means, covariances, better = [], [], [], []
    for share, effect, sd in RULES.ideas:
        m, v = np.append(belief.means, effect * RULES.prior_sd), np.zeros((4, 4))
        v[:3, :3], v[3, 3] = belief.covariance, (sd * RULES.prior_sd) ** 2
        innovation, surprise = run @ v @ run + s2, score - run @ m
        weights.append(share * NormalDist(0, math.sqrt(innovation)).pdf(surprise))
        m, v = m + v @ run * surprise / innovation, v - np.outer(v @ run, run @ v) / innovation
        means.append(configs @ m)
        covariances.append(configs @ v @ configs.T)
        better.append(1 - NormalDist(m[3], math.sqrt(v[3, 3])).cdf(0))
    w = np.array(weights) / sum(weights)
    expected = w @ np.array(means)
    spread = [c + np.outer(m - expected, m - expected) for m, c in zip(means, covariances, strict=True)]
    covariance = np.tensordot(w, np.array(spread), axes=1)
    difference = np.eye(4)[3] - np.eye(4)[parent]
    np.testing.assert_allclose(tested.belief.means, expected, atol=1e-12)
    np.testing.assert_allclose(tested.belief.covariance, covariance, atol=1e-12)
    assert tested.delta == pytest.approx(difference @ expected, abs=1e-12)
    assert tested.delta_stderr == pytest.approx(math.sqrt(difference @ covariance @ difference), abs=1e-12)
    calibrated = NormalDist().cdf(0.9 * NormalDist().inv_cdf(float(w @ better)))
    assert tested.p_better == pytest.approx(calibrated, abs=1e-12)


def test_a_batch_is_the_same_campaigns_one_by_one() -> None:
    rng, size = np.random.default_rng(0), 12
    runs = rng.normal(0.475, 0.02, (size, 3))
    batch, alone = decision.baseline(runs, 1319, RULES), [decision.baseline(one, 1319, RULES) for one in runs]
    for _ in range(15):
        score, e2 = rng.normal(0.485, 0.02, size), rng.uniform(0, 2 * E2, size)
        parent = np.array([rng.integers(len(belief.means)) for belief in alone])
        tested = decision.observe(batch, parent, score, e2, RULES)
        batch = decision.settle(tested, tested.keep, RULES)
        for i, belief in enumerate(alone):
            one = decision.observe(belief, int(parent[i]), score[i], e2[i], RULES)
            for value in ("delta", "delta_stderr", "p_better", "keep"):
                assert getattr(tested, value)[i] == pytest.approx(getattr(one, value), abs=1e-12), value
            alone[i] = decision.settle(one, one.keep, RULES)
    sizes = [len(belief.means) for belief in alone]
    assert min(sizes) < max(sizes) == batch.means.shape[1], "no campaign is shorter than another"
    for i, (k, belief) in enumerate(zip(sizes, alone, strict=True)):
        np.testing.assert_allclose(batch.means[i], [*belief.means, *[-np.inf] * (max(sizes) - k)], atol=1e-12)
        np.testing.assert_allclose(batch.covariance[i, :k, :k], belief.covariance, atol=1e-12)
        assert not batch.covariance[i, k:].any() | batch.covariance[i, :, k:].any()
        assert batch.incumbent[i] == belief.incumbent


@pytest.mark.parametrize("name", ["random-0", "tpe-0"])
def test_the_recorded_judgements_are_made_again(name: str) -> None:
    """Version 0.1.0 wrote them with all digits, by another program."""
    rules, belief, kept, runs_of = DECISION["arithmetic-trl"], None, [], list[NDArray[np.float64]]()
    records = [json.loads(path.read_text()) for path in sorted((CAMPAIGNS / name).glob("*/record.json"))]
    for record in records:
        recorded: dict[str, Any] = record["judgement"]
        recorded["diagnostics"].pop("mcnemar_z", None)  # which is wrong of weighted scores, and nobody reads
        runs = np.array([run["evaluation"]["scores"] for run in record["runs"] if run["evaluation"]])
        if record["status"] == Verdict.CRASH:
            continue
        if belief is None:
            belief = decision.baseline(runs.mean(axis=1), runs.shape[1], rules)
            kept, runs_of = [record["number"]], [runs]
            continue
        parent = kept.index(record["parent"])
        assert parent == belief.incumbent
        e2 = decision.pairing(runs[0], runs_of[parent].mean(axis=0), len(runs_of[parent]))
        tested = decision.observe(belief, parent, runs[0].mean(), e2, rules)
        judgement = decision.judge(tested, runs[0], runs_of[parent], kept, rules)
        for field, value in recorded.items():
            made = getattr(judgement, field)
            assert made == (pytest.approx(value, abs=1e-9) if isinstance(value, float | dict) else value), field
        belief = decision.settle(tested, tested.keep, rules)
        if tested.keep:
            kept.append(record["number"])
            runs_of.append(runs)
    assert len(records) == 30
    assert len(kept) > 1

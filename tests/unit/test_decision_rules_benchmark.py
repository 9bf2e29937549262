"""benchmarks/decision_rules.py: its array form is the product's rule, its worlds are those of the document."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightshift.campaign import decision
from nightshift.records import Side
from nightshift.records import DecisionRules

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import decision_rules  # noqa: E402
from remembering_rule import RememberingRule, to_front  # noqa: E402
from simulated_nights import Player, World, simulate  # noqa: E402
from vectorised_rule import CANDIDATE, NOBODY, FormerRules, Rule, side_to_run  # noqa: E402

RULES = DecisionRules()
SIDES = {1: Side.CANDIDATE, 2: Side.INCUMBENT}


def paired_variance(scores: Sequence[float], incumbent_runs: tuple[tuple[float, ...], ...]) -> float:
    """e2 of one run, as decision.py takes it from the per-example scores."""
    difference = np.asarray(scores) - np.asarray(incumbent_runs).mean(axis=0)
    return float(difference.var(ddof=1)) / (len(scores) * (1 + 1 / len(incumbent_runs)))


def test_the_array_form_is_decision_py_to_1e_9() -> None:
    asked = [replayed_on_arrays(seed) for seed in range(8)]
    assert sum(of_candidate for of_candidate, _ in asked) > 10, "the campaigns show no replicate"
    assert sum(of_incumbent for _, of_incumbent in asked) > 3


def replayed_on_arrays(seed: int) -> tuple[int, int]:
    """40 experiments of one campaign on 0/1 vectors: leaps, collapses of either side, up to 6 runs each.

    Returns how often a further run of candidate and of incumbent was asked for.
    """
    rng, n = np.random.default_rng(seed), 150
    rules = replace(RULES, run_value=0.00005)
    truth = 0.475
    chain = [truth]

    def run(level: float, collapses: float = 0.05) -> list[float]:
        level += rng.normal(0, 0.02) - (0.3 if rng.random() < collapses else 0)
        return (rng.random(n) < np.clip(level, 0.02, 0.98)).astype(float).tolist()

    first = [run(truth), run(truth)]
    belief, arrays = decision.baseline(first, rules), RememberingRule(rules, memory=30)
    arrays.begin(np.array([[np.mean(scores) for scores in first]]), n)
    yes, asked = np.array([True]), dict.fromkeys(Side, 0)
    for index in range(40):
        candidate = truth + (0.30 if index % 13 == 5 else rng.normal(-0.01, 0.03))
        comparison = decision.compare(belief, rules)
        arrays.compare()
        side: Side | None = Side.CANDIDATE
        for runs in range(1, 7):
            scores = run(candidate) if side is Side.CANDIDATE else run(truth, collapses=0.3)
            y = np.array([np.mean(scores)])
            if side is Side.CANDIDATE:
                arrays.observe_candidate(yes, y, np.array([paired_variance(scores, comparison.incumbent_runs)]))
            else:
                arrays.observe_incumbent(yes, y)
            assert side is not None
            comparison = decision.observe(comparison, side, scores, rules)
            choice = decision.decide(comparison, rules, can_replicate=runs < 6)
            keep, whose = arrays.decide(np.array([runs < 6]))
            assert (bool(keep[0]), SIDES.get(int(whose[0]))) == (choice.keep, choice.replicate)
            assert arrays.delta[0] == pytest.approx(comparison.delta, abs=1e-9)
            assert arrays.p_better[0] == pytest.approx(comparison.p_better, abs=1e-9)
            assert arrays.cov[0, 0, 0] == pytest.approx(comparison.va, abs=1e-9)
            assert arrays.run_variance()[0] == pytest.approx(comparison.noise.variance(rules), abs=1e-9)
            side = choice.replicate
            if side is None:
                break
            asked[side] += 1
        arrays.settle(yes, keep)
        belief = decision.settle(comparison, choice.keep, rules)
        chain += [candidate] * choice.keep
        truth = chain[belief.incumbent]
        assert arrays.reported[0] == pytest.approx(belief.mean, abs=1e-9)
    return asked[Side.CANDIDATE], asked[Side.INCUMBENT]


def test_a_collapsed_incumbent_is_set_aside_once_on_arrays_too() -> None:
    n, yes = 100, np.array([True])
    runs = {mean: (1.0,) * mean + (0.0,) * (n - mean) for mean in (47, 48, 5)}
    arrays = RememberingRule(RULES, 2)
    arrays.begin(np.array([[0.47, 0.48]]), n)
    arrays.compare()
    comparison = decision.compare(decision.baseline([runs[47], runs[48]], RULES), RULES)
    arrays.observe_candidate(yes, np.array([0.48]), np.array([paired_variance(runs[48], (runs[47], runs[48]))]))
    comparison = decision.observe(comparison, Side.CANDIDATE, runs[48], RULES)
    for _ in range(3):
        arrays.observe_incumbent(yes, np.array([0.05]))
        comparison = decision.observe(comparison, Side.INCUMBENT, runs[5], RULES)
        assert arrays.collapses[0] == comparison.num_collapses == 1
        assert arrays.mean[0, 0] == pytest.approx(comparison.a, abs=1e-9)
    assert comparison.a < 0.465, "the second collapse was set aside too"


def test_a_memory_of_one_and_one_kind_of_idea_is_the_former_rule_without_gate_and_leap() -> None:
    plain = FormerRules(gate=math.inf, leap=math.inf)
    before, memory = Rule(plain), RememberingRule(plain, 1, ((1.0, plain.prior_mean / plain.prior_sd, 1.0),))
    nights = [simulate(Player(rule), World(), 50, 3) for rule in (before, memory)]
    np.testing.assert_allclose(nights[0].gain, nights[1].gain, atol=1e-12)
    np.testing.assert_allclose(nights[0].bias, nights[1].bias, atol=1e-9)


def test_the_first_run_of_a_candidate_is_conditioned_on_component_by_component() -> None:
    """Against the textbook: condition each component's Gaussian on the run, then take the mixture's moments."""
    rule, yes = RememberingRule(RULES, memory=3), np.array([True])
    rule.begin(np.array([[0.47, 0.48]]), 1000)
    e2 = np.array([0.4 * 0.25 / 1000])
    for y in (0.49, 0.52, 0.46):
        rule.compare()
        rule.observe_candidate(yes, np.array([y]), e2)
        rule.settle(yes, np.array([True]))
    rule.compare()
    mean, cov, y = rule.mean[0, :3].copy(), rule.cov[0, :3, :3].copy(), 0.505
    assert np.isfinite(mean).all()
    rule.observe_candidate(yes, np.array([y]), e2)
    s2, h = float(rule.run_variance()[0]), np.array([1.0, 0, 0, 1])  # a run sees its parent plus the effect
    to_scores = np.vstack([np.eye(4)[:3], h])
    weights, means, covs = [], [], []
    for share, shift, sd in RULES.ideas:
        m, v = np.append(mean, shift * RULES.prior_sd), np.zeros((4, 4))
        v[:3, :3], v[3, 3] = cov, (sd * RULES.prior_sd) ** 2
        innovation = h @ v @ h + s2
        weights.append(share * math.exp(-0.5 * (y - h @ m) ** 2 / innovation) / math.sqrt(innovation))
        means.append(to_scores @ (m + v @ h * (y - h @ m) / innovation))
        covs.append(to_scores @ (v - np.outer(v @ h, h @ v) / innovation) @ to_scores.T)
    w = np.array(weights) / sum(weights)
    expected = w @ np.array(means)
    spread = [c + np.outer(m - expected, m - expected) for m, c in zip(means, covs, strict=True)]
    np.testing.assert_allclose(rule.mean[0], expected, atol=1e-12)
    np.testing.assert_allclose(rule.cov[0], np.tensordot(w, np.array(spread), axes=1), atol=1e-12)


def test_a_keep_is_taken_back_when_its_children_disappoint() -> None:
    rule, yes = RememberingRule(RULES, memory=4), np.array([True])
    rule.begin(np.array([[0.475, 0.475]]), 1319)
    e2 = np.array([0.4 * 0.25 / 1319])
    rule.compare()
    rule.observe_candidate(yes, np.array([0.500]), e2)
    assert rule.settle(yes, rule.decide(yes & False)[0])[0] == 0  # kept
    assert 0.475 < rule.reported[0] < 0.500
    disappointments, back = 0, 0
    while back == 0 and disappointments < 19:
        disappointments += 1
        rule.compare()
        rule.observe_candidate(yes, np.array([0.465]), e2)
        keep, side = rule.decide(yes & False)
        assert side[0] == NOBODY
        back = rule.settle(yes, keep)[0]
    assert 1 < disappointments < 19, "taken back at once, or never"
    assert rule.num_runs[0, 0] == 2  # the baseline again


def test_to_front_keeps_the_order_of_the_others() -> None:
    assert to_front(np.array([0, 2, 3]), 4).tolist() == [[0, 1, 2, 3], [2, 0, 1, 3], [3, 0, 1, 2]]


# Section 3 and 4 of docs/decision-rule.md, 8,000 and 4,000 campaigns; standard error here about 0.06.
PUBLISHED = [
    ("keep above best, n=200", {}, 0.78, 5.43, 47.5),
    ("keep above best, n=1319", {}, 1.57, 3.07, 46.4),
    ("always two seeds", {}, 1.45, 1.91, 24.1),
    ("before", {}, 2.77, 0.32, 36.5),
    ("before, no replicates", {}, 2.77, 0.23, 45.3),
    ("before", {"seed_sd": 0.02}, 1.98, None, None),
    ("keep above best, n=1319", {"seed_sd": 0.005}, 2.76, None, None),
]


@pytest.mark.parametrize(("name", "change", "gain", "bias", "ideas"), PUBLISHED)
def test_the_simulator_gives_the_document_s_figures(
    name: str, change: dict[str, float], gain: float, bias: float | None, ideas: float | None
) -> None:
    night = simulate(decision_rules.players()[name], replace(World(), **change), 1000, 5)
    row = decision_rules.figures(night)
    assert row["gain"] == pytest.approx(gain, abs=0.25)
    assert bias is None or row["bias"] == pytest.approx(bias, abs=0.3)
    assert ideas is None or row["ideas"] == pytest.approx(ideas, abs=0.8)


def test_every_rule_has_the_same_time() -> None:
    """Runs that ended, times what a run takes at least, fit into the night and nearly fill it."""
    for name, player in decision_rules.players().items():
        night = simulate(player, replace(World(), crashes=0.0), 100, 5)
        seconds = 675 + 0.0152 * player.num_examples
        used = (night.ideas + night.replicates + player.baseline_runs) * seconds + 15 * night.ideas
        if player.early_stop is None:
            assert 0.9 * 32400 < used <= 32400, name
        assert (night.taken_back > 0) == (name.startswith("ours") and not name.endswith("one")), name


def test_the_share_of_helpful_ideas_changes_and_the_rest_keeps_its_proportions() -> None:
    world = World().with_helpful(0.10)
    harmful = 1 - world.helpful - world.neutral
    assert world.helpful == 0.10
    assert world.neutral / harmful == pytest.approx(0.33 / 0.40)


def test_a_candidate_is_run_again_before_the_incumbent_when_both_are_worth_the_same() -> None:
    same, none = np.array([1.0]), np.array([0.0])
    assert side_to_run(RULES, np.array([True]), (same, same), (none, none))[0] == CANDIDATE


def test_the_command_prints_the_tables_and_writes_them(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, BENCHMARKS / "decision_rules.py", "--campaigns", "5", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(output.read_text())
    assert set(result["rules"]) == set(result["gains"]) == set(decision_rules.players())
    assert set(result["shares"]) == set(result["rules"]) - {"ours, early stop"}
    assert set(result["gains"]["ours"]) == set(decision_rules.WORLDS)
    assert {"date", "machine", "command"} <= set(result)
    for title in ("default world", "true gain, pp", "share of best", "p_better in the default world"):
        assert f"\n{title}" in f"\n{done.stdout}"

"""benchmarks/decision_rules.py: its worlds are what it says, and its nights are played by the package's rule."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from nightshift.campaign.next_run import Run
from nightshift.campaign.records import Action, Change

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import decision_rules  # noqa: E402
from decision_rules import RULES, START, WORLDS, AboveBest, Conditions, MovingBar, Nature, World, kept_set, play  # noqa: E402


def test_the_proposed_changes_have_the_shares_and_effects_of_the_world() -> None:
    nature = Nature(World(), (0, 0))
    proposals = [nature.propose() for _ in range(4000)]
    helps = np.array([proposal.helps for proposal in proposals if proposal.helps > 0])
    harms = np.array([proposal.other for proposal in proposals])
    assert len(helps) / 4000 == pytest.approx(0.27, abs=0.02)
    assert (helps.min(), helps.max()) == pytest.approx((0.002, 0.02), abs=1e-4)
    assert (harms < -0.05).mean() == pytest.approx(0.4 * (0.1 + 0.9 * np.exp(-0.05 / 0.015)), abs=0.02)
    assert np.mean([proposal.crash_seconds is not None for proposal in proposals]) == pytest.approx(0.08, abs=0.02)


def test_the_true_score_of_a_config_is_the_sum_of_its_changes_until_nothing_helps_any_more() -> None:
    nature = Nature(World(same_effect=-0.003), (0, 0))
    changes = [nature.propose().change for _ in range(3)]
    others = sum(proposal.other for proposal in nature.proposals)
    assert nature.truth(changes)[0] == pytest.approx(START + others)
    nature.proposals[0].helps, nature.proposals[1].helps = 0.15, 0.02
    nature.proposals[0].other = nature.proposals[1].other = 0.0
    assert nature.truth(changes[:2])[0] == pytest.approx(START + 0.15)


def test_scores_scatter_by_seeds_and_examples_and_drift_with_the_night() -> None:
    nature = Nature(World(drift=0.03), (0, 0))
    scores = [nature.measure((), 9 * 3600.0) for _ in range(4000)]
    assert np.mean(scores) == pytest.approx(START + 0.03, abs=0.001)
    assert np.std(scores) == pytest.approx(np.sqrt(0.0125**2 + 0.35 * START * (1 - START) / 1319), rel=0.05)


@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_night_is_the_same_for_the_same_seed_and_ends_with_a_gain(num_slots: int) -> None:
    figures = play(WORLDS["half help"], (1, 1), Conditions(num_slots), kept_set)
    assert figures == play(WORLDS["half help"], (1, 1), Conditions(num_slots), kept_set)
    assert figures["gain"] > 0
    assert 44 * num_slots <= figures["runs"] <= 52 * num_slots


def test_a_slow_proposer_costs_runs_unless_it_works_ahead() -> None:
    world = World(crashes=0.0)
    seconds = [15.0, 180.0]
    after = [play(world, (1, 1), Conditions(answer_seconds=answer), kept_set)["runs"] for answer in seconds]
    ahead = [play(world, (1, 1), Conditions(answer_seconds=answer, ahead=True), kept_set)["runs"] for answer in seconds]
    # A run takes 695 s, and 32,400 s hold 46 of them. The baseline and the four last runs need no answer.
    assert ahead == [46, 46]
    assert after == [45, 38]


def observe_in_turn(rule: AboveBest, scores: list[float]) -> list[int]:
    """Run one candidate a score on the incumbent. Return the numbers of the kept candidates."""
    for number, score in enumerate(scores, start=1):
        rule.observe(Run(kept=rule.kept, new=Change(experiment=number, keys={f"key_{number}": "1"})), score, 0.0)
    return [change.experiment for change in rule.kept]


def test_the_rule_best_keeps_a_candidate_above_the_best_score_so_far() -> None:
    rule = AboveBest(0.500)
    assert observe_in_turn(rule, [0.500, 0.510, 0.505, 0.480, 0.509, 0.511]) == [2, 6]
    assert rule.gain()[0] == pytest.approx(0.011)


def test_the_rule_bar_raises_and_lowers_the_bar() -> None:
    rule = MovingBar(0.500)
    # 0.510 raises the bar to 0.504, and 0.505 to 0.5044. 0.497 is within 0.8 pp. 0.400 lowers the bar by 0.2 pp.
    assert observe_in_turn(rule, [0.510, 0.505, 0.497, 0.400, 0.502, 0.503]) == [1, 2, 6]
    assert rule.gain()[0] == pytest.approx(0.0024 + 0.4 * 0.0006)


def test_a_keep_from_an_older_parent_makes_the_config_of_the_run_the_incumbent() -> None:
    first, second = (Change(experiment=number, keys={f"key_{number}": "1"}) for number in (1, 2))
    rule = AboveBest(0.500)
    rule.observe(Run(new=first), 0.510, 0.0)
    decisions = rule.observe(Run(new=second), 0.520, 0.0)
    assert [(decision.change, decision.action) for decision in decisions] == [
        (first, Action.REVERT),
        (second, Action.KEEP),
    ]
    assert rule.kept == (second,)


def test_every_rule_meets_the_same_changes_noise_and_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    natures: list[Nature] = []

    def record(world: World, seed: tuple[int, int]) -> Nature:
        natures.append(Nature(world, seed))
        return natures[-1]

    monkeypatch.setattr(decision_rules, "Nature", record)
    for make_rule in RULES.values():
        play(World(), (2, 0), Conditions(by_hand=True), make_rule)
    first = natures[0]
    assert len(natures) == len(RULES)
    for nature in natures[1:]:
        assert nature.proposals == first.proposals
        assert nature._noise.bit_generator.state == first._noise.bit_generator.state


def test_the_command_compares_all_rules_night_by_night(tmp_path: Path) -> None:
    output = tmp_path / "nights.json"
    arguments = ["--world", "half help", "--rule", "all", "--bounds", "0.7/0.4", "--nights", "2"]
    result = CliRunner().invoke(decision_rules.main, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    rows = {row["rule"]: row for row in json.loads(output.read_text())["worlds"]}
    assert [*rows] == ["kept-set", "no rider", "best", "bar", "in 0.7 out 0.4"]
    assert rows["kept-set"]["minus_kept_set"] is None
    assert rows["best"]["holds"] is None
    assert rows["best"]["minus_kept_set"] == pytest.approx(rows["best"]["gain"] - rows["kept-set"]["gain"])
    assert rows["in 0.7 out 0.4"]["commits_in"] < rows["kept-set"]["commits_in"]

"""The benchmarks: their simulated nights, tables and figures, of data that is made up here."""

import json
import math
from pathlib import Path
from typing import Any

import aa
import agents
import decision_rules
import proposers
import pytest
from click.testing import CliRunner
from decision_rules import RULES, WORLDS, AboveBest, Conditions, Nature, World, kept_set, play

from nightshift.agents.search import SearchProposer
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Change, Run
from nightshift.config.rules import RuleConstants
from tests.campaigns import tell


@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_night_is_the_same_for_the_same_seed_and_ends_with_a_gain(num_slots: int) -> None:
    figures = play(WORLDS["half help"], (1, 1), Conditions(num_slots), kept_set)
    assert figures == play(WORLDS["half help"], (1, 1), Conditions(num_slots), kept_set)
    assert figures["gain"] > 0
    assert 44 * num_slots <= figures["runs"] <= 52 * num_slots


def test_the_rule_best_keeps_a_candidate_above_the_best_score_so_far() -> None:
    rule = AboveBest(0.500)
    for number, score in enumerate([0.500, 0.510, 0.505, 0.480, 0.509, 0.511], start=1):
        rule.observe(Run(kept=rule.kept, new=Change(experiment=number, keys={f"key_{number}": "1"})), score, 0.0)
    assert [change.experiment for change in rule.kept] == [2, 6]
    assert rule.gain()[0] == pytest.approx(0.011)


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


# Proposers in the emulator


@pytest.mark.slow
def test_a_night_in_the_emulator_is_the_same_for_the_same_seed() -> None:
    first, second = [proposers.Night(SearchProposer("tpe", 1), 1, has_rider=True, num_runs=20) for _ in range(2)]
    figures = first.play()
    assert figures == second.play()
    assert (len(first.campaign.decided), figures["changes"]) == (20, len(first.campaign.kept))
    assert first.campaign.decided[-1].run.kept == first.campaign.kept


def test_changes_that_do_nothing_are_decided_one_by_one() -> None:
    """Of four runs of one config the second scores far above the others, and the third far below."""
    figures = aa.decide([0.50, 0.56, 0.44, 0.50], RuleConstants())
    assert figures["kept"] == 1
    assert figures["standing"] == figures["kept"] + figures["adopted"] - figures["reverted"]


# Nights of agents side by side

LR = "trainer.optim.lr"


def a_night(agent: str, gain: float | None, curve: list[float]) -> dict[str, Any]:
    counts = {"experiments": len(curve), "kept": 1, "crashed": 0, "minutes": 10.0}
    return {"agent": agent, "night": agent, **counts, "believed_pp": curve[-1], "gain_pp": gain, "curve": curve}


def test_the_best_mean_comes_first_and_its_band_is_students() -> None:
    rows = [
        a_night("a", 1.0, [0.0, 1.0]),
        a_night("b", 2.0, [0.0, 3.0]),
        a_night("a", 2.0, [0.0]),
        a_night("c", None, [0.0]),
    ]
    first, second, third = agents.summary(rows)
    assert [row["agent"] for row in (first, second, third)] == ["b", "a", "c"]
    assert (first["gain_pp"], first["low"], first["high"]) == (2.0, None, None)  # one night has no spread
    half = 12.7062 * math.sqrt(0.5) / math.sqrt(2)  # t of one degree of freedom
    assert (second["low"], second["high"]) == (pytest.approx(1.5 - half, abs=1e-3), pytest.approx(1.5 + half, abs=1e-3))
    assert third["gain_pp"] is None  # no certificate is no gain of 0


def test_a_night_is_a_row(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for changes, score in (({}, 0.5), ({LR: 3e-6}, 0.6), ({LR: 1e-5}, 0.4), ({}, 0.6), ({LR: 1e-4}, None)):
        tell(ledger, changes, score)
    row = agents.night(tmp_path, "tpe")
    assert (row["experiments"], row["kept"], row["crashed"]) == (5, 1, 1)
    assert row["gain_pp"] is None  # it has no certificate here
    assert row["curve"][0] == 0
    assert row["curve"][1] > 3
    assert len(row["curve"]) == 4
    assert row["curve"][-1] == pytest.approx(row["believed_pp"])

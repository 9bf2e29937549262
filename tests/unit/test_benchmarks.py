"""The benchmarks: their simulated nights, tables and figures, of data that is made up here."""

import importlib

import pytest
import recorded
from decision_rules import WORLDS, AboveBest, Conditions, kept_set, play
from replay import compare, decision_lines, replay

from nightshift.agents.search import SearchProposer
from nightshift.campaign.commits import incumbent_values
from nightshift.campaign.records import Change, Run
from tests.campaigns import contradictions
from tests.conftest import slow


@pytest.mark.parametrize("num_slots", [1, slow(4)])
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


# Proposers in the emulator


@pytest.mark.slow
def test_a_night_in_the_emulator_is_the_same_for_the_same_seed() -> None:
    proposers = importlib.import_module("proposers")  # it loads scikit-learn
    first, second = [proposers.Night(SearchProposer("tpe", 1), 1, has_rider=True, num_runs=20) for _ in range(2)]
    figures = first.play()
    assert figures == second.play()
    assert (len(first.campaign.decided), figures["changes"]) == (20, len(first.campaign.kept))
    assert first.campaign.decided[-1].run.kept == first.campaign.kept


# Recorded nights, decided again by today's rule


@pytest.mark.parametrize("night", recorded.NIGHTS)
def test_a_recorded_config_is_the_baseline_with_the_changes_of_its_run(night: str) -> None:
    configs = recorded.configs(night)
    for record in recorded.records(night):
        values = incumbent_values(configs[1], record.run.changes)
        assert values == incumbent_values(configs[record.number]), record.number


@pytest.mark.parametrize("night", recorded.NIGHTS)
def test_the_records_are_those_of_the_rule(night: str) -> None:
    records = recorded.records(night)
    assert len(records) == 30
    assert contradictions(records, lambda record: recorded.configs(night)[record.number]) == []


@pytest.mark.parametrize("night", recorded.NIGHTS)
def test_the_replayed_night_agrees_with_its_certificate(night: str) -> None:
    figures = compare(night)
    low, high = figures["certified_interval"]
    assert low < figures["gain"] < high
    assert low < figures["same_config"] < high


def test_every_decision_that_moves_the_incumbent_has_a_line() -> None:
    (line,) = decision_lines(replay("random-0"))
    assert line.startswith("after 0018: keep 0018: ")

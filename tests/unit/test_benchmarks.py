"""The benchmarks: their simulated nights, tables and figures, of data that is made up here."""

import pytest
import recorded
from decision_rules import WORLDS, Conditions, kept_set, play
from replay import compare

from nightshift.campaign.commits import incumbent_values
from tests.campaigns import contradictions
from tests.conftest import slow


@pytest.mark.parametrize("num_slots", [1, slow(4)])
def test_a_night_is_the_same_for_the_same_seed_and_ends_with_a_gain(num_slots: int) -> None:
    figures = play(WORLDS["half help"], (1, 1), Conditions(num_slots), kept_set)
    assert figures == play(WORLDS["half help"], (1, 1), Conditions(num_slots), kept_set)
    assert figures["gain"] > 0
    assert 44 * num_slots <= figures["runs"] <= 52 * num_slots


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

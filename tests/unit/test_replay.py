"""benchmarks/replay.py and recorded.py: recorded nights, decided again by today's rule."""

import sys
from pathlib import Path

import pytest

from nightshift.campaign.commits import incumbent_values
from nightshift.campaign.records import Action
from tests.campaigns import contradictions

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import recorded
from replay import compare, decision_lines, decisions_of, gain_of, replay


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
    campaign = replay("random-0")
    (line,) = decision_lines(campaign)
    assert line.startswith("after 0018: keep 0018: ")
    (decision,) = decisions_of(campaign)[18]
    assert decision.action is Action.KEEP


def test_a_config_without_changes_gains_nothing() -> None:
    assert gain_of(replay("random-0"), ())[0] == 0.0

"""benchmarks/replay.py: recorded nights, decided again by today's rule."""

import sys
from pathlib import Path

import pytest

from nightshift.campaign.records import Action

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import recorded
from replay import changes_between, compare, decision_lines, gain_of, replay


def test_a_config_is_its_parents_changes_and_its_own() -> None:
    replayed = replay("tpe-0", recorded.constants())
    configs = recorded.configs("tpe-0")
    for number, changes in replayed.configs.items():
        values = dict(changes_between(configs[1], configs[1]))
        for change in changes:
            values |= change.keys
        wanted = changes_between(configs[1], configs[number])
        assert {key: value for key, value in values.items() if key in wanted} == wanted, number


@pytest.mark.parametrize("night", recorded.NIGHTS)
def test_the_replayed_night_agrees_with_its_certificate(night: str) -> None:
    figures = compare(night)
    low, high = figures["certified_interval"]
    assert low < figures["gain"] < high
    assert low < figures["same_config"] < high
    assert figures["experiments"] == 30


def test_every_decision_that_moves_the_incumbent_has_a_line() -> None:
    replayed = replay("random-0", recorded.constants())
    (line,) = decision_lines(replayed)
    assert line.startswith("after 0018: keep 0018, effect +14")
    (decision,) = replayed.decisions[18]
    assert decision.action is Action.KEEP


def test_a_config_without_changes_gains_nothing() -> None:
    assert gain_of(replay("random-0", recorded.constants()), ())[0] == 0.0

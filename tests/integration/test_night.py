"""Whole nights, as processes, with the stand-in engine: what stops them, what resumes them, what they leave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.night_checkout import (
    furnish,
    problems,
    records,
    strangers,
    whole_night,
)


@pytest.fixture
def root(checkout: Path) -> Iterator[Path]:
    yield furnish(checkout)
    for process in strangers(checkout):
        process.kill()


def state(root: Path) -> dict[str, object]:
    return json.loads((root / "runs" / "night.json").read_text())


def test_a_night_measures_the_baseline_then_what_is_proposed(root: Path) -> None:
    code, stdout, stderr = whole_night(root, agent="lr", proposer="lr", experiments=5)
    assert code == 0, stderr
    assert problems(root) == []
    ours = records(root)
    assert [r.description for r in ours] == ["baseline", "lr 1e-06", "lr 3e-05", "lr 6e-06", "lr 2e-06"]
    assert {r.status for r in ours[1:]} == {"keep", "discard"}
    assert [r.prediction for r in ours] == [None, *["better"] * 4]
    assert [r.lesson for r in ours[:-1]] == ["lesson 1", "lesson 2", "lesson 3", "lesson 4"]
    assert "trainer.optim.lr" in (ours[-1].lesson or "")  # no brief came any more: the harness's own words
    assert stdout.count("experiments:  ") == 6  # after every experiment and at the end
    assert "stopped:      5 experiments are done" in stdout.splitlines()[-16:][0] or "5 experiments are done" in stdout
    assert (root / "runs" / "night.txt").read_text().strip() in stdout
    assert strangers(root) == []

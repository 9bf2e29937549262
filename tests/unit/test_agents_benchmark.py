"""Nights of agents side by side: what their table and their picture say of nights that are made up here."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import agents  # noqa: E402
import proposals  # noqa: E402

from nightshift.campaign.ledger import Ledger  # noqa: E402
from tests.campaigns import tell  # noqa: E402

LR = "trainer.optim.lr"


def night(agent: str, gain: float | None, curve: list[float]) -> dict[str, Any]:
    counts = {"experiments": len(curve), "kept": 1, "crashed": 0, "minutes": 10.0}
    return {"agent": agent, "night": agent, **counts, "believed_pp": curve[-1], "gain_pp": gain, "curve": curve}


def test_the_best_mean_comes_first_and_its_band_is_students() -> None:
    rows = [night("a", 1.0, [0.0, 1.0]), night("b", 2.0, [0.0, 3.0]), night("a", 2.0, [0.0]), night("c", None, [0.0])]
    first, second, third = agents.summary(rows)
    assert [row["agent"] for row in (first, second, third)] == ["b", "a", "c"]
    assert (first["gain_pp"], first["low"], first["high"]) == (2.0, None, None)  # one night has no spread
    half = 12.7062 * math.sqrt(0.5) / math.sqrt(2)  # t of one degree of freedom
    assert (second["low"], second["high"]) == (pytest.approx(1.5 - half, abs=1e-3), pytest.approx(1.5 + half, abs=1e-3))
    assert third["gain_pp"] is None  # no certificate is no gain of 0


def test_a_picture_is_drawn_of_nights_of_unequal_length(tmp_path: Path) -> None:
    rows = [night("a", 1.0, [0.0, 1.0, 2.0]), night("a", 1.0, [0.0]), night("$\\frac$", 0.0, [0.0, 0.5])]
    agents.draw(rows, tmp_path / "agents.png")
    assert (tmp_path / "agents.png").read_bytes()[:4] == b"\x89PNG"


def test_every_agent_has_a_folder_name_of_its_own() -> None:
    assert agents.slug("search") == "search"
    commands = ["team:claude,codex", "./my agent --x", "./my agent --y"]
    found = [agents.slug(command) for command in commands]
    assert len({*found}) == 3
    assert all(name.replace("-", "").isalnum() and len(name) < 30 for name in found)


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
    assert [*proposals.proposals(ledger.runs_dir, 60.0)] == []  # no curves were kept of it

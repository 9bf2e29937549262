"""certify with the real TRL trainer: a kept experiment of the stand-in's, two fresh runs, a certificate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.campaign.records import Request
from nightshift.engines.trl.engine import TRAINER
from nightshift.experiment.certify import certify, tasks
from tests.conftest import git, living_children
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_controller import furnish, make_controller

# Few examples and one step of training.
RULES = replace(
    ARITHMETIC_TRL,
    budget_seconds=60.0,
    environments=(replace(ARITHMETIC_TRL.environments[0], num_validation=32, num_train=64),),
)
CONFIG = "max_steps = 1\n[orchestrator]\nbatch_size = 16\ngroup_size = 4\n[trainer.optim]\nlr = {}\n"


@pytest.mark.slow
def test_a_real_certificate(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(checkout)
    controller = make_controller(checkout, RULES, monkeypatch)
    (checkout / "train.toml").write_text(CONFIG.format("6e-7"))
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline config")
    controller.run(Request())
    (checkout / "train.toml").write_text(CONFIG.format("3e-6"))
    assert controller.run(Request()).status == "keep"

    (made,) = certify(tasks(make_controller(checkout, RULES, monkeypatch, TRAINER), num_seeds=1))

    assert controller.ledger.comparisons() == [made]
    assert [(run.side, run.num_steps) for run in made.runs] == [("baseline", 1), ("incumbent", 1)]
    assert made.num_examples == 32
    assert made.estimate.interval[0] < made.estimate.difference < made.estimate.interval[1]
    assert 0.1 < made.baseline_score < 0.9  # the base model scores 0.43 before any training
    assert "its prior was taken" in made.notes[0]
    assert {access.number for access in controller.ledger.journal.accesses()} == {1}
    weights = {path.parent.parent.name for path in controller.ledger.runs_dir.glob("certify/*/*/weights")}
    assert weights == set()
    assert living_children() == []

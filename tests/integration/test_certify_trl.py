"""certify with the real TRL worker: a kept experiment of the stand-in's, two fresh runs, a certificate."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from nightshift.certify.looks import counted_looks

from nightshift.campaign.ledger import Ledger
from nightshift.certify import certificate
from nightshift.certify.run import certify
from nightshift.engines import ProgressCallback
from nightshift.engines.trl.engine import TrlEngine
from nightshift.experiment import Request, run_experiment
from nightshift.git.repo import Repo
from nightshift.records import Record, Side
from nightshift.rules import ARITHMETIC_TRL
from nightshift.setup import Lab
from tests.conftest import git, living_children

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "stand_in_trainer.py"
# Few examples, a second of training, and a rule that keeps whatever it is shown after one run.
RULES = replace(
    ARITHMETIC_TRL,
    budget_seconds=1.0,
    environments=(replace(ARITHMETIC_TRL.environments[0], num_selection=32, num_train=64),),
    decision=replace(ARITHMETIC_TRL.decision, threshold=-1.0, baseline_runs=1, max_runs_per_config=1),
)
CONFIG = "[orchestrator]\nbatch_size = 16\ngroup_size = 4\n[trainer.optim]\nlr = {}\n"


class Silent:
    """A stand-in for the terminal."""

    def note(self, text: str) -> None:
        pass

    def progress(self, record: Record, run_index: int, side: Side) -> ProgressCallback:
        return lambda reading: None


def test_a_real_certificate(checkout: Path) -> None:
    (checkout / "models").symlink_to(ROOT / "models")
    lab = Lab(
        root=checkout,
        rules=RULES,
        rules_hash="short",
        engine=TrlEngine(RULES, checkout, dict(os.environ), worker=STAND_IN),
        ledger=Ledger(checkout),
        repo=Repo(checkout),
        reporter=Silent(),
        now=lambda: datetime.now(UTC),
        clock=time.monotonic,
        versions={},
    )
    (checkout / "train.toml").write_text(CONFIG.format("6e-7"))
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline config")
    run_experiment(Request(max_runs=1), lab)
    (checkout / "train.toml").write_text(CONFIG.format("3e-6"))
    assert run_experiment(Request(max_runs=1), lab).status == "keep"

    made = certify(replace(lab, engine=TrlEngine(RULES, checkout, dict(os.environ))), num_seeds=1)

    assert made == certificate.read(lab.ledger.runs_dir)
    assert made.num_seeds == {"baseline": 1, "incumbent": 1}
    assert made.num_examples == 32
    assert made.interval[0] < made.difference < made.interval[1]
    assert 0.1 < made.baseline_score < 0.9  # the base model scores 0.43 before any training
    assert "its prior was taken" in made.estimator
    assert len(counted_looks(lab.ledger.runs_dir)) == 1
    weights = {path.parent.parent.name for path in lab.ledger.runs_dir.glob("certify/*/*/weights")}
    assert weights == set()
    assert living_children() == []

"""The arithmetic environment for benchmarks that ask it without an engine; importing this puts it on the path."""

from __future__ import annotations

import os
from pathlib import Path

from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.evaluation.environment import load

ROOT = Path(__file__).resolve().parents[1]
ARITHMETIC_TRL = rules_of(ROOT, Chosen(environments=["arithmetic"]), "trl", 0)
(RULES,) = ARITHMETIC_TRL.environments
load(ROOT, [RULES])
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in RULES.folders)  # for processes that verifiers starts

from nightshift_arithmetic import data  # noqa: E402
from nightshift_arithmetic.scoring import score  # noqa: E402

__all__ = ["ARITHMETIC_TRL", "PYTHONPATH", "ROOT", "RULES", "data", "score"]

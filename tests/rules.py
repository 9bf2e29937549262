"""The rules of this checkout that tests name."""

from __future__ import annotations

from pathlib import Path

from nightshift.config.decision_rules import DecisionRules
from nightshift.config.rules_toml import Chosen, rules_of

ROOT = Path(__file__).parents[1]
GSM8K_PRIME_RL = rules_of(ROOT, Chosen(environments=["gsm8k"]), "prime-rl", 2)
GSM8K_TRL = rules_of(ROOT, Chosen(environments=["gsm8k"]), "trl", 1)
ARITHMETIC_TRL = rules_of(ROOT, Chosen(environments=["arithmetic"]), "trl", 0)
# The constants of Nightshift 0.1.0 for GSM8K: one world, and fewer kinds of ideas.
ONE_WORLD = DecisionRules(
    kinds=((0.7, 0.6), (0.0, 0.15), (-1.5, 1.5), (-6.0, 10.0)),
    priors=((1.0, (0.27, 0.33, 0.36, 0.04)),),
    noises=((1.0, 1.0),),
    calibration=0.9,
    shrinkage=(0.0, 1.0),
)
ALL_RULES = (GSM8K_PRIME_RL, GSM8K_TRL, ARITHMETIC_TRL)

"""The rules of this checkout that tests name."""

from pathlib import Path

from nightshift.config.rules_toml import Chosen, rules_of

ROOT = Path(__file__).parents[1]
GSM8K_PRIME_RL = rules_of(ROOT, Chosen(environments=["gsm8k"]), "prime-rl", 2)
GSM8K_TRL = rules_of(ROOT, Chosen(environments=["gsm8k"]), "trl", 1)
ARITHMETIC_TRL = rules_of(ROOT, Chosen(environments=["arithmetic"]), "trl", 0)
ALL_RULES = (GSM8K_PRIME_RL, GSM8K_TRL, ARITHMETIC_TRL)

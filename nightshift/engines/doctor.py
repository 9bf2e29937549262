"""All checks of all engines, without changing anything: what `uv run nightshift doctor` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nightshift.engines import ALL, ENGINES, Check, PrepareFlags, open_engine
from nightshift.engines.memory import on_cards
from nightshift.errors import NightshiftError
from nightshift.git.repo import CONFIG_NAME
from nightshift.rules import Rules
from nightshift.rules_toml import rules_here
from nightshift.train_toml.config import load


def checks(root: Path, rules: Rules, environ: Mapping[str, str], flags: PrepareFlags) -> list[Check]:
    """Everything that prepare.py would repair and run.py would refuse.

    `rules` are those that this machine would use; another engine is checked for GSM8K.
    """
    try:
        num_keys = len(load(root / CONFIG_NAME).values)
        found = [Check(ALL, CONFIG_NAME, detail=f"{num_keys} keys, all known")]
    except NightshiftError as error:
        found = [Check(ALL, CONFIG_NAME, error)]
    for name in ENGINES:
        is_meant = rules.engine == name
        its_rules, gpus = (rules, flags.gpus) if is_meant else (rules_here(root, name, 1), None)
        its_rules = on_cards(its_rules, root, environ, gpus)
        found += open_engine(its_rules, root, environ).doctor(replace(flags, gpus=gpus))
    return found


def is_ready(found: Sequence[Check], engine: str) -> bool:
    """True if nothing is in the way of an experiment on this engine."""
    return all(check.ok for check in found if check.engine in (engine, ALL))


def table(found: Sequence[Check], rules: Rules) -> str:
    """Plain aligned lines, and last which engine this machine would use and whether it is ready."""
    verdict = "ready" if is_ready(found, rules.engine) else "not ready"
    return "\n".join(
        [*map(str, found), f"{verdict}: --engine {rules.engine} ({rules.name}), which this machine would use"]
    )

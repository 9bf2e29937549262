"""All checks of all engines, without changing anything: what `uv run nightshift doctor` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nightshift.campaign.git import CONFIG_NAME
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import rules_here
from nightshift.config.train_toml import load
from nightshift.engines.base import ALL, ENGINES, Check, PrepareFlags, open_engine
from nightshift.engines.memory import on_cards
from nightshift.errors import NightshiftError
from nightshift.waiting import waiting


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
        with waiting(f"looking at what {name} needs"):
            its = open_engine(its_rules, root, environ).doctor(replace(flags, gpus=gpus))
        found += [_with_fetch(check, its, its_rules) for check in its]
    return found


def _with_fetch(check: Check, its: Sequence[Check], rules: Rules) -> Check:
    """Of GSM8K that is missing also the command that fetches it: prepare.py does for an engine that can start here."""
    is_gsm8k = any(environment.name == "gsm8k" for environment in rules.environments)
    if check.ok or check.name != "data" or not is_gsm8k or any(each.name == "GPUs" and not each.ok for each in its):
        return check
    command = f"uv run prepare.py --engine {check.engine}"
    return replace(check, problem=f"{str(check.problem).rstrip('.')}; or have it downloaded: {command}")


def is_ready(found: Sequence[Check], engine: str) -> bool:
    """True if nothing is in the way of an experiment on this engine."""
    return all(check.ok for check in found if check.engine in (engine, ALL))


def table(found: Sequence[Check], rules: Rules, asked: str | None = None) -> str:
    """Plain aligned lines, and last whether the engine that was `asked` for is ready, or the one this machine would
    use."""
    verdict = "ready" if is_ready(found, rules.engine) else "not ready"
    why = "which this machine would use" if asked is None else "which was asked for"
    return "\n".join([*map(str, found), f"{verdict}: --engine {rules.engine} ({rules.name}), {why}"])

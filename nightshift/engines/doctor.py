"""All checks of all engines, without changing anything: what `uv run nightshift doctor` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nightshift.campaign.git import CONFIG_NAME
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import rules_here
from nightshift.config.train_toml import load
from nightshift.engines.base import ENGINES, Check, PrepareFlags, look, on_cards, open_engine
from nightshift.engines.machine import MACHINE_NAME, read_machine
from nightshift.errors import UsageError
from nightshift.executors.local import capacity
from nightshift.files import Document
from nightshift.waiting import waiting


def checks(root: Path, rules: Rules, environ: Mapping[str, str], flags: PrepareFlags) -> list[Check]:
    """Everything that prepare.py would repair and run.py would refuse.

    `rules` are those that this machine would use; another engine is checked for GSM8K, and nothing of it is needed.
    """
    found = [
        look(CONFIG_NAME, lambda: f"{len(load(root / CONFIG_NAME).values)} keys, all known"),
        look("host memory", lambda: capacity().memory),
        look(MACHINE_NAME, lambda: read_machine(root).text or "none"),
    ]
    if not found[-1].ok:
        return found
    for name in ENGINES:
        is_meant = rules.engine == name
        try:
            its_rules, gpus = (rules, flags.gpus) if is_meant else (rules_here(root, name, 1), None)
        except UsageError as error:  # what rules.toml wants is for the engine that is meant
            found.append(Check(name, "rules", error, is_needed=False))
            continue
        its_rules = on_cards(its_rules, root, environ, gpus)
        with waiting(f"looking at what {name} needs"):
            found += (
                replace(each, is_needed=is_meant) for each in open_engine(its_rules, root, environ, gpus).doctor()
            )
    return found


class Doctor(Document, frozen=True, kw_only=True, tag="doctor"):
    """Whether an experiment could start here, on the engine that was asked for or that this machine would use."""

    engine: str
    rules_name: str
    is_ready: bool
    checks: tuple[Check, ...]

    @classmethod
    def of(cls, found: Sequence[Check], rules: Rules) -> Doctor:
        """From what was checked: ready if nothing is in the way of an experiment on the engine of the rules."""
        is_ready = all(check.ok for check in found)
        return cls(engine=rules.engine, rules_name=rules.name, is_ready=is_ready, checks=tuple(found))

    def table(self, asked: str | None = None) -> str:
        """Plain aligned lines, and last whether the engine that was `asked` for is ready, or the one this machine would
        use."""
        verdict = "ready" if self.is_ready else "not ready"
        why = "which this machine would use" if asked is None else "which was asked for"
        return "\n".join([*map(str, self.checks), f"{verdict}: --engine {self.engine} ({self.rules_name}), {why}"])

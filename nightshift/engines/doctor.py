"""The checks of all engines that `uv run nightshift doctor` shows. They change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nightshift.campaign.git import CONFIG_NAME
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import rules_here
from nightshift.config.train_toml import load
from nightshift.engines.base import ENGINES, Check, Environ, PrepareFlags, look, on_cards, open_engine
from nightshift.engines.machine import MACHINE_NAME, read_machine
from nightshift.errors import UsageError
from nightshift.files import Document
from nightshift.waiting import waiting


def checks(root: Path, rules: Rules, environ: Environ, flags: PrepareFlags) -> list[Check]:
    """Check this checkout and every engine.

    `rules`: the rules that this machine would use. The other engine is checked with GSM8K, and its problems are marked
    as not needed.
    """
    results = [
        look(CONFIG_NAME, lambda: f"{len(load(root / CONFIG_NAME).values)} keys, all known"),
        look(MACHINE_NAME, lambda: read_machine(root).text or "none"),
    ]
    if not results[-1].ok:
        return results
    for name in ENGINES:
        is_used = rules.engine == name
        try:
            engine_rules, gpus = (rules, flags.gpus) if is_used else (rules_here(root, name, 1), None)
        except UsageError as error:  # rules.toml is written for the engine in use
            results.append(Check(name, "rules", error, is_needed=False))
            continue
        engine = open_engine(on_cards(engine_rules, root, environ, gpus), root, environ, gpus)
        with waiting(f"checking {name}"):
            results += (replace(check, is_needed=is_used) for check in engine.doctor())
    return results


class Doctor(Document, frozen=True, kw_only=True, tag="doctor"):
    """Whether an experiment could start here on one engine."""

    engine: str
    rules_name: str
    is_ready: bool
    checks: tuple[Check, ...]

    @classmethod
    def of(cls, results: Sequence[Check], rules: Rules) -> Doctor:
        """Return the result of `checks` for the engine of `rules`."""
        is_ready = all(check.ok for check in results)
        return cls(engine=rules.engine, rules_name=rules.name, is_ready=is_ready, checks=tuple(results))

    def table(self, asked: str | None = None) -> str:
        """Return aligned lines, the last of which is the verdict. `asked`: the flag --engine."""
        verdict = "ready" if self.is_ready else "not ready"
        why = "which this machine would use" if asked is None else "which you asked for"
        return "\n".join([*map(str, self.checks), f"{verdict}: --engine {self.engine} ({self.rules_name}), {why}"])

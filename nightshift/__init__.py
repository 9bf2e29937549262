"""Nightshift: autonomous research for LLM RL post-training.

For a notebook or a script; each name loads on first use, and none of them changes anything on disk:

    from pathlib import Path
    from nightshift import Ledger, load_config

    records = Ledger(Path(".")).records()       # what every experiment of this checkout was, in order
    config = load_config(Path("train.toml"))    # checked; ConfigError names line and fix
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nightshift.campaign.campaign import Campaign
    from nightshift.campaign.ledger import Ledger
    from nightshift.errors import NightshiftError
    from nightshift.records import Record, Verdict
    from nightshift.train_toml.config import Config
    from nightshift.train_toml.config import load as load_config

    __version__: str

__all__ = ["__version__", "Campaign", "Config", "Ledger", "NightshiftError", "Record", "Verdict", "load_config"]

_HOMES = {
    "Campaign": "campaign.campaign:Campaign",
    "Config": "train_toml.config:Config",
    "Ledger": "campaign.ledger:Ledger",
    "NightshiftError": "errors:NightshiftError",
    "Record": "records:Record",
    "Verdict": "records:Verdict",
    "load_config": "train_toml.config:load",
}


def __getattr__(name: str) -> Any:
    """A public name, loaded when it is first asked for. AttributeError for any other."""
    if name == "__version__":
        from importlib.metadata import version

        return version("nightshift")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]

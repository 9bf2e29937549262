"""Nightshift: autonomous research for LLM RL post-training.

For a notebook or a script; each name loads on first use, and none of them changes anything on disk:

    from pathlib import Path
    from nightshift import Ledger, load_config

    records = Ledger(Path(".")).records()       # what every experiment of this checkout was, in order
    config = load_config(Path("train.toml"))    # checked; ConfigError names line and fix
"""

TYPE_CHECKING = False  # typing's own; nothing is imported before startup.py has taken foreign folders off the path
if TYPE_CHECKING:
    from nightshift.campaign.campaign import Campaign
    from nightshift.campaign.ledger import Ledger
    from nightshift.config.train_toml import load as load_config

__all__ = ["Campaign", "Ledger", "load_config"]

_HOMES = {"Campaign": "campaign.campaign", "Ledger": "campaign.ledger", "load_config": "config.train_toml"}


def __getattr__(name: str) -> object:
    """A public name, loaded when it is first asked for. AttributeError for any other."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name.removesuffix("_config"))

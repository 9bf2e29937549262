"""train.toml of the checkout, which a night keeps as the incumbent's: candidates lie in their experiments' folders."""

from __future__ import annotations

from nightshift.errors import ConfigError
from nightshift.files import write_atomically
from nightshift.git.repo import CONFIG_NAME
from nightshift.records import Record
from nightshift.setup import Setup
from nightshift.train_toml.text import read_source


def place(incumbent: Record, setup: Setup) -> None:
    """Write train.toml as the incumbent has it; what somebody else wrote there is kept aside. On another branch than
    its own it is left alone."""
    path, source = setup.root / CONFIG_NAME, setup.ledger.source(incumbent.number)
    try:
        present = read_source(path)
    except ConfigError:
        present = None
    if present == source or setup.repo.head().branch != incumbent.branch:
        return
    known = {setup.ledger.source(record.number) for record in setup.ledger.records()}
    if present is not None and present not in known | {setup.repo.config_at("HEAD")}:
        aside = setup.ledger.runs_dir / f"edited-{setup.now():%Y%m%dT%H%M%S}.toml"
        write_atomically(aside, present)
        setup.reporter.note(f"train.toml was edited by somebody else: kept as {aside}")
    write_atomically(path, source)

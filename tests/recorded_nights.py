"""The two recorded nights of benchmarks/recorded_runs.json, in a real ledger."""

from pathlib import Path

from recorded import configs, records

from nightshift.campaign.ledger import Ledger

__all__ = ["configs", "records", "stored_night"]


def stored_night(root: Path, night: str = "tpe-0") -> Ledger:
    """A ledger in `root` with the night's closed records and their train.toml."""
    ledger = Ledger(root)
    for record in records(night):
        ledger.reserve(record, {"train.toml": configs(night)[record.number].source})
        ledger.close(record)
    return ledger

"""The two recorded nights of benchmarks/recorded_runs.json, in a real ledger."""

import sys
from pathlib import Path

from nightshift.campaign.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from recorded import configs, records

__all__ = ["configs", "records", "stored_night"]


def stored_night(root: Path, night: str = "tpe-0") -> Ledger:
    """A ledger in `root` with the night's closed records and their train.toml."""
    ledger = Ledger(root)
    for record in records(night):
        ledger.reserve(record, {"train.toml": configs(night)[record.number].source})
        ledger.close(record)
    return ledger

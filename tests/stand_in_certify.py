"""`nightshift certify` for another checkout, with the stand-in trainer: `stand_in_certify.py ROOT [KIND]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nightshift.campaign.records import Request
from nightshift.cli import run
from nightshift.cli.output import print_text
from nightshift.cli.shell import in_one_line
from tests.stand_ins import install


def main() -> int:
    """One new seed of baseline and incumbent, on the test split."""
    install(sys.argv[2] if len(sys.argv) > 2 else "night")
    run.process_root = lambda: Path(sys.argv[1])
    print_text(str(run.certify(Request(), (1, (), None, None), False)))
    return 0


if __name__ == "__main__":
    sys.exit(in_one_line(main)())

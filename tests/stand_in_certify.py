"""`nightshift certify` for another checkout, with the stand-in trainer: `stand_in_certify.py ROOT [KIND]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nightshift.cli import run
from nightshift.cli.main import commands
from tests.stand_ins import install

if __name__ == "__main__":  # one new seed of baseline and incumbent, on the test split
    install(sys.argv[2] if len(sys.argv) > 2 else "night")
    run.process_root = lambda: Path(sys.argv[1])
    commands(["certify", "--seeds", "1"])

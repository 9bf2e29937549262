"""Set up once what experiments need: engine, base model, data. Repeating it goes on where it stopped.

\b
    uv run prepare.py                 # what this machine's engine needs
    uv run prepare.py --gsm8k FOLDER  # GSM8K: its train.jsonl and test.jsonl
    uv run prepare.py --math FOLDER   # MATH from your own copy of it
    uv run prepare.py --smoke         # two GPUs: install prime-rl, try it
    uv run prepare.py --prove         # measure row by row that it works
"""

if __name__ == "__main__":
    from nightshift.startup import begin

    begin()

import sys
from pathlib import Path
from typing import Any

import click

from nightshift.cli.run import prepare
from nightshift.cli.shell import Command, Finite, use_prime_rl
from nightshift.engines.base import ENGINES, PrepareFlags

ROOT = Path(__file__).resolve().parent


@click.command(cls=Command, help=__doc__)
@click.option("--engine", type=click.Choice(ENGINES), help="Default: prime-rl on two GPUs, else trl.")
@click.option("--gpus", help="prime-rl: GPUs to serve, GPUs to train: 2,3 or 0,1:2-7, or 0,0 for both on one.")
@click.option(
    "--prime-rl", type=click.Path(file_okay=False, path_type=Path), callback=use_prime_rl, help="Folder of prime-rl."
)
@click.option(
    "--smoke",
    type=Finite(min=1),
    is_flag=False,
    flag_value=120.0,
    metavar="[SECONDS]",
    help="Only one real run with the tiny model, which trains for SECONDS (120).",
)
@click.option("--prove", is_flag=True, help="Run what proof.json does not show yet, cheap rows first (docs/gpus.md).")
@click.option("--gsm8k", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of the data.")
@click.option("--math", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of your copy.")
def main(**flags: Any) -> None:
    """Flags in, exit code out; the work is in its engine: nightshift/engines/."""
    sys.exit(prepare(ROOT, PrepareFlags(**flags)))


if __name__ == "__main__":
    main()

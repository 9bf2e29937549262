"""Run one experiment: train the config in train.toml, score its final weights, decide, record.

\b
    uv run run.py -m "lr 3e-6 -> 5e-6: expect +1 pp" > run.log 2>&1

stdout carries the summary block only, progress goes to stderr.
Exit code: 0 measured, 1 crash, 2 wrong use or config, 130 interrupted.
"""

if __name__ == "__main__":
    from nightshift.startup import begin

    begin()

import sys
from pathlib import Path
from typing import Any

import click

from nightshift.campaign.records import Proposal, Request, prediction_in
from nightshift.cli.run import run
from nightshift.cli.shell import BRANCH, FOLDER, Command, Finite, use_prime_rl
from nightshift.engines.base import ENGINES

ROOT = Path(__file__).resolve().parent


@click.command(cls=Command, help=__doc__)
@click.option("-m", "--description", default="", help="`hypothesis: expect prediction`, recorded; the commit subject.")
@click.option("--engine", type=click.Choice(ENGINES), help="Default: prime-rl on two GPUs, else trl.")
@click.option(
    "--gpus", help="prime-rl: GPUs to serve, GPUs to train: 2,3 or 0,1:2-7, or 0,0. trl: one. See docs/gpus.md."
)
@click.option("--prime-rl", type=FOLDER, callback=use_prime_rl, help="prime-rl: its checkout, as prepare.py has it.")
@click.option(
    "--budget-seconds", type=Finite(1, 86_400), help="Another training budget: other rules, so a fresh baseline."
)
@click.option("--again", is_flag=True, help="Repeat a config that was already decided, with new seeds.")
@click.option(
    "--baseline",
    is_flag=True,
    help="Run the campaign's baseline once more, and put train.toml back: the reported gain becomes more certain.",
)
@BRANCH
@click.option("--detach", is_flag=True, help="Return once it runs; then: uv run nightshift wait --timeout 100.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check train.toml; show what is missing and what would run. Exit code 2: it cannot start.",
)
@click.option("--verbose", is_flag=True, help="With --dry-run: also each process and the whole config.")
@click.option("--keys", is_flag=True, help="Print every key that train.toml may hold, and the locked ones.")
def main(description: str, **flags: Any) -> None:
    """Flags in, exit code out; one experiment is nightshift/experiment/experiment.py."""
    proposal = Proposal(description=description, prediction=prediction_in(description))
    sys.exit(run(ROOT, Request(proposal, **flags)))


if __name__ == "__main__":
    main()

"""The commands that train afresh and compare: certify, transfer, reproduce."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from nightshift import command, console
from nightshift.errors import ExitCode
from nightshift.flags import AS_JSON, GPUS, SEEDS, SLURM
from nightshift.request import Request
from nightshift.shell import Command

if TYPE_CHECKING:
    from nightshift.setup import Setup
    from nightshift.views import View

R = TypeVar("R")
_EXIT_CODES = {"holds": ExitCode.MEASURED, "does not hold": ExitCode.REFUTED, "open": ExitCode.OPEN}
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Show the plan; read nothing sealed.")


def _say(
    name: str, lines: list[str], found: R | None, view: Callable[[R], View], text: Callable[[R], str], as_json: bool
) -> None:
    """What came of the runs; of a plan its lines."""
    from nightshift.views import compared, encoded

    if as_json:
        told = compared.Planned(command=name, lines=tuple(lines)) if found is None else view(found)
        console.print_json(encoded(told))
    elif found is None:
        console.print_lines(lines)
    else:
        console.print_text(text(found))


@click.command("certify", cls=Command)
@SEEDS
@GPUS
@SLURM
@_DRY_RUN
@AS_JSON
def certify_command(seeds: int | None, gpus: str | None, slurm: Path | None, dry_run: bool, as_json: bool) -> None:
    """Train baseline and incumbent afresh and compare them on the sealed examples; the same command goes on."""
    from nightshift.certify.certificate import summary
    from nightshift.certify.run import certify, describe, make_plan
    from nightshift.views.compared import certified

    def plan(setup: Setup) -> list[str]:
        return describe(make_plan(setup, seeds), setup)

    run = partial(certify, num_seeds=seeds)
    lines, found = command.compare(Request(gpus=gpus, slurm=slurm), plan, run, dry_run)
    _say("certify", lines, found, certified, summary, as_json)


@click.command("transfer", cls=Command)
@click.option("--to", multiple=True, help="An environment, or several joined by +; repeatable. Default: as here.")
@SEEDS
@click.option("--budget-seconds", type=float, help="Of training there: does a short run's winner win a long one?")
@GPUS
@SLURM
@_DRY_RUN
@AS_JSON
def transfer_command(
    to: tuple[str, ...],
    seeds: int | None,
    budget_seconds: float | None,
    gpus: str | None,
    slurm: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train baseline and incumbent afresh elsewhere, or for longer, and compare; the same command goes on."""
    from nightshift.certify.transfer import Transfer, describe, summary, targets, transfer
    from nightshift.views.compared import transferred

    ask = partial(targets, to=to, budget_seconds=budget_seconds, num_seeds=seeds)

    def plan(setup: Setup) -> list[str]:
        return describe(ask(setup), setup)

    def run(setup: Setup) -> list[Transfer]:
        return transfer(ask(setup), setup)

    lines, found = command.compare(Request(gpus=gpus, slurm=slurm), plan, run, dry_run)
    _say("transfer", lines, found, transferred, summary, as_json)


@click.command("reproduce", cls=Command)
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--seeds", type=click.IntRange(1, 100), help="Runs of each of the two. Default: as certified, else 3.")
@GPUS
@SLURM
@_DRY_RUN
@AS_JSON
def reproduce_command(
    bundle: Path, seeds: int | None, gpus: str | None, slurm: Path | None, dry_run: bool, as_json: bool
) -> None:
    """Train baseline and winner of a BUNDLE afresh: does its gain hold here? The same command goes on.

    Exits 0 where it holds: it differs from the bundle's by no more than both intervals allow, and its own lies above 0;
    3 where it does not hold, 4 where so few seeds leave it open; 1 and 2 are errors, by which nothing was measured.
    """
    from nightshift.bundle import read_bundle
    from nightshift.certify.reproduce import Reproduction, describe, make_plan, reproduce, summary
    from nightshift.views.compared import reproduced

    read = read_bundle(bundle)
    told = read.manifest

    def plan(setup: Setup) -> list[str]:
        return describe(make_plan(read, setup, seeds), setup)

    def run(setup: Setup) -> Reproduction:
        return reproduce(make_plan(read, setup, seeds), setup)

    request = Request(engine=told.engine, budget_seconds=told.budget_seconds, gpus=gpus, slurm=slurm)
    lines, found = command.compare(request, plan, run, dry_run)
    _say("reproduce", lines, found, reproduced, summary, as_json)
    if found is not None:
        sys.exit(_EXIT_CODES[found.answer])

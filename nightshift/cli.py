"""`uv run nightshift`: what one asks of a campaign beside running an experiment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from nightshift import command, console
from nightshift.campaign.ledger import Ledger
from nightshift.decision_rules import DecisionRules
from nightshift.engines import ENGINES, PrepareFlags
from nightshift.errors import ExitCode, UsageError
from nightshift.flags import Finite, hexadecimal, num_slots
from nightshift.request import Request


@click.group(help=__doc__, context_settings={"max_content_width": 110})
def commands() -> None:
    """The group of all subcommands."""


_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
_SEEDS = click.option("--seeds", type=click.IntRange(1, 100), help="Fresh runs of each of the two. Default: 3.")
_SLURM = click.option(
    "--slurm",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    help="slurm.toml of the cluster whose jobs the runs are (docs/cluster.md).",
)
_GPUS = click.option("--gpus", help="prime-rl: GPU to serve, GPU to train: 2,3, or 0,0. trl: one.")


@commands.command()
def status() -> None:
    """What is running, for how long, and what the ledger holds."""
    console.print_text(command.status_line(Ledger(command.process_root()), datetime.now(UTC)))


@commands.command()
@click.option("--timeout", type=Finite(min=0), help="Give up after so many seconds, with exit code 124.")
def wait(timeout: float | None) -> None:
    """Wait for the experiment in flight and print its summary; exits as that experiment did."""
    from nightshift.processes.supervise import interruptible

    with interruptible():
        sys.exit(command.wait(command.process_root(), timeout))


@commands.command()
def history() -> None:
    """What the last campaign tried: near misses, dead ends, covered values, untried keys; every trial, by key."""
    from nightshift.proposers.history import of_last_campaign

    console.print_text(of_last_campaign(Ledger(command.process_root())))


@commands.command()
@click.option("--agent", help="claude, codex, gemini, tpe, random, or a command that reads the prompt.")
@click.option("--hours", type=Finite(0, 10_000, min_open=True), help="No run is started that would end later.")
@click.option("--experiments", type=click.IntRange(min=1), help="Stop after so many, the baseline included.")
@click.option("--plateau", type=click.IntRange(min=1), help="Stop when nothing was kept in so many, and one more.")
@click.option("--engine", type=click.Choice(ENGINES), help="Default: prime-rl on two GPUs, else trl.")
@_GPUS
@click.option("--budget-seconds", type=float, help="Another training budget: other rules, so a fresh baseline.")
@click.option(
    "--agent-timeout",
    "agent_timeout_seconds",
    type=Finite(min=1),
    default=900.0,
    show_default=True,
    help="Seconds for one proposal.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of tpe and random.")
@click.option(
    "--sandbox",
    type=click.Choice(["auto", "bwrap", "none"]),
    default="auto",
    show_default=True,
    help="The OS wall around an agent: bubblewrap, whole; or (auto) what works of it here.",
)
@click.option(
    "--pairs", default="1", callback=num_slots, help="Runs side by side, on GPUs or cores of their own, or auto."
)
@_SLURM
@click.option("--stop", is_flag=True, help="End what a night whose head was killed left running; with no other option.")
def night(stop: bool, slurm: Path | None, **flags: Any) -> None:
    """Propose, train, decide, record, until a stop rule holds; the same command goes on after a kill or reboot.

    A command as --agent gets the prompt on stdin, or in a file where it says {prompt_file}. To stop: Ctrl-C lets the
    runs in flight finish, a second one stops now; so does a file STOP in the checkout, after the experiment. Runs go on
    to their own end when the night is killed; the same command takes them over.
    """
    from nightshift.night.begin import night, stop_night
    from nightshift.night.state import NightRequest

    if stop:
        console.print_text(stop_night(command.process_root()))
        return
    if slurm and flags["pairs"] != 1:
        raise click.UsageError("--pairs and --slurm do not go together. Write pairs in slurm.toml.")
    if flags["agent"] is None:
        raise click.UsageError("--agent is missing. Write who proposes: --agent tpe, or --agent claude.")
    sys.exit(night(command.process_root(), NightRequest(**flags, slurm=str(slurm) if slurm else None)))


@commands.command()
@click.option("--engine", type=click.Choice(ENGINES), help="Default: what run.py would use here.")
@_GPUS
@click.option("--prime-rl", type=click.Path(path_type=Path), help="Folder of prime-rl, if it is not the default one.")
@click.option("--agent", help="Also ask this agent one question, as a night would: the only proof of its login.")
@click.option("--environment", help="Only this one: load it, show a task, time and try its reward.")
@_SLURM
def doctor(agent: str | None, environment: str | None, slurm: Path | None, **flags: Any) -> None:
    """Check what both engines need, changing nothing; exits 2 if run.py could not start here.

    With --slurm: submit one job there that looks around, and say what it found.
    """
    root = command.process_root()
    if slurm is not None:
        command.probe(root, Request(engine=flags["engine"], slurm=slurm))
    elif environment is not None:
        command.look_at(root, environment)
    else:
        sys.exit(command.doctor(root, PrepareFlags(**flags), agent))


@commands.command()
@click.argument("what", type=click.Choice(["environment"]))
@click.argument("name")
def new(what: str, name: str) -> None:
    """Write environments/NAME: a small task that trains as it is, with its test. docs/environments.md goes on."""
    from nightshift.own_environment import create

    console.print_text("\n".join(create(command.process_root(), name)))


@commands.command("certify")
@_SEEDS
@click.option("--budget-seconds", type=float, help="The campaign's own, if its run.py was given one.")
@_GPUS
@_SLURM
@click.option("--dry-run", is_flag=True, help="Show the plan; read nothing sealed.")
def certify_command(
    seeds: int | None, budget_seconds: float | None, gpus: str | None, slurm: Path | None, dry_run: bool
) -> None:
    """Train baseline and incumbent afresh and compare them on the sealed examples; the same command goes on."""
    from nightshift.certify.certificate import summary
    from nightshift.certify.run import certify, describe, make_plan

    request = Request(budget_seconds=budget_seconds, gpus=gpus, slurm=slurm)
    plan, run = (lambda s: describe(make_plan(s, seeds), s)), (lambda s: summary(certify(s, seeds)))
    command.compare(request, plan, run, dry_run)


@commands.command("transfer")
@click.option("--to", multiple=True, help="An environment, or several joined by +; repeatable. Default: as here.")
@_SEEDS
@click.option("--budget-seconds", type=float, help="Of training there: does a short run's winner win a long one?")
@click.option("--here-seconds", type=float, help="The campaign's own, if its run.py was given --budget-seconds.")
@_GPUS
@_SLURM
@click.option("--dry-run", is_flag=True, help="Show the plan.")
def transfer_command(
    to: tuple[str, ...],
    seeds: int | None,
    budget_seconds: float | None,
    here_seconds: float | None,
    gpus: str | None,
    slurm: Path | None,
    dry_run: bool,
) -> None:
    """Train baseline and incumbent afresh elsewhere, or for longer, and compare; the same command goes on."""
    from nightshift.certify.transfer import describe, summary, targets, transfer

    ask = partial(targets, to=to, budget_seconds=budget_seconds, num_seeds=seeds)
    request = Request(budget_seconds=here_seconds, gpus=gpus, slurm=slurm)
    plan, run = (lambda s: describe(ask(s), s)), (lambda s: summary(transfer(ask(s), s)))
    command.compare(request, plan, run, dry_run)


@commands.command()
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder to write into. Default: runs/")
@click.option("--branch", help="The campaign to show. Default: the branch checked out, else that of the last one.")
def report(output: Path | None, branch: str | None) -> None:
    """Write the morning page report.html, with progress.png and report.md, from the records."""
    from nightshift.report import page as reports

    headline, paths = reports.write_report(command.process_root(), datetime.now(UTC), output, branch)
    lines = (f"{headline.title}. {headline.sentence}", *map(os.fspath, paths))
    console.print_text("\n".join(map(console.printable, lines)))


@commands.command()
@click.argument("old", required=False)
@click.argument("new", required=False)
@click.option("--chain", is_flag=True, help="Print what every kept experiment changed, with its delta.")
def diff(old: str | None, new: str | None, chain: bool) -> None:
    """Compare two train.toml key by key: what OLD -> NEW changes. Default: incumbent -> working.

    OLD and NEW are experiments (42), commits, baseline, incumbent or working (the file as it stands).
    """
    from nightshift.git.repo import Repo
    from nightshift.report import diff as compare

    root = command.process_root()
    ledger, repo = Ledger(root), Repo(root)
    if chain and (old or new):
        raise UsageError("--chain shows the whole campaign", "Leave OLD and NEW out.")
    if chain:
        lines = compare.story(compare.kept_chain(ledger, repo.head().branch))
    else:
        names = (old or compare.INCUMBENT, new or compare.WORKING)
        lines = compare.comparison(*(compare.find(name, root, ledger, repo) for name in names))
    console.print_text("\n".join(map(console.printable, lines)))


@commands.command()
@click.argument("number", type=click.IntRange(min=1))
def show(number: int) -> None:
    """Print everything that is known of one experiment."""
    from nightshift.report.show import experiment_lines

    ledger = Ledger(command.process_root())
    record = ledger.record(number)
    console.print_text("\n".join(map(console.printable, experiment_lines(record, ledger.run_dir(number)))))


@commands.command("verify")
@click.option(
    "--head", callback=hexadecimal, help="The chain's head as a summary, certificate or commit of then tells it."
)
def verify_command(head: str | None) -> None:
    """Compare records, looks and certificates with their chain; exits 1 where something was changed, 0 where not."""
    from nightshift.campaign.verify import verify

    found = verify(Ledger(command.process_root()), head)
    lines = [*(f"wrong:    {line}" for line in found.problems), *(f"note:     {line}" for line in found.notes)]
    lines.append(f"chain:    {found.head}, {found.num_lines} lines; {len(found.problems) or 'nothing'} wrong")
    console.print_text("\n".join(map(console.printable, lines)))
    sys.exit(ExitCode.CRASH if found.problems else ExitCode.MEASURED)


@commands.command("pin")
@click.option("--checkout", required=True, type=_FOLDER, help="prime-rl with its submodules; nothing of it is run.")
@click.option("--renew", is_flag=True, help="Write the lines of rows that moved into the table of expectations.")
def pin_command(checkout: Path, renew: bool) -> None:
    """What Nightshift expects of prime-rl and this checkout of it does not have; exits 1 where something breaks."""
    from nightshift.engines.prime_rl.installation import Pins
    from nightshift.pin import lookup

    findings, new = lookup.look_up(checkout, Pins.read(command.process_root() / "pyproject.toml"))
    console.print_text("\n".join(map(console.printable, lookup.report(findings, new))))
    if renew:
        lookup.renew(findings)
    sys.exit(ExitCode.CRASH if any(f.breaks for f in findings) else ExitCode.MEASURED)


def _constants(function: Callable[..., None]) -> Callable[..., None]:
    """One option for each constant of the decision rule."""
    for constant in reversed(fields(DecisionRules)):
        if constant.name not in ("kinds", "priors", "noises", "shrinkage"):
            kind = Finite(min=0, min_open=constant.name != "take_back")
            whole = click.IntRange(min=1) if isinstance(constant.default, int) else None
            function = click.option(f"--{constant.name.replace('_', '-')}", type=whole or kind)(function)
    return function


@commands.command("replay")
@click.argument("runs_dir", type=_FOLDER)
@_constants
@click.option("--num-examples", type=click.IntRange(min=2), help="Only the first so many.")
def replay_command(runs_dir: Path, num_examples: int | None, **constants: float | None) -> None:
    """Decide the recorded campaigns in RUNS_DIR again under other constants of the rule (fractions, 0..1)."""
    from nightshift.campaign.replay import campaigns, replay, table

    changes = {name: value for name, value in constants.items() if value is not None}
    changed = ", ".join(f"{name} {value:g}" for name, value in changes.items()) or "as recorded"
    changed += f"; {num_examples} examples" if num_examples else ""
    found = campaigns(Ledger(runs_dir, runs_dir).records())
    if not found:
        raise UsageError(f"{runs_dir} holds no decided experiment", "Name a folder runs/ with records.")
    tables = [table(records, replay(records, changes, num_examples), changed) for records in found]
    console.print_text("\n\n".join("\n".join(map(console.printable, text.split("\n"))) for text in tables))


if __name__ == "__main__":
    sys.exit(command.in_one_line(commands)())

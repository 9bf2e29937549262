"""`uv run nightshift`: what one asks of a campaign beside running an experiment."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import click

from nightshift import command, console
from nightshift.errors import ExitCode, NightshiftError
from nightshift.ledger import Ledger


@click.group(help=__doc__, context_settings={"max_content_width": 110})
def commands() -> None:
    """The group of all subcommands."""


@commands.command()
def status() -> None:
    """What is running, for how long, and what the ledger holds."""
    console.print_text(command.status_line(Ledger(command.process_root()), lambda: datetime.now(UTC)))


@commands.command()
@click.option("--timeout", type=click.FloatRange(min=0), help="Give up after so many seconds, with exit code 124.")
def wait(timeout: float | None) -> None:
    """Wait for the experiment in flight and print its summary; exits as that experiment did."""
    sys.exit(command.wait(command.process_root(), timeout))


def main() -> None:
    """Entry point: errors are one line, without a traceback."""
    try:
        commands(standalone_mode=True)
    except NightshiftError as error:
        console.print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)

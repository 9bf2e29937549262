"""What all commands share: options, help, version, errors in one line, and exit codes."""

import io
import math
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click import option

from nightshift.cli.output import print_error
from nightshift.errors import EngineError, ExitCode, Interrupted, NightshiftError
from nightshift.executors.process import STOP_SIGNALS

FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


class Finite(click.FloatRange):
    """A range that refuses nan, which no bound excludes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a number.", param, ctx)


def num_slots(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Read --pairs: a number, or 0 for auto."""
    if value == "auto":
        return 0
    return click.IntRange(1, 999).convert(value, param, ctx)


def use_prime_rl(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Read --prime-rl: this process and its workers use prime-rl from this folder."""
    if value is not None:
        os.environ["NIGHTSHIFT_PRIME_RL"] = os.fspath(value.absolute())
    return value


_SANDBOXES = click.Choice(["auto", "bwrap", "user", "none"])
SANDBOX = option(
    "--sandbox", type=_SANDBOXES, default="auto", help="The agent's sandbox. auto: the first that works (SECURITY.md)."
)
AGENT_ENV = option(
    "--agent-env", multiple=True, metavar="NAME", help="Give the agent this environment variable, too. Repeatable."
)
_PATH = click.Path(exists=True, resolve_path=True)
AGENT_SEES = option(
    "--agent-sees",
    multiple=True,
    metavar="PATH",
    type=_PATH,
    help="Let the agent read this file or folder, too. Repeatable.",
)
AS_JSON = option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text (docs/schemas).")
BRANCH = option(
    "--branch",
    metavar="NAME",
    help="Begin a campaign on a new branch NAME. Default: the branch checked out; on main or a detached HEAD, the "
    "branch of the campaign that began at this commit, else a new branch autoresearch/<month><day>.",
)
GPUS = option("--gpus", help="prime-rl: GPUs that serve, GPUs that train (2,3 or 0,1:2-7 or 0,0). trl: one.")
_FILE = click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path)
SLURM = option(
    "--slurm", type=_FILE, help="Run experiments as jobs of a cluster, described in this slurm.toml (docs/cluster.md)."
)


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code. Print an error in one line, click's errors as click prints them."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # startup.py blocks them
        return int(command() or ExitCode.MEASURED)
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)  # into a text, which is made printable: it repeats arguments
        print_error(text.getvalue().rstrip())
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):  # outside `interruptible`; click's exit code 1 would mean a crash
        shown: NightshiftError = Interrupted("stopped by Ctrl-C")
    except NightshiftError as error:
        shown = error
    except OSError as error:  # one that no function below explains
        where = "" if error.filename is None else f": {os.fspath(error.filename)}"
        shown = EngineError(f"{error.strerror or error}{where}", "Free disk space or memory, or fix permissions.")
    print_error(shown)
    return shown.exit_code


class Command(click.Command):
    """A command of click with the exit codes of `exit_code_of`, -h, --version, and uncut help."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])
        click.version_option(package_name="nightshift", message="%(package)s %(version)s")(self)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        sys.exit(exit_code_of(partial(super().main, *args, standalone_mode=False, **extra)))

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(10_000)


class Group(Command, click.Group):
    command_class = Command

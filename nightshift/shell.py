"""What every command owes the shell: errors as one line, an exit code that is true, help, a version."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec

import click

from nightshift.console import print_error, print_text, told
from nightshift.errors import EngineError, ExitCode, Interrupted, NightshiftError

_GC_OBJECTS = 100_000  # between two searches for garbage: thousands of records are none, and were looked through often
P = ParamSpec("P")


def in_one_line(command: Callable[P, int | None]) -> Callable[P, int]:
    """Its errors are shown as one line, without a traceback; the exit code is theirs. click's are shown as click does.

    Where all went well but stdout or stderr did not take it, the code is UNSAID.
    """

    @wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
                pass  # a standard stream that is closed: its number would go to the next file that is opened
            os.close(descriptor)
            gc.set_threshold(_GC_OBJECTS)
            return int(told(command(*args, **kwargs) or ExitCode.MEASURED))
        except SystemExit as end:
            raise SystemExit(told(end.code)) from None
        except click.ClickException as error:
            said = io.StringIO()
            error.show(said)  # it repeats arguments, which may be anything
            print_error(said.getvalue().rstrip())
            return error.exit_code
        except (KeyboardInterrupt, click.Abort):  # outside `interruptible`: click would end with 1, which means a crash
            shown: NightshiftError = Interrupted("stopped by Ctrl-C")
        except NightshiftError as error:
            shown = error
        except OSError as error:  # a refusal of the operating system that nothing further down has words for
            where = "" if error.filename is None else f": {os.fspath(error.filename)}"
            fix = "Free disk space or memory, or fix permissions."
            shown = EngineError(f"{error.strerror or error}{where}", fix)
        print_error(shown)
        return shown.exit_code

    return guarded


class Command(click.Command):
    """One of click's that ends as `in_one_line` says, answers -h and --version, and says whole sentences."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])
        show = click.Option(
            ["--version"], is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version."
        )
        self.params.append(show)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """As click's, but for how it ends."""
        sys.exit(in_one_line(partial(super().main, *args, standalone_mode=False, **extra))())

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """As click's; what it shows is printed by the console, which minds a closed pipe."""
        if (option := super().get_help_option(ctx)) is not None:
            option.callback = _help
        return option

    def get_short_help_str(self, limit: int = 0) -> str:
        """The first sentence to its end, in as many lines as it takes."""
        return super().get_short_help_str(10_000)


class Group(Command, click.Group):
    """Of such commands."""

    command_class = Command


def _help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print_text(ctx.get_help())
        ctx.exit()


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib import metadata

        print_text(f"nightshift {metadata.version('nightshift')}")
        ctx.exit()

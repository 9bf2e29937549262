"""Every way Nightshift refuses or fails: one line, the cause with the offending value, then the fix.

A failed experiment is none of these: it is data, and is recorded with verdict `crash` (exit 1).
"""

from collections.abc import Sequence
from enum import IntEnum, StrEnum

from nightshift.text import MAX_TEXT, clean

_MOST = 5  # names of a list that are shown


class ExitCode(IntEnum):
    """What run.py, and the commands beside it, tell the shell."""

    MEASURED = 0
    CRASH = 1
    USAGE = 2
    INTERRUPTED = 130


class Failure(StrEnum):
    """Whose fault a failure is. Only `config` counts against a config."""

    CONFIG = "config"  # not-a-number, out of memory, deadline. Do not try the config again
    INFRASTRUCTURE = "infrastructure"  # a process was killed, a disk was full. Try the same config again
    UNKNOWN = "unknown"  # the log does not tell. Whether the incumbent's config starts does; never in a record
    INTERRUPTED = "interrupted"  # Ctrl-C, SIGTERM, power cut


class NightshiftError(Exception):
    """Base of all errors that are shown as one line, without a traceback."""

    exit_code = ExitCode.CRASH

    def __init__(self, cause: str, fix: str = "") -> None:
        """`cause` names the offending value, `fix` is an imperative sentence."""
        self.cause = cause
        self.fix = fix
        line = f"{cause.rstrip('.')}. {fix}" if fix else cause
        super().__init__(clean(line, 4 * MAX_TEXT))


class UsageError(NightshiftError):
    """The command cannot be carried out as given: wrong flags, wrong place, wrong moment."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """train.toml is refused; costs no GPU time and is not recorded as an experiment."""


class EngineError(NightshiftError):
    """Hardware or installation is missing or broken; nothing was measured.

    In the middle of an experiment it is recorded with its `failure`.
    """

    exit_code = ExitCode.USAGE

    def __init__(
        self, cause: str, fix: str = "", *, failure: Failure = Failure.INFRASTRUCTURE, log: str | None = None
    ) -> None:
        """`log`: the name of the log, in the run's folder, whose last lines show the cause."""
        super().__init__(cause, fix)
        self.failure = failure
        self.log = log


class Interrupted(NightshiftError):
    """A person or the system asked the harness to stop."""

    exit_code = ExitCode.INTERRUPTED


def listed(names: Sequence[str]) -> str:
    """`a, b and 3 more`: names in a line of theirs."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more

"""The errors of Nightshift. A message is one line: the cause with the offending value, then the fix."""

from collections.abc import Sequence
from enum import IntEnum, StrEnum

from nightshift.text import MAX_TEXT, clean


class ExitCode(IntEnum):
    """The exit codes of run.py and the other commands."""

    MEASURED = 0
    CRASH = 1
    USAGE = 2
    INTERRUPTED = 130


class Failure(StrEnum):
    """The cause of a failure. Only `config` counts against a config."""

    CONFIG = "config"  # not-a-number, out of memory, deadline: do not try the config again
    INFRASTRUCTURE = "infrastructure"  # a killed process, a full disk: try the same config again
    UNKNOWN = "unknown"  # the log has no cause; a start of the incumbent's config decides; never in a record
    INTERRUPTED = "interrupted"  # Ctrl-C, SIGTERM, power cut


class NightshiftError(Exception):
    """Base class of all errors that are printed as one line, without a traceback."""

    exit_code = ExitCode.CRASH

    def __init__(self, cause: str, fix: str = "") -> None:
        """`cause`: with the offending value. `fix`: an imperative sentence."""
        self.cause, self.fix = cause, fix
        line = f"{cause.rstrip('.')}. {fix}" if fix else cause
        super().__init__(clean(line, 4 * MAX_TEXT))


class UsageError(NightshiftError):
    """The command cannot be executed: wrong flags, a wrong folder, or a wrong moment."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """train.toml is refused. This costs no GPU time and is not recorded as an experiment."""


class EngineError(NightshiftError):
    """Hardware or installation is missing or broken. During an experiment, its `failure` is recorded."""

    exit_code = ExitCode.USAGE

    def __init__(
        self, cause: str, fix: str = "", *, failure: Failure = Failure.INFRASTRUCTURE, log: str | None = None
    ) -> None:
        """`log`: the log in the run's folder whose last lines show the cause."""
        super().__init__(cause, fix)
        self.failure, self.log = failure, log


class Interrupted(NightshiftError):
    """The user or the system stopped the harness."""

    exit_code = ExitCode.INTERRUPTED


def listed(names: Sequence[str]) -> str:
    """Return `a, b and 3 more`."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

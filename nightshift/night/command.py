"""`uv run nightshift night`: from its flags to its exit code."""

from __future__ import annotations

from pathlib import Path

from nightshift import console
from nightshift.campaign.ledger import Ledger
from nightshift.errors import ExitCode, NightshiftError
from nightshift.night.state import NightRequest


def night(root: Path, request: NightRequest) -> int:
    """A night from its start or from where it was cut off, to its end; the exit code.

    0: a stop rule or a person ended it; 1: it could not go on; 2: wrong use or broken set-up; 130: stopped now.
    """
    from nightshift.experiment import require_ready
    from nightshift.night.begin import begin, proposer_of
    from nightshift.night.loop import Night
    from nightshift.setup import open_setup

    reporter = console.TerminalReporter()
    try:
        with Ledger(root).head():
            setup = open_setup(root, request.request, reporter)
            proposer = proposer_of(request, setup)
            require_ready(setup.engine)  # a person is still there to put it right
            setup.engine.prepare_at_start(reporter.note)
            stop = Night(begin(request, setup), setup, proposer, console.print_text).run()
    except NightshiftError as error:
        reporter.close()
        console.print_error(error)
        return error.exit_code
    reporter.close()
    return ExitCode.MEASURED if stop.is_planned else ExitCode.CRASH

"""`uv run nightshift night`: from its flags to its exit code."""

from __future__ import annotations

from pathlib import Path

from nightshift import console
from nightshift.campaign.ledger import Ledger
from nightshift.errors import ExitCode, NightshiftError
from nightshift.night.state import Order, lock


def night(root: Path, order: Order) -> int:
    """A night from its start or from where it was cut off, to its end; the exit code.

    0: a stop rule or a person ended it; 1: it could not go on; 2: wrong use or broken set-up; 130: stopped now.
    """
    from nightshift.experiment import require_ready
    from nightshift.night.begin import begin, proposer_of
    from nightshift.night.loop import Night
    from nightshift.setup import open_lab

    reporter = console.TerminalReporter()
    try:
        held = lock(Ledger(root))
        try:
            lab = open_lab(root, order.engine, order.budget_seconds, reporter, order.gpus)
            proposer = proposer_of(order, lab)
            require_ready(lab.engine)  # a person is still there to mend it
            lab.engine.prepare_at_start(reporter.note)
            stop = Night(begin(order, lab), lab, proposer, console.print_text).run()
        finally:
            held.release()
            reporter.close()
    except NightshiftError as error:
        console.print_error(error)
        return error.exit_code
    return ExitCode.MEASURED if stop.is_planned else ExitCode.CRASH

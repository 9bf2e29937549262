"""The matrix of faults: which process or file x which moment x which failure, drawn by number.

A moment is a file operation of run.py (`run.py 3`) or of its worker (`worker 2`), or an event of the trainer
(`step 2`). How many file operations there are is counted in experiments without a fault (play.py), so a new one in the
product is a new moment to strike at.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

Moments = Mapping[str, dict[str, int]]  # by scenario, how many file operations run.py and its worker have

BRANCH = "autoresearch/faults"

# What is tried in the checkout: a baseline; a change that is kept, one that is discarded; the incumbent again.
SCENARIOS = ("baseline", "better", "worse", "again")
EVENTS = ("start", "ready", "step 1", "step 3", "trained", "weights", "completed")
DEADLY = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGQUIT")
POLITE = ("SIGTERM", "SIGINT", "SIGHUP")
OS_ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE", "ENOMEM")
STRIKES = (  # the victim, and the failures of which one is drawn
    ("run.py", DEADLY),
    ("run.py", POLITE),
    ("a file operation", OS_ERRORS),
    ("worker", (*DEADLY, "SIGTERM", "SIGPIPE")),
    ("trainer", (*DEADLY, "SIGTERM", "SIGPIPE")),
    ("trainer", ("exit 0", "exit 1", "exit 3", "exit 127", "exit 255")),
    ("watchdog", ("SIGKILL", "SIGTERM")),
    ("watchdog and run.py", ("SIGKILL",)),
    ("watchdog and worker", ("SIGKILL",)),
    ("run.py and worker", ("SIGKILL",)),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One draw from the matrix."""

    number: int
    scenario: str
    victim: str
    moment: str
    failure: str


def draw(number: int, moments: Moments) -> Fault:
    """The fault of that number; the same for the same moments."""
    rng = random.Random(number)
    scenario = rng.choice(SCENARIOS)
    victim, failures = STRIKES[number % len(STRIKES)]
    process = victim if victim in ("run.py", "worker") else rng.choice(("run.py", "worker"))
    moment = f"{process} {rng.randint(1, moments[scenario][process])}"
    if victim.startswith(("trainer", "watchdog")) or (victim != "a file operation" and rng.random() < 0.3):
        moment = rng.choice(EVENTS)
    return Fault(number, scenario, victim, moment, rng.choice(failures))

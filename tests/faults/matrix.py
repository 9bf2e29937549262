"""The matrix of faults: which process or file x which moment x which failure, drawn by seed.

A moment is a file operation of run.py (`run.py 3`) or of its worker (`worker 2`), or an event of the trainer
(`step 2`). How many file operations there are is counted in experiments without a fault (play.py), so a new one in the
product is a new moment to strike at.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Moments = Mapping[str, tuple[int, int]]  # how many file operations run.py and its worker have, by scenario
Choice = TypeVar("Choice")

BRANCH = "autoresearch/faults"

# What the checkout holds and what is tried in it: a baseline; a change that is kept, one that is
# discarded, the incumbent again; a change that the agent committed by itself, good or bad.
SCENARIOS = ("baseline", "better", "worse", "again", "better, committed", "worse, committed")
EVENTS = ("start", "ready", "step 1", "step 3", "trained", "weights", "completed")
DEADLY = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGQUIT")
POLITE = ("SIGTERM", "SIGINT", "SIGHUP")
OS_ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE", "ENOMEM")


@dataclass(frozen=True, slots=True)
class Fault:
    """One draw from the matrix."""

    number: int
    family: str
    scenario: str
    victim: str
    moment: str
    failure: str


class Dice:
    """The chance of one fault, with a file operation and an event of its scenario drawn already."""

    def __init__(self, rng: random.Random, num_operations: tuple[int, int]) -> None:
        self.rng = rng
        of_run, of_worker = num_operations
        operation = rng.randint(1, of_run + of_worker)
        self.operation = f"run.py {operation}" if operation <= of_run else f"worker {operation - of_run}"
        self.event = rng.choice(EVENTS)
        self.of_worker = f"worker {rng.randint(1, of_worker)}"

    def one_of(self, *choices: Choice) -> Choice:
        return self.rng.choice(choices)


Struck = tuple[str, str, str]  # victim, moment, failure


def _killed(d: Dice) -> Struck:
    """Three in ten at a moment between two file operations."""
    return ("run.py", d.event, "SIGKILL") if d.rng.random() < 0.3 else ("run.py", d.operation, d.one_of(*DEADLY))


# How many of a thousand are of the family, roughly, and what is drawn for it.
FAMILIES: dict[str, tuple[int, Callable[[Dice], Struck]]] = {
    "run.py killed": (150, _killed),
    "run.py asked to stop": (80, lambda d: ("run.py", d.one_of(d.operation, d.event), d.one_of(*POLITE))),
    "run.py stopped and continued": (20, lambda d: ("run.py", d.operation, "SIGSTOP")),
    "run.py killed twice": (40, lambda d: (
        "run.py", d.operation, f"SIGKILL, then at file operation {d.rng.randint(1, 12)} of the next start")),
    "file operation refused": (130, lambda d: ("run.py", d.operation, d.one_of(*OS_ERRORS))),
    "worker killed": (70, lambda d: (
        "worker", d.one_of(d.of_worker, d.event), d.one_of(*DEADLY, "SIGTERM", "SIGPIPE"))),
    "worker hangs": (15, lambda d: ("worker", d.of_worker, d.one_of("silence", "SIGSTOP"))),
    "trainer killed": (90, lambda d: ("trainer", d.event, d.one_of(*DEADLY, "SIGTERM", "SIGPIPE"))),
    "trainer exits": (60, lambda d: ("trainer", d.event, f"exit {d.one_of(0, 1, 2, 3, 127, 255)}")),
    "trainer hangs": (15, lambda d: ("trainer", d.event, d.one_of("silence", "SIGSTOP"))),
    "watchdog killed or stopped": (30, lambda d: (
        "watchdog", d.event, d.one_of("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP"))),
    "two killed at once": (30, lambda d: (
        d.one_of("watchdog and run.py", "watchdog and worker", "run.py and worker"), d.event, "SIGKILL")),
}  # fmt: skip


def draw(number: int, seed: int, moments: Moments, family: str | None = None) -> Fault:
    """The fault of that number; the same for the same seed, moments and family."""
    rng = random.Random(f"{seed}/{number}/{family}")
    if family is None:
        (family,) = rng.choices(list(FAMILIES), [weight for weight, _ in FAMILIES.values()])
    scenario = rng.choice(SCENARIOS)
    victim, moment, failure = FAMILIES[family][1](Dice(rng, moments[scenario]))
    return Fault(number, family, scenario, victim, moment, failure)

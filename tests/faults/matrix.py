"""The matrix of faults: which process or file x which moment x which failure, drawn by seed.

A moment is a file operation of run.py (`settle 3`: the third one of that step) or of its worker (`worker train 2`),
an event of the trainer (`step 2`), or `before` the start. Which file operations there are is not written here: it is
recorded from experiments without a fault (scenario.py), so a new one in the product is a new moment to strike at.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Moments = Mapping[str, Sequence[tuple[str, int]]]  # scenario -> (step, how many file operations it has)
Choice = TypeVar("Choice")

BRANCH = "autoresearch/faults"
OF_WORKER = "worker "  # how steps of the worker begin

# What the checkout holds and what is tried in it: a baseline; a change that is kept, one that is
# discarded, the incumbent again; a change that the agent committed by itself, good or bad.
SCENARIOS = ("baseline", "better", "worse", "again", "better, committed", "worse, committed")
EVENTS = ("start", "ready", "step 1", "step 3", "trained", "weights", "completed")
DEADLY = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGQUIT")
POLITE = ("SIGTERM", "SIGINT", "SIGHUP")
TALK = (
    "no JSON", "no object", "no event", "unknown event", "event without its fields", "wrong types", "not a number",
    "half a line", "line without end", "closed pipe",
)  # fmt: skip
OS_ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE", "ENOMEM")
FOLDERS = (".", "runs", "runs/LAST", ".git", ".git/objects", ".git/refs/heads/autoresearch")
GIT = (
    "index locked", "branch locked", "HEAD locked", "packed refs", "detached HEAD", "another branch", "branch renamed",
    "config committed", "document committed", "harness committed", "merge under way", "no repository",
)  # fmt: skip
RECORDED = ("results.tsv", "runs/LAST/record.json", "runs/LAST/train.toml", "runs/0001/record.json",
            "runs/0001/train.toml", "runs/LAST", "train.toml")  # fmt: skip
# LAST is the last experiment.
IN_FLIGHT = (
    *RECORDED, "runs/.controller",
    *(f"runs/LAST/{name}" for name in (
        "job.json", "worker.started", "result.json", "worker.log", "trainer.log", "spec.json", "weights",
        "metrics.jsonl", "evaluation.jsonl", "progress.json")),
)  # fmt: skip
IN_THE_WORLD = ("disk full", "folder read-only", "file damaged before", "file damaged in flight", "git state changed")
# What a process beside run.py leaves in the folder of a run under way, to be taken for what the worker measured.
FORGERIES = ("result with another token", "result of an earlier run", "no result", "result as a link",
             "result as a folder", "job of another config")  # fmt: skip
EDITED = "edited result"  # which must be there
OF_REAL_RUN = ("runs/LAST/weights", "runs/LAST/metrics.jsonl", "runs/LAST/spec.json", "train.toml")
DAMAGE = ("deleted", "emptied", "torn", "garbled", "a folder instead", "a link to nowhere instead", "edited")
UNINVITED = ("runs/9000 as a folder", "runs/0500 as a file", "runs/notes as a folder", "a row too many", "a torn row")
JUMPS_SECONDS = (-86_400.0, -3_600.0, -5.0, 5.0, 3_600.0, 86_400.0, 1e9)
PROGRAMS = ("inference", "env-server", "orchestrator", "torchrun")
# Of tests/stand_in_prime_rl.py and stand_in_server.py; those that only a limit of a minute ends are left out.
MISBEHAVIOUR = (
    "slow_start", "server_out_of_memory", "server_never_ready", "loop_never_starts", "no_first_broadcast",
    "trainer_hang", "trainer_out_of_memory", "trainer_dies", "nan", "no_stable", "empty_batches",
    "killed_while_paused", "server_dies", "config_refused", "validator_dies", "ignore_sigterm", "grandchild",
    "refuse", "unhealthy", "no_model", "chat_500", "cut_once", "wrong_model", "missing_usage", "no_choices",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """One draw. `family` is the row of the table that it counts in."""

    number: int
    family: str
    scenario: str
    victim: str
    moment: str
    failure: str


class Dice:
    """The chance of one fault, with a file operation and an event of its scenario drawn already."""

    def __init__(self, rng: random.Random, steps: Sequence[tuple[str, int]]) -> None:
        self.rng = rng
        step, num_operations = rng.choice(steps)
        self.operation = f"{step} {rng.randint(1, num_operations)}"
        self.event = rng.choice(EVENTS)
        step, num_operations = rng.choice([pair for pair in steps if pair[0].startswith(OF_WORKER)])
        self.of_worker = f"{step} {rng.randint(1, num_operations)}"

    def one_of(self, *choices: Choice) -> Choice:
        return self.rng.choice(choices)


Struck = tuple[str, str, str]  # victim, moment, failure


def _killed(d: Dice) -> Struck:
    """Three in ten at a moment between two file operations."""
    return ("run.py", d.event, "SIGKILL") if d.rng.random() < 0.3 else ("run.py", d.operation, d.one_of(*DEADLY))


def _forged(d: Dice) -> Struck:
    """One in eight when the worker has ended, which no file operation of its own comes after."""
    if d.rng.random() < 0.125:
        return EDITED, f"{OF_WORKER}ended 1", "forged"
    return d.one_of(*FORGERIES), d.of_worker, "forged"


def _damaged_before(d: Dice) -> Struck:
    victim, failure = d.one_of(*[(name, how) for name in RECORDED for how in DAMAGE], *[(u, "") for u in UNINVITED])
    return victim, "before", failure


def _clock(d: Dice) -> Struck:
    """One in four while prime-rl trains."""
    victim, moment = ("clock of prime-rl", "worker train 2") if d.rng.random() < 0.25 else ("clock", d.operation)
    return victim, moment, f"{d.one_of(*JUMPS_SECONDS):+.0f} s"


def _of_prime_rl(d: Dice) -> Struck:
    if d.rng.random() < 0.6:
        return "stand-in programs", f"step {d.rng.randint(1, 3)}", d.one_of(*MISBEHAVIOUR)
    moment, failure = d.one_of("starting", "step 1", "step 3"), d.one_of("SIGKILL", "SIGTERM", "SIGSTOP")
    return d.one_of(*PROGRAMS, "run.py", "worker"), moment, failure


def _of_real_engine(d: Dice) -> Struck:
    victim = d.one_of("trainer", "worker", "run.py", "run.py", "watchdog", "files")
    moment = d.one_of("starting", "loading", "step 1", "step 3", "evaluating", "weights")
    if victim == "files":
        return d.one_of(*OF_REAL_RUN), moment, "deleted"
    failures = {"run.py": (*DEADLY, *POLITE), "watchdog": ("SIGKILL", "SIGSTOP")}
    return victim, moment, d.one_of(*failures.get(victim, (*DEADLY, "SIGTERM")))


REAL = "real trl engine"
REAL_EVERY = 20  # of the faults, one is with the real engine
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
    "result forged": (40, _forged),
    "trainer killed": (90, lambda d: ("trainer", d.event, d.one_of(*DEADLY, "SIGTERM", "SIGPIPE"))),
    "trainer exits": (60, lambda d: ("trainer", d.event, f"exit {d.one_of(0, 1, 2, 3, 127, 255)}")),
    "trainer talks nonsense": (40, lambda d: ("trainer", d.event, d.one_of(*TALK))),
    "trainer hangs": (15, lambda d: ("trainer", d.event, d.one_of("silence", "SIGSTOP"))),
    "trainer leaves a daemon": (20, lambda d: ("trainer", d.event, "daemon")),
    "watchdog killed or stopped": (30, lambda d: (
        "watchdog", d.event, d.one_of("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP"))),
    "two killed at once": (30, lambda d: (
        d.one_of("watchdog and run.py", "watchdog and worker", "run.py and worker"), d.event, "SIGKILL")),
    "disk full": (60, lambda d: ("disk", d.operation, f"{d.one_of(0, 0, 4, 8, 16, 40, 100)} kB left")),
    "folder read-only": (40, lambda d: (d.one_of(*FOLDERS), d.operation, "read-only")),
    "file damaged before": (40, _damaged_before),
    "file damaged in flight": (50, lambda d: (
        d.one_of(*IN_FLIGHT), d.one_of(d.operation, d.of_worker), d.one_of(*DAMAGE))),
    "clock jump": (30, _clock),
    "two run.py at once": (20, lambda d: ("run.py", "together", f"after {d.one_of(0.0, 0.0, 0.1, 0.3, 0.6)} s")),
    "git state changed": (70, lambda d: ("git", d.one_of(d.operation, "before"), d.one_of(*GIT))),
    "prime-rl program": (40, _of_prime_rl),
    "prime-rl port taken": (10, lambda d: ("port", "before", d.one_of("inference", "env_server"))),
    REAL: (0, _of_real_engine),  # drawn by number instead
}  # fmt: skip


def draw(number: int, seed: int, moments: Moments, family: str | None = None) -> Fault:
    """The fault of that number; the same for the same seed, moments and family."""
    rng = random.Random(f"{seed}/{number}/{family}")
    if family is None and number % REAL_EVERY == REAL_EVERY - 1:
        family = REAL
    if family is None:
        (family,) = rng.choices(list(FAMILIES), [weight for weight, _ in FAMILIES.values()])
    scenario = rng.choice(SCENARIOS)
    victim, moment, failure = FAMILIES[family][1](Dice(rng, moments[scenario]))
    if family == REAL:
        scenario = "real"
    elif "prime-rl" in family + victim:
        scenario = "prime-rl"
    return Fault(number, family, scenario, victim, moment, failure)

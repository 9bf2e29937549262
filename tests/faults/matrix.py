"""The matrix of faults: which process or file x which moment x which failure, drawn by seed.

A moment is a file operation of run.py (`settle 3`: the third one of that step), an event of the worker
(`step 2`), or `before` the start. Which file operations there are is not written here: it is recorded from
experiments without a fault (fault_scene.py), so a new one in the product is a new moment to strike at.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Moments = Mapping[str, Sequence[tuple[str, int]]]  # scene -> (step, how many file operations it has)

# What the checkout holds and what is tried in it: two runs of a baseline; a change that is kept, one that is
# discarded, one too close to call (up to three runs); a change that the agent committed by itself, good or bad.
SCENES = ("baseline", "better", "worse", "again", "better, committed", "worse, committed")
WORKER_EVENTS = ("start", "ready", "step 1", "step 3", "trained", "weights", "completed")
DEADLY = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGQUIT")
POLITE = ("SIGTERM", "SIGINT", "SIGHUP")
TALK = (
    "no JSON", "no object", "no event", "unknown event", "event without its fields", "wrong types", "not a number",
    "half a line", "line without end", "closed pipe",
)  # fmt: skip
OS_ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE", "ENOMEM")
FOLDERS = (".", "runs", "runs/LAST", "runs/LAST/run-1", ".git", ".git/objects", ".git/refs/heads/autoresearch")
GIT = (
    "index locked", "branch locked", "HEAD locked", "packed refs", "detached HEAD", "another branch", "branch renamed",
    "config committed", "document committed", "harness committed", "merge under way", "no repository",
)  # fmt: skip
RECORDED = ("results.tsv", "runs/LAST/record.json", "runs/LAST/train.toml", "runs/0001/record.json",
            "runs/0001/train.toml", "runs/LAST", "train.toml")  # fmt: skip
IN_FLIGHT = (*RECORDED, "runs/.lock", "runs/LAST/run-1", "runs/LAST/run-1/spec.json", "runs/LAST/run-1/weights",
             "runs/LAST/run-1/worker.log", "runs/LAST/progress.json")  # fmt: skip
DAMAGE = ("deleted", "emptied", "torn", "garbled", "a folder instead", "a link to nowhere instead", "edited")
STRAYS = ("runs/9000 as a folder", "runs/0500 as a file", "runs/notes as a folder", "a row too many", "a torn row")
JUMPS_SECONDS = (-86_400.0, -3_600.0, -5.0, 5.0, 3_600.0, 86_400.0, 1e9)
PROGRAMS = ("inference", "env-server", "orchestrator", "torchrun")
# Of tests/stand_in_prime_rl.py and stand_in_server.py; those that only a limit of a minute ends are left out.
MISBEHAVIOUR = (
    "slow_start", "server_out_of_memory", "server_never_ready", "loop_never_starts", "no_first_broadcast",
    "trainer_hang", "trainer_out_of_memory", "trainer_dies", "nan", "no_stable", "empty_batches",
    "killed_while_paused", "server_dies", "config_refused", "validator_dies", "ignore_sigterm", "grandchild",
    "refuse", "unhealthy", "no_model", "chat_500", "cut_once", "wrong_model", "missing_usage", "no_choices",
)  # fmt: skip

# How many of a thousand, stand-in and real; the rest of each draw is uniform.
WEIGHTS = {
    "run.py killed": 150,
    "run.py asked to stop": 80,
    "run.py stopped and continued": 20,
    "run.py killed twice": 40,
    "file operation refused": 130,
    "worker killed": 90,
    "worker exits": 60,
    "worker talks nonsense": 40,
    "worker hangs": 15,
    "worker leaves a daemon": 20,
    "watchdog killed or stopped": 30,
    "watchdog and run.py killed": 15,
    "disk full": 60,
    "folder read-only": 40,
    "file damaged before": 40,
    "file damaged in flight": 50,
    "clock jump": 30,
    "two run.py at once": 20,
    "git state changed": 70,
    "prime-rl program": 40,
    "prime-rl port taken": 10,
}
REAL = "real trl engine"
REAL_EVERY = 20  # of the faults, one is with the real engine
FAMILIES = (*WEIGHTS, REAL)


@dataclass(frozen=True, slots=True)
class Fault:
    """One draw. `family` is the row of the table that it counts in."""

    number: int
    family: str
    scene: str
    victim: str
    moment: str
    failure: str


def draw(number: int, seed: int, moments: Moments, family: str | None = None) -> Fault:
    """The fault of that number; the same for the same seed, moments and family."""
    rng = random.Random(f"{seed}/{number}/{family}")
    if family is None:
        is_real = number % REAL_EVERY == REAL_EVERY - 1
        family = REAL if is_real else rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    scene = rng.choice(SCENES)
    steps = moments[scene]
    step, num_operations = rng.choice(steps)
    operation = f"{step} {rng.randint(1, num_operations)}"
    event = rng.choice(WORKER_EVENTS)
    victim, moment, failure = "run.py", operation, ""
    match family:
        case "run.py killed":
            if rng.random() < 0.3:  # at a moment between two file operations
                moment, failure = event, "SIGKILL"
            else:
                failure = rng.choice(DEADLY)
        case "run.py asked to stop":
            failure = rng.choice(POLITE)
            moment = rng.choice((operation, event))
        case "run.py stopped and continued":
            failure = "SIGSTOP"
        case "run.py killed twice":
            failure = f"SIGKILL, then at file operation {rng.randint(1, 12)} of the next start"
        case "file operation refused":
            failure = rng.choice(OS_ERRORS)
        case "worker killed":
            victim, moment, failure = "worker", event, rng.choice((*DEADLY, "SIGTERM", "SIGPIPE"))
        case "worker exits":
            victim, moment, failure = "worker", event, f"exit {rng.choice((0, 1, 2, 3, 127, 255))}"
        case "worker talks nonsense":
            victim, moment, failure = "worker", event, rng.choice(TALK)
        case "worker hangs":
            victim, moment, failure = "worker", event, rng.choice(("silence", "SIGSTOP"))
        case "worker leaves a daemon":
            victim, moment, failure = "worker", event, "daemon"
        case "watchdog killed or stopped":
            victim, moment, failure = "watchdog", event, rng.choice(("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP"))
        case "watchdog and run.py killed":
            victim, moment, failure = "watchdog and run.py", event, "SIGKILL"
        case "disk full":
            victim, failure = "disk", f"{rng.choice((0, 0, 4, 8, 16, 40, 100))} kB left"
        case "folder read-only":
            victim, failure = rng.choice(FOLDERS), "read-only"
        case "file damaged before":
            victim, failure = rng.choice(
                [(name, how) for name in RECORDED for how in DAMAGE] + [(s, "") for s in STRAYS]
            )
            moment = "before"
        case "file damaged in flight":
            victim, failure = rng.choice(IN_FLIGHT), rng.choice(DAMAGE)
        case "clock jump":
            victim, failure = "clock", f"{rng.choice(JUMPS_SECONDS):+.0f} s"
            if rng.random() < 0.25:
                scene, moment = "prime-rl", "train 2"
        case "two run.py at once":
            moment, failure = "together", f"after {rng.choice((0.0, 0.0, 0.1, 0.3, 0.6))} s"
        case "git state changed":
            victim, failure = "git", rng.choice(GIT)
            moment = rng.choice((operation, "before"))
        case "prime-rl program":
            victim, moment, failure = _of_prime_rl(rng)
            scene = "prime-rl"
        case "prime-rl port taken":
            victim, moment, failure = "port", "before", rng.choice(("inference", "env_server"))
            scene = "prime-rl"
        case "real trl engine":
            victim, moment, failure = _of_trl(rng)
            scene = "real"
        case _:
            raise ValueError(f"no such family: {family}")
    return Fault(number, family, scene, victim, moment, failure)


def _of_prime_rl(rng: random.Random) -> tuple[str, str, str]:
    if rng.random() < 0.6:
        return "stand-in programs", f"step {rng.randint(1, 3)}", rng.choice(MISBEHAVIOUR)
    victim = rng.choice((*PROGRAMS, "run.py"))
    return victim, rng.choice(("starting", "step 1", "step 3")), rng.choice(("SIGKILL", "SIGTERM", "SIGSTOP"))


def _of_trl(rng: random.Random) -> tuple[str, str, str]:
    victim = rng.choice(("worker", "run.py", "run.py", "watchdog", "files"))
    moment = rng.choice(("starting", "loading", "step 1", "step 3", "evaluating", "weights"))
    if victim == "files":
        target = rng.choice(("runs/LAST/run-1/weights", "runs/LAST/run-1", "runs/LAST/run-1/spec.json", "train.toml"))
        return target, moment, "deleted"
    failures = {"worker": (*DEADLY, "SIGTERM"), "run.py": (*DEADLY, *POLITE), "watchdog": ("SIGKILL", "SIGSTOP")}
    return victim, moment, rng.choice(failures[victim])

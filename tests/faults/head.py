"""run.py with stand-ins below its engines and a strike prepared: a fork of this process, which has imported everything.

A real process with the real front door, engine, supervisor, watchdog, git and files, but half a second younger.
All that depends on how a stand-in gets below an engine is `_equip`.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime as real_datetime
from datetime import timedelta, tzinfo
from pathlib import Path
from typing import Any

from nightshift import command, experiment, preparation, setup  # noqa: F401  (imported for the forks)
from nightshift.engines.prime_rl import engine as prime_rl
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.prime_rl.installation import Installation, Pins
from nightshift.engines.prime_rl.ports import Ports
from nightshift.engines.prime_rl.session import Timing
from nightshift.engines.trl.engine import TrlEngine
from nightshift.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, Rules
from tests.checkouts import ROOT
from tests.faults.stand_in_trainer import NUM_SELECTION

TRAINER = Path(__file__).with_name("stand_in_trainer.py")
RULES = replace(
    ARITHMETIC_TRL,
    environments=(replace(ARITHMETIC_TRL.environments[0], num_selection=NUM_SELECTION),),
    startup_seconds=20.0,
)
PRIME_RL_RULES = replace(
    GSM8K_PRIME_RL, environments=(replace(ARITHMETIC_TRL.environments[0], num_selection=16, num_train=64),)
)
TAKES_SECONDS = 90.0  # an experiment; more is a hang
REAL_TAKES_SECONDS = 400.0  # a start of torch on a machine with other work takes a minute

# The steps of an experiment, by the outermost of these functions on the stack.
STEPS = {
    "prepare_missing": "prepare", "finish_earlier": "recover", "admit": "admit", "Ledger.reserve": "reserve",
    "Ledger.write": "write", "TrlEngine.open": "open", "TrlSession.train": "train", "evaluate": "evaluate",
    "TrlSession.close": "stop", "settle": "settle", "Ledger.close": "close", "Ledger.keep_model": "keep model",
    "PrimeRlSession.train": "train",
}  # fmt: skip
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "subprocess.Popen")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

Strike = Callable[[str, int], None]  # called before a file operation: (step, its number in that step)


class Clock:
    """A wall clock of one process that jumps when told."""

    def __init__(self) -> None:
        self.jump_seconds = 0.0

    def datetime(self) -> type[real_datetime]:
        clock = self

        class Jumping(real_datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> real_datetime:  # type: ignore[override]
                return real_datetime.now(tz) + timedelta(seconds=clock.jump_seconds)

        return Jumping


@dataclass(frozen=True, slots=True)
class World:
    """What is otherwise than usual for one run.py. `strike` is told of every file operation before it happens."""

    strike: Strike | None = None
    deadline_seconds: float = 60.0
    clock: Clock | None = None
    ports: Ports | None = None
    output: str = ""  # added to the names of the files that stdout and stderr go to


def _equip(world: World) -> None:
    """In the fork: stand-ins below the engines, and the deadline, clock and ports of this fault."""

    def limited(engine: type[Any]) -> type[Any]:
        class Limited(engine):  # type: ignore[misc]
            def open(self, settings: Mapping[str, Any], seed: int, run_dir: Path, deadline_seconds: float) -> Any:
                return super().open(settings, seed, run_dir, min(deadline_seconds, world.deadline_seconds))

        return Limited

    def pick_rules(engine: str | None, gpu_count: int) -> Rules:
        return PRIME_RL_RULES if engine == "prime-rl" else RULES

    def open_engine(rules: Rules, root: Path, *flags: object) -> Any:
        if rules.engine == "trl":
            return limited(TrlEngine)(rules, root, dict(os.environ), worker=TRAINER)
        made = Installation(root.parent / "prime-rl" / "prime-rl", Pins.read(ROOT / "pyproject.toml"))
        startup_seconds = min(20.0, world.deadline_seconds / 2)
        timing = Timing(startup_seconds=startup_seconds, hang_seconds=3.0, grace_seconds=1.0, poll_seconds=0.05)
        return limited(PrimeRlEngine)(rules, root, dict(os.environ), made, gpu_ids=(), timing=timing)

    setup.pick_rules, setup.open_engine = pick_rules, open_engine
    prime_rl.problems = lambda *arguments: []
    if world.clock is not None:
        clock, really = world.clock, time.time
        setup.datetime = clock.datetime()  # type: ignore[misc]
        time.time = lambda: really() + clock.jump_seconds
    if world.ports is not None:
        prime_rl.launches.free_ports = lambda: world.ports


def start(root: Path, flags: Sequence[str], world: World | None = None) -> int:
    """Fork a run.py for the checkout; its process id. Its output goes to `stdout` and `stderr` beside the checkout."""
    world = world or World()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        os.chdir(root)
        for number, stream in ((1, "stdout"), (2, "stderr")):
            path = root.parent / (stream + world.output)
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False, buffering=1) for n in (1, 2))  # noqa: SIM115
        heed_all_signals()
        _equip(world)
        if world.strike is not None:
            sys.addaudithook(_hook(world.strike))
        import run  # takes an entry off sys.path, of the fork's

        run.ROOT = root
        sys.argv = ["run.py", *flags]
        run.main(list(flags))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)


def launch(root: Path, flags: Sequence[str]) -> int:
    """Start the checkout's own run.py, with the real engine; its process id. Its output goes where a fork's does."""
    with (root.parent / "stdout").open("wb") as out, (root.parent / "stderr").open("wb") as err:
        command = [sys.executable, "run.py", *flags]
        return subprocess.Popen(
            command, cwd=root, stdout=out, stderr=err, start_new_session=True, preexec_fn=heed_all_signals
        ).pid


def heed_all_signals() -> None:
    """A shell's background job ignores some, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def _hook(strike: Strike) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that counts the file operations of each step and tells each one before it happens."""
    counts: Counter[str] = Counter()
    is_busy = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal is_busy
        # `open` tells its flags, as a number where it is the one of os
        reads = event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING)
        if is_busy or event not in OPERATIONS or reads:
            return
        step, frame = "front door", sys._getframe(1)
        while frame is not None:
            step = STEPS.get(frame.f_code.co_qualname, step)
            frame = frame.f_back  # type: ignore[assignment]
        counts[step] += 1
        is_busy = True
        try:
            strike(step, counts[step])
        finally:
            is_busy = False

    return hook


def finish(pid: int, within_seconds: float = TAKES_SECONDS) -> int | None:
    """The exit code, negative for a signal; None if it hangs, and is killed. What was stopped is continued."""
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if done and os.WIFSTOPPED(status):
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
        elif done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def complete(root: Path, flags: Sequence[str], world: World | None = None, is_real: bool = False) -> int | None:
    """One run.py from start to end."""
    return finish(launch(root, flags), REAL_TAKES_SECONDS) if is_real else finish(start(root, flags, world))

"""What is otherwise than usual for one run.py and the workers that it starts: stand-ins, limits, and one strike.

A plan goes to the worker as JSON. A strike is an audit hook of either process: it counts the file operations of each
step, and acts before the one that the fault names, in the process that is about to do it.
"""

import errno
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime as real_datetime
from datetime import timedelta, tzinfo
from pathlib import Path
from typing import Any

from nightshift.config.rules import Rules
from nightshift.engines.base import Engine
from nightshift.engines.trl.engine import TrlEngine
from tests.faults import actions
from tests.faults.matrix import OF_WORKER, Fault
from tests.faults.stand_in_trainer import FOREVER, NUM_VALIDATION
from tests.rules import ARITHMETIC_TRL
from tests.stand_ins import small

TRAINER = (str(Path(__file__).with_name("stand_in_trainer.py")),)
RULES = replace(small(ARITHMETIC_TRL, NUM_VALIDATION), startup_seconds=60.0)

# The steps of an experiment, by the outermost of these functions on the stack: those of run.py, and of its worker.
STEPS = {
    "open_controller": "set up", "TrlEngine.prepare_at_start": "prepare", "resume": "recover",
    "Controller.admit": "admit",
    "Ledger.reserve": "reserve", "Controller.submit": "submit",
    "LocalExecutor.result": "collect", "Ledger.write": "write",
    "_settle": "settle", "Ledger.close": "close", "keep_model": "keep model",
}  # fmt: skip
WORKER_STEPS = {
    "TrlEngine.open": "open", "TrlSession.train": "train",
    "evaluate": "evaluate", "TrlSession.close": "stop", "write_json": "result",
}  # fmt: skip
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.rmtree", "subprocess.Popen")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class Plan:
    """`fault` strikes once, at a file operation, and leaves the file `struck`; `told` gets a line for each operation.

    `last`: before this file operation, of all of run.py's, it is killed. `deadline_seconds` are a run's at most.
    """

    fault: Fault | None = None
    struck: str = ""
    told: str = ""
    last: int = 0
    deadline_seconds: float = 120.0


def open_engine(plan: Plan, rules: Rules, root: Path, environ: Mapping[str, str], *flags: object) -> Engine:
    """The real engine around a stand-in."""
    return TrlEngine(rules, root, environ, trainer=TRAINER)


@dataclass(slots=True)
class Strike:
    """Of one process: run.py, or the worker of the run in `folder`."""

    plan: Plan
    root: Path
    folder: Path | None = None
    counts: Counter[str] = field(default_factory=Counter)
    jump_seconds: float = 0.0  # of this process's wall clock
    is_busy: bool = False

    def prepare(self) -> None:
        """Watch this process from now on."""
        if self.plan == Plan(deadline_seconds=self.plan.deadline_seconds):
            return
        really = time.time
        time.time = lambda: really() + self.jump_seconds
        sys.addaudithook(self.watch)

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook."""
        # `open` tells its flags, as a number where it is the one of os
        reads = event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING)
        if self.is_busy or event not in OPERATIONS or reads:
            return
        steps, step, frame = STEPS if self.folder is None else WORKER_STEPS, "", sys._getframe(1)
        while frame is not None:
            step = steps.get(frame.f_code.co_qualname, step)
            frame = frame.f_back  # type: ignore[assignment]
        self.reach((step or "front door") if self.folder is None else OF_WORKER + (step or "itself"))

    def reach(self, step: str) -> None:
        """The next file operation of a step comes now."""
        self.counts[step] += 1
        self.is_busy = True
        try:
            if self.plan.told:
                with Path(self.plan.told).open("a") as file:
                    file.write(f"{step}\t{self.counts[step]}\n")
            if self.folder is None and self.counts.total() == self.plan.last:
                os.kill(os.getpid(), signal.SIGKILL)
            fault, struck = self.plan.fault, Path(self.plan.struck)
            if fault and fault.moment == f"{step} {self.counts[step]}" and not struck.exists():
                struck.touch()
                if not self.act(fault):
                    struck.unlink()
        finally:
            self.is_busy = False

    def act(self, fault: Fault) -> bool:
        """False if there was nothing to strike at."""
        if fault.family == "file operation refused":
            number = getattr(errno, fault.failure)
            raise OSError(number, os.strerror(number))
        if fault.family == "clock jump":
            self.jump_seconds = float(fault.failure.split()[0])
            return True
        if fault.family == "git state changed":
            actions.change_git(self.root, fault.failure)
            return True
        if fault.failure == "silence":
            time.sleep(FOREVER)
        pids = {"run.py": os.getpid()} if self.folder is None else {"run.py": os.getppid(), "worker": os.getpid()}
        os.kill(pids[fault.victim], signal.Signals[fault.failure.partition(",")[0]])
        return True

    def datetime(self) -> type[real_datetime]:
        """A class whose clock jumps with this process's."""
        strike = self

        class Jumping(real_datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> real_datetime:  # type: ignore[override]
                return real_datetime.now(tz) + timedelta(seconds=strike.jump_seconds)

        return Jumping

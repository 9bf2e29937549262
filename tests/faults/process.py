"""One process of an experiment that a fault strikes: `process.py run.py|worker|trainer PLAN ARGUMENT...`.

run.py and its worker are the real ones, with the real executor, engine, supervisor, watchdog, git and files. The
trainer is tests/stand_in_trainer.py. A strike in run.py or its worker is an audit hook: it counts the file operations
and acts before the one that the fault names. In the trainer it acts before an event is reported.
"""

import errno
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.rmtree", "subprocess.Popen")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class Fault:
    """One draw from the matrix."""

    number: int
    scenario: str
    victim: str
    moment: str
    failure: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is otherwise than usual for one run.py. `fault` strikes once, and leaves the file `struck`.

    `counts`: a folder that gets a byte for each file operation, in a file for each process.
    """

    fault: Fault | None = None
    struck: str = ""
    counts: str = ""

    def command(self, process: str) -> tuple[str, ...]:
        """Return the words that start a process of this plan, but for its arguments."""
        return (__file__, process, msgspec.json.encode(self).decode())


class Strike:
    """What happens to one process: `run.py`, `worker` or `trainer`."""

    def __init__(self, plan: Plan, process: str, root: Path) -> None:
        self.plan, self.process, self.root = plan, process, root
        self.num_operations = 0
        self.is_busy = False

    def prepare(self) -> None:
        """Watch the file operations of this process from now on."""
        if self.plan.fault or self.plan.counts:
            sys.addaudithook(self.watch)

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook. `open` has its flags, as a number if it is the one of os."""
        reads = event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING)
        if event in OPERATIONS and not reads and not self.is_busy:
            self.operate()

    def operate(self) -> None:
        """The next file operation comes now."""
        self.is_busy = True
        try:
            self.num_operations += 1
            if self.plan.counts:
                with Path(self.plan.counts, self.process).open("ab") as file:
                    file.write(b".")
            self.reach(f"{self.process} {self.num_operations}")
        finally:
            self.is_busy = False

    def reach(self, moment: str) -> None:
        fault, struck = self.plan.fault, Path(self.plan.struck)
        if fault and fault.moment == moment and not struck.exists():
            struck.touch()
            self.act(fault.victim, fault.failure)

    def act(self, victim: str, failure: str) -> None:
        """Do what the fault says; return if this process survives it."""
        if failure.startswith("exit "):
            os._exit(int(failure.removeprefix("exit ")))
        elif failure.startswith("SIG"):
            for pid in self.pids_of(victim):
                os.kill(pid, signal.Signals[failure])
            time.sleep(0.05)  # what was killed is dead before the next operation or event
        else:
            number = getattr(errno, failure)
            raise OSError(number, os.strerror(number))

    def pids_of(self, victim: str) -> list[int]:
        """Return the process ids of a victim, or of two: `watchdog and run.py`.

        run.py is the topmost process from this one up that works in the checkout's root.
        """
        ours = psutil.Process()
        head = ours
        for process in ours.parents():
            with suppress(psutil.AccessDenied):
                head = process if process.cwd() == str(self.root) else head
        watchdogs = [
            p.pid for p in head.children(recursive=True) if any("executors.process" in word for word in p.cmdline())
        ]
        worker = ours.pid if self.process == "worker" else ours.ppid()
        pids = {"trainer": [ours.pid], "worker": [worker], "run.py": [head.pid], "watchdog": watchdogs}
        return [pid for name in victim.split(" and ") for pid in pids[name]]


def run(plan: Plan, root: Path, flags: list[str]) -> None:
    """run.py with stand-ins below its engine, here and in its worker, with limits, and with the strike."""
    from nightshift.startup import begin

    begin()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores some
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    import run as program
    from nightshift.executors import base
    from nightshift.experiment import experiment
    from tests.faults.play import RULES

    strike, bench = Strike(plan, "run.py", root), sys.modules[experiment.Bench.__module__]
    bench.rules_here = lambda *arguments: RULES  # type: ignore[attr-defined]
    bench.open_engine = lambda *arguments: open_engine(plan, *arguments)
    base.PROGRAM = plan.command("worker")
    program.ROOT, sys.argv = root, ["run.py", *flags]
    strike.prepare()
    program.main(flags)


def open_engine(plan: Plan, rules: Any, root: Path, environ: Any, *flags: object) -> Any:
    """The real engine around a stand-in."""
    from nightshift.engines.trl.engine import TrlEngine

    TrlEngine.trainer = plan.command("trainer")
    return TrlEngine(rules, root, environ)


def work(plan: Plan, root: Path, folder: Path) -> int:
    """The worker of the run in `folder`; when it has ended, a moment of its own comes."""
    from nightshift.experiment import worker

    worker.open_engine = lambda *arguments: open_engine(plan, *arguments)  # type: ignore[assignment]
    strike = Strike(plan, "worker", root)
    strike.prepare()
    code = worker.main(root, folder)
    strike.operate()
    return code


def train(plan: Plan, spec: Path) -> None:
    """The stand-in trainer. Its moments are the events of the trainer's protocol, and `start` before the first one."""
    from tests import stand_in_trainer

    root = next(folder.parent for folder in spec.resolve().parents if folder.name == "runs")
    strike, emit = Strike(plan, "trainer", root), stand_in_trainer.emit

    def watched(**event: Any) -> None:
        strike.reach(f"step {event['row']['step']}" if event["event"] == "step" else event["event"])
        emit(**event)

    stand_in_trainer.emit = watched
    strike.reach("start")
    sys.argv = ["trainer.py", str(spec)]
    stand_in_trainer.main()


def main() -> None:
    _, process, plan, first, *others = sys.argv
    decoded = msgspec.json.decode(plan, type=Plan)
    if process == "run.py":
        run(decoded, Path(first), others)
    elif process == "worker":
        sys.exit(work(decoded, Path(first), Path(others[0])))
    else:
        train(decoded, Path(first))


if __name__ == "__main__":
    main()

"""run.py with stand-ins below its engines and a strike prepared: a fork of this process, which has imported everything.

A real process with the real front door, executor, workers, engine, supervisor, watchdog, git and files, but half a
second younger. What depends on the way in which stand-ins get below an engine is in plan.py.
"""

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from nightshift.campaign.records import Job
from nightshift.executors import local
from nightshift.experiment import experiment
from tests.faults.plan import RULES, Plan, Strike, open_engine

WORKER = Path(__file__).with_name("worker.py")
LATE_SECONDS = 5.0  # the executor's own are a minute
TAKES_SECONDS = 300.0  # an experiment; more is a hang
_job = experiment.Bench.job


def _equip(plan: Plan, root: Path) -> None:
    """In the fork: stand-ins below the engines, here and in the workers, limits, and the strike."""

    def make_job(*arguments: Any, **fields: Any) -> Job:
        job = _job(*arguments, **fields)
        return replace(job, deadline_seconds=min(job.deadline_seconds, plan.deadline_seconds))

    strike = Strike(plan, root)
    experiment.rules_here = lambda root, engine, gpu_count: RULES
    experiment.open_engine = partial(open_engine, plan)
    experiment.datetime = strike.datetime()  # type: ignore[misc]
    experiment.Bench.job = make_job  # type: ignore[method-assign]
    local.PROGRAM, local.LATE_SECONDS = (str(WORKER), msgspec.json.encode(plan).decode()), LATE_SECONDS
    strike.prepare()


def start(root: Path, flags: Sequence[str], plan: Plan | None = None) -> int:
    """Fork a run.py for the checkout; its process id. Its output goes to `stdout` and `stderr` beside the checkout."""
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
            path = root.parent / stream
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False, buffering=1) for n in (1, 2))  # noqa: SIM115
        heed_all_signals()
        _equip(plan or Plan(), root)
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


def heed_all_signals() -> None:
    """A shell's background job ignores some, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def finish(pid: int) -> int | None:
    """The exit code, negative for a signal; None if it hangs, and is killed. What was stopped is continued."""
    deadline = time.monotonic() + TAKES_SECONDS
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


def complete(root: Path, flags: Sequence[str], plan: Plan | None = None) -> int | None:
    return finish(start(root, flags, plan))

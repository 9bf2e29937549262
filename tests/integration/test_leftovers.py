"""An agent that kills the head and its watchdog lives until the next start, and nobody else is ended in its stead."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.executors import leftovers as module
from nightshift.executors.leftovers import CHECKOUT_NAME, digest_of, end_leftovers
from nightshift.executors.watchdog import is_alive
from tests.night_checkout import finish, leftovers, start, start_run
from tests.waiting import wait_for

STUBBORN = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
KILLER = f"""
import json, os, psutil, signal, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
daemon = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}, str(folder)], start_new_session=True, cwd="/")
pids = [os.getpid(), daemon.pid]
(folder / "pids").write_text(json.dumps(pids))
head = psutil.Process(os.getppid())
for child in head.children():
    if any("watchdog.py" in word for word in child.cmdline()):
        child.kill()
head.kill()
time.sleep(600)
"""


@pytest.mark.slow
def test_the_next_start_ends_an_agent_that_killed_watchdog_and_head(root: Path) -> None:
    script = root.parent / "killer.py"
    script.write_text(KILLER)
    command = shlex.join([sys.executable, str(script), str(root.parent)])
    code, _, stderr = finish(start(root, agent=command, experiments=2, sandbox="none"))
    assert code == -9, stderr
    alive = [psutil.Process(pid) for pid in json.loads((root.parent / "pids").read_text())]
    assert all(map(is_alive, alive))
    code, _, stderr = finish(start_run(root, "--engine", "trl", "--budget-seconds", "30", "--again"))
    assert code == 0, stderr
    [line] = [line for line in stderr.splitlines() if line.startswith("processes of an earlier start")]
    assert all(f"pid {process.pid} " in line for process in alive)
    wait_for(lambda: not any(map(is_alive, alive)))
    assert leftovers(root) == []
    code, _, stderr = finish(start_run(root, "--engine", "trl", "--budget-seconds", "30", "--again"))
    assert (code, "earlier start" in stderr) == (0, False)


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., psutil.Process]]:
    """A process in a session of its own, without a terminal."""
    monkeypatch.setattr(module, "_checkout", "")
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    started = []

    def make(env: dict[str, str] | None = None, code: str = STUBBORN) -> psutil.Process:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, start_new_session=True, env=env or {}, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return psutil.Process(process.pid)

    yield make
    for process in started:
        process.kill()
        process.communicate()


def test_only_what_belongs_to_the_checkout_is_ended(tmp_path: Path, sleeper: Callable[..., psutil.Process]) -> None:
    told: list[str] = []
    ours, foreign, bare = (
        sleeper({CHECKOUT_NAME: digest_of(tmp_path)}),
        sleeper({CHECKOUT_NAME: digest_of(tmp_path / "other")}),
        sleeper(),
    )
    end_leftovers(tmp_path, told.append)
    wait_for(lambda: not is_alive(ours))
    assert all(map(is_alive, (foreign, bare)))
    assert len(told) == 1
    assert f"pid {ours.pid} " in told[0]

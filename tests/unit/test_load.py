"""What others take of the machine: real processes, and a stand-in for NVML. Other tests run beside these, so all is
compared within one test, and by margins."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from nightshift.campaign.records import Contention
from nightshift.executors.gpus import Watch, watching
from nightshift.executors.watchdog import PR_SET_CHILD_SUBREAPER
from tests.unit.test_gpus import Card, StandInNvml
from tests.waiting import HANG_SECONDS, Clock, wait_for

SPIN_SECONDS = 1.0  # of processor time
# Waits for a file, works for so long by its own processor time, says so, and waits to be ended.
SPIN = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
while time.process_time() < float(sys.argv[1]):
    pass
print(time.process_time(), flush=True)
time.sleep(60)
"""
# Starts the above in a session of its own and is gone: nobody of ours is its parent.
DETACH = """
import os, subprocess, sys
stdout, null = open(sys.argv[1], "w"), subprocess.DEVNULL
child = subprocess.Popen(sys.argv[2:], stdin=null, stdout=stdout, stderr=null, start_new_session=True)
print(child.pid, flush=True)
os._exit(0)
"""

PR_GET_CHILD_SUBREAPER = 37  # linux/prctl.h


def seconds_of_others(work: Callable[[], float]) -> tuple[float, float]:
    """(processor seconds that others used meanwhile, those that `work` says it used); on a clock of 1,000 s a core."""
    clock = Clock()
    watch = Watch(clock=clock)
    worked = work()
    clock.now = 1000.0
    return (watch.taken().others_share or 0.0) * 1000.0 * len(os.sched_getaffinity(0)), worked


def spin_command(sign: Path) -> list[str]:
    return [sys.executable, "-c", SPIN, str(SPIN_SECONDS), str(sign)]


@contextmanager
def detached(folder: Path) -> Iterator[Callable[[], float]]:
    """A process that is nobody's child of ours; call to have it work, for the seconds that it did."""
    said, sign = folder / "said", folder / "sign"
    command = [sys.executable, "-c", DETACH, str(said), *spin_command(sign)]
    libc, is_subreaper = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # supervised groups make pytest one: it would adopt the orphan
    pid = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    libc.prctl(PR_SET_CHILD_SUBREAPER, is_subreaper, 0, 0, 0)

    def work() -> float:
        sign.touch()
        return float(wait_for(lambda: said.read_text().endswith("\n") and said.read_text()))

    try:
        stranger = psutil.Process(pid)
        assert os.getpid() not in [parent.pid for parent in stranger.parents()]
        yield work
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def spin_here() -> float:
    began = time.process_time()
    while time.process_time() - began < SPIN_SECONDS:
        pass
    return time.process_time() - began


@contextmanager
def child(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def seconds_of_all(cores: Iterable[int] = os.sched_getaffinity(0)) -> float:
    times = psutil.cpu_times(percpu=True)
    return sum(times[core].user + times[core].nice + times[core].system for core in cores)


def test_what_a_process_of_somebody_else_uses_is_taken_by_others(tmp_path: Path) -> None:
    with detached(tmp_path) as work:
        others, worked = seconds_of_others(work)
    assert worked >= SPIN_SECONDS
    assert others > 0.8 * SPIN_SECONDS


def test_our_own_work_is_no_other_s() -> None:
    """What all used while we worked, less what the watch says of others, holds our own work."""
    before = seconds_of_all()
    others, worked = seconds_of_others(spin_here)
    assert seconds_of_all() - before - others > 0.8 * worked


@pytest.mark.parametrize("is_ended", [False, True], ids=["alive", "waited for"])
def test_the_work_of_what_we_started_is_ours_too(tmp_path: Path, is_ended: bool) -> None:
    sign = tmp_path / "sign"
    with child(spin_command(sign)) as process:

        def work() -> float:
            sign.touch()
            worked = float(process.stdout.readline())
            if is_ended:
                process.kill()
                process.wait(HANG_SECONDS)
            return worked

        before = seconds_of_all()
        others, worked = seconds_of_others(work)
        assert seconds_of_all() - before - others > 0.8 * worked


# A stand-in for a worker: it has the first core to itself, watches it, and works beside a run on the other one.
WORKER = """
import os, sys, time
from nightshift.executors.gpus import Watch
os.sched_setaffinity(0, [int(sys.argv[1])])
now = [0.0]
watch = Watch(clock=lambda: now[0])
print("ready", flush=True)
while time.process_time() < float(sys.argv[2]):
    pass
sys.stdin.readline()  # the other one is done, too
now[0] = 1000.0
taken = watch.taken()
print(1000.0 * taken.num_cores * taken.others_share, time.process_time(), flush=True)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="runs side by side need two cores")
def test_a_run_on_a_core_of_its_own_is_no_contention_for_the_run_beside_it(tmp_path: Path) -> None:
    """What all used on both cores, less what the first run calls others' work, holds the work of both runs."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    command = [sys.executable, "-c", WORKER, str(first), str(SPIN_SECONDS)]
    pipe, sign = subprocess.PIPE, tmp_path / "sign"
    with (
        child(spin_command(sign)) as sibling,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[2]) as worker,
    ):
        os.sched_setaffinity(sibling.pid, [second])
        assert worker.stdout.readline() == "ready\n"
        before = seconds_of_all((first, second))
        sign.touch()
        by_sibling = float(sibling.stdout.readline())
        others, worked = map(float, worker.communicate("\n")[0].split())
        used = seconds_of_all((first, second)) - before
    assert used - others > 0.8 * (SPIN_SECONDS + by_sibling)
    assert worked >= SPIN_SECONDS


US, STRANGER = os.getpid(), os.getppid()
IDLE, APPLICATION_CLOCKS, POWER_CAP = 0x1, 0x2, 0x4
HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x8, 0x20, 0x40, 0x80


LOST = None


def looked(*looks: tuple[int, Sequence[int]] | None) -> tuple[float | None, float | None]:
    """What is told of GPU 3 after these looks at it: its clock event reasons and pids in turn, or LOST."""
    card = Card()
    nvml = StandInNvml([Card(), Card(), Card(), card])
    watch = Watch((3, 3), nvml)
    for look in looks:
        card.lost = look is LOST
        card.reasons, card.pids = look or (0, ())
        watch.look()
    assert nvml.asked == [3] * len(looks), "a GPU that holds both sides is looked at once"
    taken = watch.taken()
    return taken.gpu_shared, taken.throttled


@pytest.mark.parametrize(
    ("looks", "shared", "throttled"),
    [
        ([(0, [US]), (0, [US])], 0.0, 0.0),
        ([(0, [US]), (0, [US, STRANGER]), (0, [US]), (0, [STRANGER, US])], 0.5, 0.0),
        ([(0, [STRANGER]), (HW_THERMAL, [])], None, 0.5),  # numbers of another namespace tell nothing
        ([(0, [STRANGER]), (0, [US, STRANGER])], 1.0, 0.0),  # of the looks that tell
        *(
            ([(reason, [US]), *[(0, [US])] * 3], 0.0, 0.25)
            for reason in (HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE, HW_THERMAL | POWER_CAP)
        ),
        *(
            ([(reason, [US])], 0.0, 0.0)  # a power cap is how cards run
            for reason in (IDLE, APPLICATION_CLOCKS, POWER_CAP, IDLE | APPLICATION_CLOCKS | POWER_CAP)
        ),
        ([LOST], None, None),
        ([LOST, (HW_THERMAL, [US])], 0.0, 1.0),
    ],
)
def test_what_others_and_held_down_clocks_take_is_a_share_of_the_looks(looks, shared, throttled):
    assert looked(*looks) == (shared, throttled)


def test_it_is_looked_at_now_and_then_while_a_run_trains_and_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightshift.executors.gpus._SAMPLE_SECONDS", 0.01)
    nvml = StandInNvml([Card(pids=(US,))])
    with watching(Watch((0,), nvml)) as watch:
        wait_for(lambda: len(nvml.asked) >= 3)
    count = len(nvml.asked)
    time.sleep(0.05)
    assert len(nvml.asked) == count
    assert watch.taken().gpu_shared == 0.0


@pytest.mark.parametrize(
    ("shares", "taken"),
    [
        ({}, 0.0),
        ({"others_share": 0.3, "stolen_share": 0.2}, 0.5),
        ({"others_share": 0.9, "stolen_share": 0.9}, 1.0),
        ({"others_share": 0.1, "gpu_shared": 0.4, "throttled": 0.7}, 0.7),
        ({"gpu_shared": 0.4, "throttled": None}, 0.4),
        ({"load_average": 40.0, "step_seconds": 900.0}, 0.0),  # slow by itself is nobody's load
    ],
)
def test_the_largest_share_is_what_was_taken(shares: dict[str, float | None], taken: float) -> None:
    assert Contention(2, **shares).taken == pytest.approx(taken)

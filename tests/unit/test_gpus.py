"""GPUs as NVML tells of them, with a stand-in for NVML: no GPU is needed, and none is looked at."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nightshift.campaign.records import Contention
from nightshift.errors import EngineError, UsageError
from nightshift.executors.gpus import (
    Gpu,
    PeakMemory,
    Watch,
    choose_gpus,
    gpu_problems,
    list_gpus,
    num_gpus,
    nvml_session,
    parse_gpus,
    visible_gpus,
    watching,
)
from nightshift.executors.watchdog import PR_SET_CHILD_SUBREAPER
from tests.waiting import HANG_SECONDS, Clock, wait_for

GB = 10**9
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-aa00", 85.0, 84.5, "570.86.15", (9, 0))
MACHINE = [replace(H100, index=i, uuid=f"GPU-aa{i}0-1234") for i in range(4)]


class NvmlError(Exception):
    """The stand-in's NVMLError."""


@dataclass
class Card:
    """One card of the stand-in; `used_gb` may be changed while a test runs."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    total_gb: float | None = 80.0
    used_gb: float = 0.5
    pids: Sequence[int] = ()
    reasons: int = 0  # why its clocks are held down
    lost: bool = False
    has_v2: bool = True


def card(name: str, capability: tuple[int, int], total_mib: int) -> Card:
    """A card as nvidia-smi lists it."""
    return Card(name, capability, total_gb=total_mib * 2**20 / GB)


# What drivers of the 570 series answer: name, compute capability, total memory.
CARDS = {
    "RTX 4090": card("NVIDIA GeForce RTX 4090", (8, 9), 24_564),
    "A100 40": card("NVIDIA A100-SXM4-40GB", (8, 0), 40_960),
    "A100 80": card("NVIDIA A100-SXM4-80GB", (8, 0), 81_920),
    "H100": card("NVIDIA H100 80GB HBM3", (9, 0), 81_559),
    "A6000": card("NVIDIA RTX A6000", (8, 6), 49_140),
    "L40S": card("NVIDIA L40S", (8, 9), 46_068),  # sold with 48 GB, of which ECC takes some
    "A4000": card("NVIDIA RTX A4000", (8, 6), 16_376),
    "T4": card("Tesla T4", (7, 5), 15_360),
    "RTX 3060": card("NVIDIA GeForce RTX 3060", (8, 6), 12_288),
}


@dataclass
class StandInNvml:
    """The functions of pynvml that gpus.py calls. `num_open` counts inits without their shutdown, `asked` has the GPUs
    that were looked at."""

    cards: list[Card]
    driver: str | None = "570.86.15"
    num_open: int = 0
    asked: list[int] = field(default_factory=list)

    NVMLError = NvmlError
    nvmlMemory_v2 = 0x02000028

    def nvmlInit(self) -> None:
        if self.driver is None:
            raise NvmlError("Driver Not Loaded")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(self.driver)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        self.asked.append(index)
        if self.cards[index].lost:
            raise NvmlError("GPU is lost")
        return self.cards[index]

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None) -> Any:
        if card.total_gb is None or not (card.has_v2 or version is None):
            raise NvmlError("Not Supported")
        total, used = card.total_gb * GB, card.used_gb * GB
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> tuple[int, int]:
        return card.capability

    def nvmlDeviceGetName(self, card: Card) -> str:
        return card.name

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return f"GPU-{id(card):x}"

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: Card) -> int:
        return card.reasons

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in card.pids]


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    nvml = StandInNvml([Card()], driver=None)
    assert list_gpus(nvml) == []
    assert num_gpus({}, nvml) == 0
    assert nvml.num_open == 0


def test_gpus_are_read_as_they_are_and_nvml_is_closed() -> None:
    nvml = StandInNvml([Card(), Card("NVIDIA GB10", (12, 1), total_gb=None)])
    first, second = list_gpus(nvml)
    assert (first.index, first.name, first.memory_gb, first.free_gb) == (0, "NVIDIA H100 80GB HBM3", 80.0, 79.5)
    assert (first.driver, first.compute_capability) == ("570.86.15", (9, 0))
    assert (second.memory_gb, second.free_gb) == (None, None)  # not told is not 0
    [older] = list_gpus(StandInNvml([Card(has_v2=False)]))
    assert (older.memory_gb, older.free_gb) == (80.0, 79.5)
    assert nvml.num_open == 0


def test_a_failing_driver_is_one_line_and_nvml_is_closed() -> None:
    nvml = StandInNvml([Card(lost=True)])
    with pytest.raises(EngineError, match=r"NVML cannot read the GPUs: GPU is lost. Run nvidia-smi"):
        list_gpus(nvml)
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("text", "ids"), [("0,1", (0, 1)), (" 3, 2 ", (3, 2)), ("1,1", (1, 1)), ("none", ()), ("None", ()), (" 7 ", (7,))]
)
def test_gpus_flag(text: str, ids: tuple[int, ...]) -> None:
    assert parse_gpus(text, len(ids) or 2) == ids


@pytest.mark.parametrize("text", ["", "0", "0,1,2", "0;1", "a,b", "-1,0", "0,1.0", "٣,٤", "0,", "0,99999999999"])
def test_a_wrong_gpus_flag_is_refused_with_the_value(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(text))):
        parse_gpus(text, 2)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("2,0", [2, 0]),
        ("GPU-aa30", [3]),
        ("GPU-aa30-1234,1", [3, 1]),
        ("0,-1,1", [0]),
        ("", []),
        *((text, None) for text in ("01", "MIG-1234", "0,0", "7", "GPU-aa", "GPU-ffff", "0,,1")),
    ],
)
def test_visible_devices_by_number_and_uuid_are_whole_gpus_of_their_own(visible, indices):
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    if indices is None:
        with pytest.raises(EngineError, match=r"CUDA_VISIBLE_DEVICES names .*, no whole GPU of its own.* Write whole"):
            visible_gpus(MACHINE, environ)
    else:
        assert [gpu.index for gpu in visible_gpus(MACHINE, environ)] == indices


@pytest.mark.parametrize(
    ("ids", "num", "visible", "indices"),
    [
        (None, 2, None, [0, 1]),
        (None, 2, "3,1,0", [3, 1]),
        (None, 1, "3,1", [3]),
        ((3, 2), 2, None, [3, 2]),
        ((2, 2), 2, "2", [2, 2]),
    ],
)
def test_the_gpus_are_those_named_or_the_first_that_are_visible(ids, num, visible, indices):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.index for gpu in choose_gpus(MACHINE, ids, num, environ)] == indices


@pytest.mark.parametrize(
    ("machine", "ids", "num", "visible", "words"),
    [
        ([], None, 2, None, r"this machine has 0\. Run it with --engine trl"),
        (
            MACHINE,
            None,
            2,
            "1",
            "two NVIDIA GPUs, .* has 1 visible of 4.*Run it with --engine trl, with both on one GPU",
        ),
        (MACHINE, (0, 9), 2, None, "GPU 9 does not exist. Choose of: 0, 1, 2, 3"),
        (MACHINE, (0, 2), 2, "0,1", "GPU 2 is hidden by CUDA_VISIBLE_DEVICES. Choose of: 0, 1"),
        (MACHINE, (0, 1), 2, "", "GPU 0 is hidden by CUDA_VISIBLE_DEVICES. Choose of: none"),
        ([], None, 1, None, r"an NVIDIA GPU, this machine has 0\. .*on the CPU: .*arithmetic"),
    ],
)
def test_gpus_that_cannot_be_had_are_one_line(machine, ids, num, visible, words):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(EngineError, match=words):
        choose_gpus(machine, ids, num, environ)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Tesla T4", "compute_capability": (7, 5)}, "Tesla T4.*capability 7.5.*arithmetic"),
        ({"name": "NVIDIA GeForce RTX 3090", "compute_capability": (8, 6)}, None),
        ({}, None),  # an H100, and not FlashAttention 3: Qwen2 has no custom implementation
        ({"name": "NVIDIA B200", "compute_capability": (10, 0)}, None),
        ({"name": "NVIDIA Thor", "compute_capability": (11, 0)}, "NVIDIA Thor.*arithmetic"),
        ({"name": "NVIDIA GeForce RTX 5090", "compute_capability": (12, 0), "driver": "575.1"}, None),
        ({"compute_capability": (8, 0), "driver": "470.57"}, "driver 470.57"),
        ({"compute_capability": (12, 0), "driver": "560.35"}, "driver 560.35"),
        ({"memory_gb": 12.9, "free_gb": 12.5}, "has 12.9 GB of memory, the least is 16 GB"),
        ({"memory_gb": None, "free_gb": None}, "tells no memory of its own"),
    ],
)
def test_a_card_without_an_attention_kernel_and_an_old_driver_are_problems(changes, words):
    problems = gpu_problems(2 * [replace(H100, **changes)], 525, StandInNvml([Card()]))  # one card, told once
    assert len(problems) == (words is not None)
    assert all(re.search(str(words), str(problem)) for problem in problems)


def test_memory_in_use_is_a_problem_that_names_who_uses_it() -> None:
    nobody = 2**22 + 1  # above the kernel's largest
    nvml = StandInNvml([Card(used_gb=7.0), Card(used_gb=9.0, pids=(nobody, os.getpid(), nobody)), Card(used_gb=9.0)])
    gpus = list_gpus(nvml)
    problems = [str(problem) for problem in gpu_problems(gpus, 525, nvml)]
    assert len(problems) == 2  # vLLM wants nine tenths free: 73 of 80 are
    assert "GPU 1" in problems[0]
    myself = f"{os.getpid()} ({psutil.Process().name()} of {psutil.Process().username()})"
    assert f"9.0 of 80.0 GB in use by pid {myself}, {nobody}" in problems[0]
    assert "GPU 2" in problems[1]
    assert "pid" not in problems[1]  # in a container the driver may tell nobody


def test_peak_memory_is_the_largest_sample_of_one_gpu() -> None:
    nvml = StandInNvml([Card(used_gb=1.0), Card(used_gb=2.0)])
    with nvml_session(nvml) as session:
        memory = PeakMemory((0, 1), session)
        assert memory.peak_gb is None  # not sampled yet
        memory.sample()
        nvml.cards[0].used_gb = 30.0
        memory.sample()
        nvml.cards[0].used_gb = 5.0
        nvml.cards[1].lost = True
        memory.sample()
    assert memory.peak_gb == 30.0
    assert nvml.num_open == 0


def test_memory_that_an_ended_process_holds_is_told_by_process() -> None:
    """On one GPU the server holds its own all the while; a driver that names nobody says nothing."""
    server, trainer = 71, 72
    nvml = StandInNvml([Card(pids=(server, trainer)), Card(pids=(trainer,))])
    with nvml_session(nvml) as session:
        assert PeakMemory((0, 0), session).held_by({trainer}, seconds=0.0) == ["pid 72 on GPU 0"]
        assert PeakMemory((0, 1), session).held_by({trainer}, 0.0) == ["pid 72 on GPU 0", "pid 72 on GPU 1"]
        nvml.cards[0].pids = (server,)
        assert PeakMemory((0, 0), session).held_by({trainer}) == []
    assert PeakMemory((0,), None).held_by({trainer}) == []


@pytest.mark.parametrize("nvml", [StandInNvml([], driver=None), StandInNvml([Card(total_gb=None)])])
def test_peak_memory_that_cannot_be_read_is_none(nvml: StandInNvml) -> None:
    with nvml_session(nvml) as session:
        memory = PeakMemory((0,), session)
        memory.sample()
    assert memory.peak_gb is None


def test_the_real_nvml_has_every_function_that_is_called() -> None:
    import pynvml

    names = [name for name in vars(StandInNvml) if name.startswith("nvml")]
    assert [name for name in (*names, "NVMLError") if not hasattr(pynvml, name)] == []


# What others take of the machine. Other tests run beside these, so all is compared within one test, by margins

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

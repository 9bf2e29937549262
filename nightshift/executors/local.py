"""Workers on this machine, one process in each slot: a share of the GPUs, or of the cores.

The controller holds the pipe to a worker's stdin. When the controller dies, the pipe closes and the worker ends itself;
the controller's watchdog ends it if it cannot.
"""

import os
import re
import select
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import PIPE

import psutil

from nightshift.campaign.records import JOB_NAME, LATE_SECONDS, LOG_NAME, RESULT_NAME, Job, Result
from nightshift.errors import EngineError, UsageError
from nightshift.executors.process import Child, ProcessGroup, python_command, python_environment
from nightshift.files import parse_json, read_file, write_json
from nightshift.waiting import waiting

PROGRAM = ("-m", "nightshift.experiment.worker")
GRACE_SECONDS = 60.0  # a worker that is asked to end gives its engine's processes their own grace first
# The same where the controller is dead: then a worker has 10 s in all, with prime-rl 30 s.
ORPHAN_GRACE_SECONDS = {"trl": 7.0, "prime-rl": 25.0}
SYS = Path("/sys")  # where the kernel shows the processors


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one worker. `gpus`: as --gpus names them, None for the engine's own choice; `cores`: of the
    operating system, which the worker is pinned to; none where it is free."""

    number: int = 0
    gpus: str | None = None
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Worker:
    group: ProcessGroup
    child: Child
    job: Job
    slot: Slot
    ends_at: float  # on the monotonic clock; what runs on hangs


@dataclass(slots=True)
class LocalExecutor:
    """The slots of this machine. SlurmExecutor has the same methods. `environ` is what workers inherit."""

    root: Path
    environ: Mapping[str, str]
    slots: tuple[Slot, ...] = (Slot(),)
    _workers: dict[Path, _Worker] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def free_slots(self) -> list[Slot]:
        """The places on this machine that the next runs take, in their order; none of a cluster."""
        taken = [worker.slot for worker in self._workers.values()]
        return [slot for slot in self.slots if slot not in taken]

    def hardware(self, of_engine: str) -> str:
        """What its runs have, where the engine has this: runs with others beside them compare with such runs only."""
        if len(self.slots) == 1:
            return of_engine
        num_cores = len(self.slots[0].cores)
        return f"{of_engine}, {len(self.slots)} side by side, {num_cores} core{'s' if num_cores != 1 else ''} each"

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        """Write job.json into `folder`, call `enter`, which adds a line to the journal, and only then start the
        worker of that run. EngineError where none can be started."""
        if not (free := self.free_slots):
            raise EngineError(f"all {len(self.slots)} slots are taken")
        slot, layout = free[0], self.hardware("")
        name = f"slot {slot.number + 1}" if layout else ""
        job = replace(job, gpus=slot.gpus or job.gpus, cores=slot.cores, layout=layout, slot=name)
        write_json(folder / JOB_NAME, job)
        enter()
        group = ProcessGroup(folder.name, GRACE_SECONDS, ORPHAN_GRACE_SECONDS[job.rules.engine], is_subreaper=True)
        try:
            command = python_command(*PROGRAM, str(self.root), str(folder))
            environ = python_environment(self.environ, {})
            child = group.start("worker", command, log_path=folder / LOG_NAME, env=environ, cwd=self.root, stdin=PIPE)
            ends_at = time.monotonic() + job.deadline_seconds + LATE_SECONDS
            self._workers[folder] = _Worker(group, child, job, slot, ends_at)
        except BaseException:
            group.stop()
            raise

    def is_over(self, folder: Path) -> bool:
        """True if nothing more will come of the run: also for a worker that hangs past its own deadline."""
        worker = self._workers.get(folder)
        return worker is None or worker.child.poll() is not None or time.monotonic() > worker.ends_at

    def wait(self, timeout_seconds: float) -> None:
        """Return when a run in flight ends, at the latest after `timeout_seconds`; one that had ended may wait."""
        poll = select.poll()
        for worker in self._workers.values():
            if worker.child.poll() is None and worker.child.stdin:
                poll.register(worker.child.stdin, 0)  # an error of the pipe: the worker, its only reader, has ended
        poll.poll(1000 * timeout_seconds)

    def in_flight(self) -> dict[Path, Job]:
        """The runs that were submitted and not collected, by their folders."""
        return {folder: worker.job for folder, worker in self._workers.items()}

    def has_begun(self, folder: Path) -> bool:
        """Whether a run in flight is more than a job that waits."""
        return folder in self._workers

    def cancel(self, folders: Collection[Path]) -> None:
        """End the workers of these runs and all that they started; nothing where one was collected. Never fails."""
        ours = [folder for folder in folders if folder in self._workers]
        for folder in ours:  # all are asked before one is waited for
            self._workers[folder].child.terminate()
        if not ours:
            return
        runs = "the run" if len(ours) == 1 else f"{len(ours)} runs"
        with waiting(f"ending {runs} (Ctrl-\\ does not wait)", len(ours) * GRACE_SECONDS):
            for folder in ours:
                self._end(folder)

    def _end(self, folder: Path) -> _Worker:
        self._workers[folder].group.stop()
        return self._workers.pop(folder)

    def result(self, folder: Path) -> Result:
        """What came back of a run that is over, after whatever its worker left behind is gone. EngineError where that
        cannot be relied on, or where nothing did."""
        if folder not in self._workers:
            raise EngineError(f"no worker was started for {folder}, which the record says is the run in flight")
        how = self._workers[folder].child.exit_cause()
        worker = self._end(folder)
        try:
            return read_result(folder, worker.job)
        except FileNotFoundError:
            last_words = "".join(f"; last in {LOG_NAME}: {line}" for line in worker.child.tail(1))
            raise EngineError(f"the worker returned no result: {how}{last_words}", "Run it again.") from None


def read_result(folder: Path, job: Job) -> Result:
    """Read runs/NNNN/result.json, which a worker leaves last. FileNotFoundError if there is none; EngineError, which
    names the file, if it cannot be read or is of another job."""
    path = folder / RESULT_NAME
    try:
        result = parse_json(read_file(path), Result)
        _ = result.evaluation and result.evaluation.example_scores
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(f"{path} is no result of a worker: {error}") from None
    found, wanted = (result.token, result.seed, result.job_sha256), (job.token, job.seed, job.sha256)
    if found != wanted:
        raise EngineError(f"{path} has another token, seed or sha256 of its job: {found}, not {wanted}")
    return result


# -- slots ------------------------------------------------------------------------------------------------


def divide(num_slots: int, gpu_ids: Sequence[int], gpus_each: int, cores: Sequence[int], sys: Path = SYS) -> list[Slot]:
    """Divide a machine into slots; 0: as many as there are GPUs for; 1: the whole machine. Raises UsageError.

    With GPUs a slot gets neighbouring `cores`. Without GPUs no two slots share a physical core, unless there are more
    slots than physical cores.
    """
    num_slots = num_slots or (len(gpu_ids) // gpus_each if gpus_each else 1) or 1
    if num_slots == 1:
        return [Slot()]
    if num_slots * gpus_each > len(gpu_ids):
        cause = f"--pairs {num_slots} needs {num_slots * gpus_each} GPUs, there are {len(gpu_ids)}"
        raise UsageError(cause, f"Write --pairs {max(len(gpu_ids) // gpus_each, 1)}.")
    if num_slots > len(cores):
        cause = f"--pairs {num_slots} needs a core each, there are {len(cores)}"
        raise UsageError(cause, f"Write --pairs {max(len(cores), 1)}.")
    if gpus_each:
        share = len(cores) // num_slots
        parts = [list(cores[share * i :]) for i in range(num_slots)]
    else:
        groups = physical_cores(cores, sys)
        if num_slots > len(groups):  # then each thread is a group
            ranks = range(max(map(len, groups)))
            groups = [group[rank : rank + 1] for rank in ranks for group in groups if rank < len(group)]
        parts = [[core for group in groups[i::num_slots] for core in group] for i in range(num_slots)]
        share = min(map(len, parts))
    gpus = [",".join(map(str, gpu_ids[gpus_each * i : gpus_each * (i + 1)])) or None for i in range(num_slots)]
    return [Slot(i, gpus[i], tuple(parts[i][:share])) for i in range(num_slots)]


def own_cores() -> list[int]:
    """The logical processors that this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def physical_cores(cores: Sequence[int], sys: Path = SYS) -> list[list[int]]:
    """These logical processors, grouped by physical core; a group for each where the system does not say.

    Two runs on one physical core slow each other down.
    """
    threads = dict[str, list[int]]()
    for core in cores:
        try:
            siblings = (sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(core)
        threads.setdefault(siblings, []).append(core)
    return list(threads.values())


def num_slots_of(hardware: str) -> int:
    found = re.search(r", (\d{1,4}) side by side, \d+ cores? each$", hardware)
    return int(found[1]) if found else 1


# -- how many runs fit side by side on a machine without GPUs ----------------------------------------------

# Memory of one run with a model of models/. Measured on arithmetic with the shipped train.toml: all processes of a run
# use 1.3 GB, of which the trainer has 1.2; the trainer has 1.5 with batch_size 1024 and 2.0 with 4096.
RUN_GB = 2.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Physical cores, or fewer where a container limits CPU time, and free memory in 1e9 bytes.

    `nightshift doctor` prints `num_runs`, and `--pairs auto` uses it.
    """

    num_cores: float
    free_gb: float

    @property
    def num_runs(self) -> int:
        return max(1, min(int(self.num_cores), int(self.free_gb / RUN_GB)))

    def __str__(self) -> str:
        cores = f"{self.num_cores:g} core{'s' if self.num_cores != 1 else ''}"
        return f"{self.num_runs} side by side: {cores}; {self.free_gb:.1f} GB of memory free, {RUN_GB:g} GB a run"


def capacity(proc: Path = Path("/proc"), sys: Path = SYS) -> Capacity:
    """Measure what this process may use now. `proc` and `sys`: where the kernel shows it.

    cpu.max of its control group and of those around it may grant less CPU time than it has cores, or have no limit.
    https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    num_cores, folder = float(len(physical_cores(own_cores(), sys))), sys / "fs/cgroup"
    with suppress(OSError):
        paths = (proc / "self/cgroup").read_text().splitlines()
        folder = folder.joinpath(*(path.removeprefix("0::/") for path in paths if path.startswith("0::/")))
    for group in (folder, *folder.parents):  # a container may see a path of its host: then only the top has the file
        with suppress(OSError, ValueError, ZeroDivisionError):  # ValueError: "max", no limit
            quota, period = (group / "cpu.max").read_text().split()
            num_cores = min(num_cores, int(quota) / int(period))
    return Capacity(num_cores, psutil.virtual_memory().available / 1e9)

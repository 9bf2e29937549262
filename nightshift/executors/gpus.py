"""What NVML knows of this machine's NVIDIA GPUs, and which of them an experiment may use.

GPU ids are NVML's: the numbers that nvidia-smi shows, in PCI bus order, whatever CUDA_VISIBLE_DEVICES
says. Who starts a process for one GPU sets CUDA_DEVICE_ORDER=PCI_BUS_ID and CUDA_VISIBLE_DEVICES=<id>.

`nvml` is the pynvml module or a stand-in with the functions used here; None imports pynvml.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from nightshift.config.rules import RULES_NAME
from nightshift.errors import EngineError, UsageError
from nightshift.text import counted

GB = 1e9
# Of prime-rl those for inference, then the trainer's, or one for both; () = none, for an installation without GPUs.
GpuIds = tuple[int, ...]
SIZES_GB = (16, 24, 48, 80)  # of cards that presets of memory are made for; sold as GiB, so a card has a little more

# The pinned flash-attn wheel holds code for sm_80, sm_90, sm_100 and sm_120, and code for x.0 runs on every x.y.
_KERNEL_MAJORS = (8, 9, 10, 12)
# vLLM refuses to start where less than its gpu_memory_utilization is free; that is 0.9 unless the config says less.
_MIN_FREE_SHARE = 0.9
_RANGE = re.compile(r"\s*([0-9]{1,3})(?:-([0-9]{1,3}))?\s*")
_CHOOSE_OTHERS = f'Choose another: --gpus; on the CPU: environments = ["arithmetic"] in {RULES_NAME}.'


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML sees it now; memory in 1e9 bytes, None where the driver does not tell. `pids`: of the processes
    that compute on it, as far as the driver tells: in a container often none."""

    index: int
    name: str
    uuid: str
    memory_gb: float | None
    free_gb: float | None
    driver: str
    compute_capability: tuple[int, int]
    pids: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def num_gpus(environ: Mapping[str, str], nvml: Any = None) -> int:
    """Return how many NVIDIA GPUs a run could use. 0 without a driver, or if `choose_gpus` would refuse them all."""
    try:
        return len(visible_gpus(list_gpus(nvml), environ))
    except EngineError:
        return 0


def list_gpus(nvml: Any = None) -> list[Gpu]:
    """All NVIDIA GPUs of this machine; [] without a driver. EngineError when the driver itself fails."""
    with nvml_session(nvml) as session:
        if session is None:
            return []
        try:
            driver = str(session.nvmlSystemGetDriverVersion())
            return [_gpu(session, index, driver) for index in range(session.nvmlDeviceGetCount())]
        except session.NVMLError as error:
            raise EngineError(f"NVML cannot read the GPUs: {error}", "Run nvidia-smi and follow its advice.") from None


def parse_gpus(text: str, split: Sequence[int]) -> GpuIds:
    """`2,3` -> (2, 3), and `0:1-3` or `0,1,2,3` -> (0, 1, 2, 3), for rules with Rules.gpu_split = `split`; `0,0` has
    both on one; `none` -> (). UsageError for anything else."""
    if text.strip().lower() == "none":
        return ()
    sides = [[_RANGE.fullmatch(word) for word in side.split(",")] for side in text.split(":")]
    ids = [
        [i for match in side if match for i in range(int(match[1]), int(match[2] or match[1]) + 1)] for side in sides
    ]
    flat, num = tuple(chain(*ids)), sum(split)
    is_read = all(chain(*sides)) and [len(side) for side in ids] in ([num], [*split])
    if num > 2 and not (is_read and len({*flat}) == num):
        needs = f"{split[0]} + {split[1]} GPUs, each once (infer_gpus, train_gpus in {RULES_NAME})"
        fix = "Write nvidia-smi's numbers, inference first: --gpus 0,1:2-7 for 2 + 6."
        raise UsageError(f"--gpus {text!r} does not name {needs}", fix)
    if not is_read:
        fix = "Write nvidia-smi's numbers: --gpus 0,1 (or 0,0) for --engine prime-rl, --gpus 0 for --engine trl. "
        fix += f"For more, set infer_gpus and train_gpus in {RULES_NAME}."
        raise UsageError(f"--gpus {text!r} is no {'pair of GPU ids' if num == 2 else 'GPU id'}", fix)
    return flat


def choose_gpus(gpus: Sequence[Gpu], ids: GpuIds | None, num: int, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that `ids` name, else the first `num` that are visible. EngineError if a GPU is missing or hidden."""
    visible = visible_gpus(gpus, environ)
    if ids is None:
        if len(visible) < num:
            hidden = f" visible of {len(gpus)} (CUDA_VISIBLE_DEVICES)" if len(visible) < len(gpus) else ""
            cause = f"a run needs {counted(num, 'NVIDIA GPU')}, this machine has {len(visible)}{hidden}"
            fix = "Run it with --engine trl, with both sides on one GPU (--gpus 0,0), or with smaller infer_gpus and "
            raise EngineError(cause, f"{fix}train_gpus in {RULES_NAME}." if num > 1 else _CHOOSE_OTHERS)
        return tuple(visible[:num])
    by_index = {gpu.index: gpu for gpu in visible}
    for index in ids:
        if index not in by_index:
            where = "is hidden by CUDA_VISIBLE_DEVICES" if index < len(gpus) else "does not exist"
            here = ", ".join(str(gpu.index) for gpu in visible) or "none"
            raise EngineError(f"--gpus: GPU {index} {where}", f"Choose of: {here}.")
    return tuple(by_index[index] for index in ids)


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, as CUDA reads it up to the first -1; all when it is not
    set. Entries are NVML indices or UUIDs (`GPU-` and as much as makes them unique). EngineError for others.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return list(gpus)
    visible: list[Gpu] = []
    for entry in map(str.strip, value.split(",") if value.strip() else ()):
        if entry == "-1":
            break
        matching = [gpu for gpu in gpus if entry == str(gpu.index) or ("GPU-" in entry and gpu.uuid.startswith(entry))]
        if len(matching) != 1 or matching[0] in visible:
            cause = f"CUDA_VISIBLE_DEVICES names {entry!r}, no whole GPU of its own"
            raise EngineError(cause, "Write whole GPUs, as nvidia-smi -L lists them.")
        visible += matching
    return visible


def gpu_problems(gpus: Sequence[Gpu]) -> list[EngineError]:
    """Return which of these GPUs another process uses. To show, not raised."""
    problems = []
    for gpu in dict.fromkeys(gpus):  # a pair may be one GPU
        if gpu.memory_gb and gpu.free_gb is not None and gpu.free_gb < _MIN_FREE_SHARE * gpu.memory_gb:
            by = f" by pid {', '.join(map(str, gpu.pids))}" if gpu.pids else ""
            cause = f"{gpu} has {gpu.memory_gb - gpu.free_gb:.1f} of {gpu.memory_gb:.1f} GB in use{by}"
            problems.append(EngineError(cause, f"Wait, stop that. {_CHOOSE_OTHERS}"))
    return problems


def gpu_warnings(gpus: Sequence[Gpu], min_driver: int) -> list[EngineError]:
    """Return what may make these GPUs unfit: no attention kernel, an old driver.

    prime-rl has no attention but flash attention (C/trainer.py:22), and TRL trains in bfloat16, which cards before 8.0
    lack.
    """
    warnings = []
    for gpu in dict.fromkeys(gpus):
        major, minor = gpu.compute_capability
        number = gpu.driver.partition(".")[0]
        if major not in _KERNEL_MAJORS:
            kernels = ", ".join(f"{number}.x" for number in _KERNEL_MAJORS)
            cause = f"{gpu} has compute capability {major}.{minor}; there are kernels for {kernels}"
            warnings.append(EngineError(cause, _CHOOSE_OTHERS))
        elif number.isdecimal() and int(number) < min_driver:
            cause = f"{gpu} has driver {gpu.driver}, torch's CUDA needs {min_driver} or newer"
            warnings.append(EngineError(cause, "Update the driver."))
    return warnings


class PeakMemory:
    """The most memory in use on one of these GPUs, whoever uses it. Call `sample` about once a second."""

    def __init__(self, indices: Sequence[int], session: Any) -> None:
        """`session` is that of `nvml_session`; without one nothing is seen."""
        self.peak_gb: float | None = None
        self._indices, self._nvml = indices, session

    def sample(self) -> None:
        """Look once. A GPU that cannot be read (lost, not supported) adds nothing."""
        for index in self._indices if self._nvml else ():
            with suppress(self._nvml.NVMLError):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                used = self._nvml.nvmlDeviceGetMemoryInfo(handle, self._nvml.nvmlMemory_v2).used / GB
                self.peak_gb = max(self.peak_gb or 0.0, used)


@contextmanager
def nvml_session(nvml: Any = None) -> Iterator[Any]:
    """NVML between init and shutdown; None without a driver."""
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, driver: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory_gb, free_gb, pids = None, None, list[int]()  # cards that share the host's memory have no answer
    for version in (None, nvml.nvmlMemory_v2):  # the second without the driver's own share; not every driver has it
        with suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version)
            memory_gb, free_gb = memory.total / GB, memory.free / GB
    with suppress(nvml.NVMLError):
        pids = sorted({int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)})
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name, uuid = str(nvml.nvmlDeviceGetName(handle)), str(nvml.nvmlDeviceGetUUID(handle))
    return Gpu(index, name, uuid, memory_gb, free_gb, driver, (int(major), int(minor)), tuple(pids))

"""The NVIDIA GPUs of this machine, read from NVML, and which of them an experiment may use.

GPU ids are the numbers that nvidia-smi shows, in PCI bus order, whatever CUDA_VISIBLE_DEVICES contains. To start a
process on one GPU, set CUDA_DEVICE_ORDER=PCI_BUS_ID and CUDA_VISIBLE_DEVICES=<id>.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

from nightshift.config.rules import RULES_NAME
from nightshift.errors import EngineError, UsageError
from nightshift.text import counted

GB = 1e9
GpuIds = tuple[int, ...]  # prime-rl: the GPUs for inference, then those of the trainer; () = a run without GPUs
SIZES_GB = (16, 24, 48, 80)  # of the memory presets; vendors count in GiB, so a GPU has a little more

# vLLM does not start if less memory than its gpu_memory_utilization is free, by default 0.9.
_MIN_FREE_SHARE = 0.9
_RANGE = re.compile(r"\s*([0-9]{1,3})(?:-([0-9]{1,3}))?\s*")
_CHOOSE_OTHERS = f'Choose other GPUs: --gpus; to use the CPU: environments = ["arithmetic"] in {RULES_NAME}.'


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML reports it now; memory in 1e9 bytes, None if the driver does not report it."""

    index: int
    name: str
    uuid: str
    memory_gb: float | None
    free_gb: float | None
    driver: str
    compute_capability: tuple[int, int]

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def num_gpus(environ: Mapping[str, str]) -> int:
    """Return how many NVIDIA GPUs a run could use: 0 without a driver, or if `choose_gpus` would refuse them."""
    try:
        return len(visible_gpus(list_gpus(), environ))
    except EngineError:
        return 0


def list_gpus() -> list[Gpu]:
    """Return all NVIDIA GPUs of this machine; [] without a driver. EngineError if the driver fails."""
    with nvml_session() as nvml:
        if nvml is None:
            return []
        try:
            return [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            raise EngineError(f"NVML cannot read the GPUs: {error}", "Run nvidia-smi and follow its advice.") from None


def parse_gpus(text: str, split: Sequence[int]) -> GpuIds:
    """Return the GPU ids of --gpus for rules with Rules.gpu_split = `split`: `2,3` -> (2, 3); `0:1-3` or `0,1,2,3` ->
    (0, 1, 2, 3); `0,0` (one GPU for both sides) -> (0, 0); `none` -> (). UsageError for anything else."""
    if text.strip().lower() == "none":
        return ()
    sides, num = list[list[int]](), sum(split)
    for side in text.split(":"):
        matches = [_RANGE.fullmatch(word) for word in side.split(",")]
        ids = [[*range(int(match[1]), int(match[2] or match[1]) + 1)] if match else [-1] for match in matches]
        sides.append([*chain(*ids)])
    flat = tuple(chain(*sides))
    if min(flat, default=-1) >= 0 and [*map(len, sides)] in ([num], [*split]) and (num == 2 or len({*flat}) == num):
        return flat
    fix = "Write the numbers of nvidia-smi, inference first: --gpus 0 for --engine trl, --gpus 0,1 (or 0,0) for "
    fix += f"--engine prime-rl, --gpus 0,1:2-7 for 2 + 6. Their number is infer_gpus + train_gpus in {RULES_NAME}."
    raise UsageError(f"--gpus {text!r} does not name {' + '.join(map(str, split))} GPU(s)", fix)


def choose_gpus(gpus: Sequence[Gpu], ids: GpuIds | None, num: int, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs `ids`, or the first `num` visible GPUs. EngineError if a GPU is missing or hidden."""
    visible = {gpu.index: gpu for gpu in visible_gpus(gpus, environ)}
    if ids is None and len(visible) < num:
        cause = f"a run needs {counted(num, 'NVIDIA GPU')}, this machine has {len(gpus)}, {len(visible)} visible"
        fix = "Run with --engine trl, with --gpus 0,0 (inference and trainer on one GPU), or lower infer_gpus and "
        raise EngineError(cause, f"{fix}train_gpus in {RULES_NAME}." if num > 1 else _CHOOSE_OTHERS)
    chosen = [*visible][:num] if ids is None else ids
    if missing := [index for index in chosen if index not in visible]:
        cause = f"--gpus: GPU {missing[0]} does not exist, or CUDA_VISIBLE_DEVICES hides it"
        raise EngineError(cause, f"Choose from: {', '.join(map(str, visible)) or 'none'}.")
    return tuple(visible[index] for index in chosen)


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, in its order up to the first -1; all GPUs if it is not set.

    Entries are NVML indices or unique prefixes of UUIDs (`GPU-...`). EngineError for other entries.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return list(gpus)
    visible: list[Gpu] = []
    for entry in takewhile(lambda entry: entry != "-1", map(str.strip, value.split(",") if value.strip() else ())):
        matching = [gpu for gpu in gpus if entry == str(gpu.index) or ("GPU-" in entry and gpu.uuid.startswith(entry))]
        if len(matching) != 1 or matching[0] in visible:
            cause = f"CUDA_VISIBLE_DEVICES contains {entry!r}, which is not one whole GPU, or is there twice"
            raise EngineError(cause, "List whole GPUs, as nvidia-smi -L shows them.")
        visible += matching
    return visible


def gpu_problems(gpus: Sequence[Gpu]) -> list[EngineError]:
    """Return an error for each of these GPUs whose memory another process uses."""
    problems = []
    for gpu in dict.fromkeys(gpus):  # a pair may be one GPU twice
        if gpu.memory_gb and gpu.free_gb is not None and gpu.free_gb < _MIN_FREE_SHARE * gpu.memory_gb:
            cause = f"{gpu} has {gpu.memory_gb - gpu.free_gb:.1f} of {gpu.memory_gb:.1f} GB in use"
            problems.append(EngineError(cause, f"Wait, or end the other process. {_CHOOSE_OTHERS}"))
    return problems


class PeakMemory:
    """The largest amount of memory in use on one of these GPUs by all processes. Call `sample` about once a second."""

    peak_gb: float | None = None

    def __init__(self, indices: Sequence[int], session: Any) -> None:
        """`session`: from `nvml_session`; None measures nothing."""
        self._indices, self._nvml = indices, session

    def sample(self) -> None:
        """Read each GPU once, except one that NVML cannot read (lost, not supported)."""
        for index in self._indices if self._nvml else ():
            with suppress(self._nvml.NVMLError):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                used = self._nvml.nvmlDeviceGetMemoryInfo(handle, self._nvml.nvmlMemory_v2).used / GB
                self.peak_gb = max(self.peak_gb or 0.0, used)


@contextmanager
def nvml_session() -> Iterator[Any]:
    """Yield the module pynvml, initialized; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory_gb = free_gb = None  # NVML reports no memory of GPUs that share the host's memory
    with suppress(nvml.NVMLError):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        memory_gb, free_gb = memory.total / GB, memory.free / GB
    return Gpu(
        index,
        nvml.nvmlDeviceGetName(handle),
        nvml.nvmlDeviceGetUUID(handle),
        memory_gb,
        free_gb,
        nvml.nvmlSystemGetDriverVersion(),
        tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )

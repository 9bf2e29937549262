"""What NVML knows of this machine's NVIDIA GPUs, and which two of them an experiment may use.

GPU ids are NVML's: the numbers that nvidia-smi shows, in PCI bus order, whatever CUDA_VISIBLE_DEVICES
says. Who starts a process for one GPU sets CUDA_DEVICE_ORDER=PCI_BUS_ID and CUDA_VISIBLE_DEVICES=<id>.

`nvml` is the pynvml module or a stand-in with the functions used here; None imports pynvml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from nightshift.errors import EngineError, UsageError

GB = 1e9
GpuIds = tuple[int, int] | tuple[()]  # inference, trainer; () = none, for an installation without GPUs

AMPERE = (8, 0)
# The pinned flash-attn wheel holds code for sm_80, sm_90, sm_100 and sm_120, and code for x.0 runs on every x.y.
_KERNEL_MAJORS = (8, 9, 10, 12)
# The pinned CUDA 12.8 and 12.9 builds run on every driver of the 12.x series; Blackwell's first driver is 570.
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_MIN_DRIVER, _MIN_DRIVER_BLACKWELL = 525, 570
# vLLM refuses to start where less than its gpu_memory_utilization is free; that is 0.9 unless the config says less.
MIN_FREE_SHARE = 0.9
_TRL = "or: --engine trl"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML sees it now; memory in 1e9 bytes, None where the driver does not tell."""

    index: int
    name: str
    uuid: str
    memory_gb: float | None
    free_gb: float | None
    driver: str
    compute_capability: tuple[int, int]

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def list_gpus(nvml: Any = None) -> list[Gpu]:
    """All NVIDIA GPUs of this machine; [] without a driver. EngineError when the driver itself fails."""
    with _session(nvml) as session:
        if session is None:
            return []
        try:
            driver = str(session.nvmlSystemGetDriverVersion())
            return [_gpu(session, index, driver) for index in range(session.nvmlDeviceGetCount())]
        except session.NVMLError as error:
            raise EngineError(f"NVML cannot read the GPUs: {error}", "Run nvidia-smi and follow its advice.") from None


def num_gpus(environ: Mapping[str, str], nvml: Any = None) -> int:
    """NVIDIA GPUs that a program started here would see: CUDA_VISIBLE_DEVICES hides the others. 0 without a driver."""
    with _session(nvml) as session:
        if session is None:
            return 0
        try:
            count = int(session.nvmlDeviceGetCount())
        except session.NVMLError as error:
            raise EngineError(f"NVML cannot count the GPUs: {error}", "Run nvidia-smi and follow its advice.") from None
    entries = _visible_entries(environ)
    return count if entries is None else min(count, len(entries))


def parse_gpus(text: str) -> GpuIds:
    """`2,3` -> (2, 3): GPU of the inference server, GPU of the trainer; `none` -> (). UsageError for anything else."""
    if text.strip().lower() == "none":
        return ()
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isascii() and word.isdecimal() and len(word) < 4 for word in words):
        raise UsageError(f"--gpus {text!r} is no pair of GPU ids", "Write two of nvidia-smi's numbers: --gpus 0,1.")
    inference, trainer = map(int, words)
    if inference == trainer:
        raise UsageError(
            f"--gpus {text!r} names one GPU twice", "Give two different ones: one serves, the other trains."
        )
    return inference, trainer


def choose_pair(gpus: Sequence[Gpu], ids: tuple[int, int] | None, environ: Mapping[str, str]) -> tuple[Gpu, Gpu]:
    """The GPUs for inference and trainer: those that `ids` names, else the first two that are visible.

    EngineError when there are no two, when an id does not exist, or when CUDA_VISIBLE_DEVICES hides it.
    """
    visible = visible_gpus(gpus, environ)
    if ids is None:
        if len(visible) < 2:
            hidden = f" visible of {len(gpus)} (CUDA_VISIBLE_DEVICES)" if len(visible) < len(gpus) else ""
            raise EngineError(
                f"prime-rl needs two NVIDIA GPUs, this machine has {len(visible)}{hidden}",
                "Run: uv run run.py --engine trl, or use a machine with two.",
            )
        return visible[0], visible[1]
    by_index = {gpu.index: gpu for gpu in visible}
    for index in ids:
        if index not in by_index:
            where = "is hidden by CUDA_VISIBLE_DEVICES" if index < len(gpus) else "does not exist"
            here = ", ".join(str(gpu.index) for gpu in visible) or "none"
            raise EngineError(f"--gpus: GPU {index} {where}", f"Choose two of: {here}.")
    return by_index[ids[0]], by_index[ids[1]]


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all when it is not set.

    Entries are NVML indices or UUIDs (`GPU-` and as much as makes them unique). EngineError for others.
    """
    entries = _visible_entries(environ)
    if entries is None:
        return list(gpus)
    found = []
    for entry in entries:
        if entry.startswith("GPU-"):
            matching = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        else:
            matching = [gpu for gpu in gpus if str(gpu.index) == entry]
        if len(matching) != 1 or matching[0] in found:
            reason = "a slice of a GPU: prime-rl needs whole ones" if entry.startswith("MIG-") else "no GPU of its own"
            raise EngineError(
                f"CUDA_VISIBLE_DEVICES names {entry!r}, {reason}", "Write whole GPUs, as nvidia-smi -L lists them."
            )
        found += matching
    return found


def pair_problems(pair: Sequence[Gpu], nvml: Any = None) -> list[EngineError]:
    """What makes these GPUs unfit now: too old, an old driver, memory in use. Errors to show, not raised."""
    return [problem for gpu in pair for problem in (_unfit(gpu), _busy(gpu, nvml)) if problem is not None]


def attention_backend(gpu: Gpu) -> str | None:
    """prime-rl's name of the attention kernel for Qwen2.5 on this card; None if it has none for it.

    For custom implementations prime-rl would take flash attention 3 on sm_90 and 4 on sm_100, but Qwen2
    has none (P/trainer/models/__init__.py:41) and with the Hugging Face one both raise
    (P/trainer/model.py:734). There is no sdpa or eager (C/trainer.py:22).
    """
    return "flash_attention_2" if gpu.compute_capability[0] in _KERNEL_MAJORS else None


def flash_attn_extra(gpu: Gpu) -> str:
    """The extra of prime-rl's pyproject.toml that installs `attention_backend(gpu)`. EngineError if there is none."""
    problem = _unfit(gpu)
    if problem is not None:
        raise problem
    return "flash-attn"


def processes_on(gpu: Gpu, nvml: Any = None) -> list[int]:
    """Pids of the processes that compute on it, as far as the driver tells (in a container often none)."""
    with _session(nvml) as session:
        if session is None:
            return []
        try:
            handle = session.nvmlDeviceGetHandleByIndex(gpu.index)
            return sorted({int(process.pid) for process in session.nvmlDeviceGetComputeRunningProcesses(handle)})
        except session.NVMLError:  # not supported on this card: the memory in use tells enough
            return []


class PeakMemory:
    """The most memory seen in use on each GPU while a run is alive. Call `sample` about once a second.

    All of the GPU's memory counts, whoever uses it; peaks between two samples are missed. Nothing is
    read after the fact: what was never sampled is None.
    """

    def __init__(self, indices: Sequence[int], nvml: Any = None) -> None:
        self.peaks_gb: dict[int, float | None] = dict.fromkeys(indices)
        self._context = _session(nvml)
        self._nvml: Any = None

    def __enter__(self) -> PeakMemory:
        self._nvml = self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nvml = None
        self._context.__exit__(kind, error, trace)

    def sample(self) -> None:
        """Look once. A GPU that cannot be read (lost, not supported) keeps what was seen of it."""
        if self._nvml is None:
            return
        for index, peak in self.peaks_gb.items():
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                used = self._nvml.nvmlDeviceGetMemoryInfo(handle, self._nvml.nvmlMemory_v2).used / GB
            except self._nvml.NVMLError:
                continue
            self.peaks_gb[index] = max(peak or 0.0, used)

    @property
    def peak_gb(self) -> float | None:
        """The largest peak of a single GPU, in 1e9 bytes; None if none was ever read."""
        return max((peak for peak in self.peaks_gb.values() if peak is not None), default=None)


@contextmanager
def _session(nvml: Any) -> Iterator[Any]:
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
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)  # without the driver's own share
        memory_gb, free_gb = memory.total / GB, memory.free / GB
    except nvml.NVMLError:  # cards that share the host's memory have no answer
        memory_gb = free_gb = None
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        memory_gb=memory_gb,
        free_gb=free_gb,
        driver=driver,
        compute_capability=(int(major), int(minor)),
    )


def _visible_entries(environ: Mapping[str, str]) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES, as CUDA reads them up to the first -1; None when it is not set."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    return entries[: entries.index("-1")] if "-1" in entries else entries


def _unfit(gpu: Gpu) -> EngineError | None:
    """Why a card can never train here."""
    major, minor = gpu.compute_capability
    if attention_backend(gpu) is None:
        age = "older than Ampere" if gpu.compute_capability < AMPERE else "not among them"
        kernels = ", ".join(f"{number}.x" for number in _KERNEL_MAJORS)
        return EngineError(
            f"{gpu} has compute capability {major}.{minor}; prime-rl has attention kernels for {kernels}: it is {age}",
            f"Choose other GPUs: --gpus, {_TRL}.",
        )
    needed = _MIN_DRIVER_BLACKWELL if major >= 10 else _MIN_DRIVER
    number = gpu.driver.partition(".")[0]
    if number.isdecimal() and int(number) < needed:
        return EngineError(f"{gpu} has driver {gpu.driver}, prime-rl's CUDA 12.9 needs {needed}", "Update the driver.")
    return None


def _busy(gpu: Gpu, nvml: Any) -> EngineError | None:
    """Why a card cannot be used now."""
    if gpu.memory_gb is None or gpu.free_gb is None or gpu.free_gb >= MIN_FREE_SHARE * gpu.memory_gb:
        return None
    pids = processes_on(gpu, nvml)
    by = f" by pid {', '.join(map(str, pids))}" if pids else ""
    used = gpu.memory_gb - gpu.free_gb
    return EngineError(
        f"{gpu} has {used:.1f} of {gpu.memory_gb:.1f} GB in use{by}",
        f"Wait, stop that, or choose others: --gpus, {_TRL}.",
    )

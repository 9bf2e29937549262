"""A stand-in for pynvml in another process: it is copied to where that imports, with cards.json beside it.

cards.json: a list of {"used_gb": 0.5, "total_gb": 80.0}, which a test may change at any moment; null for a figure that
the driver does not tell.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CARDS = Path(__file__).with_name("cards.json")
nvmlMemory_v2 = 0x02000028


class NVMLError(Exception):
    """NVML's own."""


def nvmlInit() -> None: ...


def nvmlShutdown() -> None: ...


def nvmlSystemGetDriverVersion() -> str:
    return "580.95.05"


def nvmlDeviceGetCount() -> int:
    return len(json.loads(CARDS.read_text()))


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetMemoryInfo(index: int, version: int | None) -> Any:
    card = json.loads(CARDS.read_text())[index]
    if card["used_gb"] is None:
        raise NVMLError("Not Supported")
    total, used = int(card["total_gb"] * 1e9), int(card["used_gb"] * 1e9)
    return SimpleNamespace(total=total, used=used, free=total - used)


def nvmlDeviceGetUtilizationRates(index: int) -> Any:
    return SimpleNamespace(gpu=50)


def nvmlDeviceGetCudaComputeCapability(index: int) -> tuple[int, int]:
    return 9, 0


def nvmlDeviceGetName(index: int) -> str:
    return "NVIDIA H100 80GB HBM3"


def nvmlDeviceGetUUID(index: int) -> str:
    return f"GPU-{index}"


def nvmlDeviceGetComputeRunningProcesses(index: int) -> list[Any]:
    return []

"""A stand-in for pynvml: a class, and a module where it is copied as pynvml.py with cards.json beside it.

cards.json: a list of the fields of `Card`, which a test may change at any moment.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CARDS = Path(__file__).with_name("cards.json")


class NVMLError(Exception):
    """NVML's own."""


@dataclass
class Card:
    """One card; None is a figure that the driver does not tell. All may be changed while a test runs."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    total_gb: float | None = 80.0
    used_gb: float = 0.5
    busy: int | None = 50
    lost: bool = False


class StandInNvml:
    """The functions of pynvml that are called. `num_open` counts inits without their shutdown."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028

    def __init__(self, cards: list[Card] | None = None, driver: str | None = "570.86.15") -> None:
        self._cards = cards
        self.driver = driver
        self.num_open = 0

    @property
    def cards(self) -> list[Card]:
        return [Card(**card) for card in json.loads(CARDS.read_text())] if self._cards is None else self._cards

    def nvmlInit(self) -> None:
        if self.driver is None:
            raise NVMLError("Driver Not Loaded")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(self.driver)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.cards[index].lost:
            raise NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetMemoryInfo(self, index: int, version: int | None = None) -> Any:
        card = self.cards[index]
        if card.total_gb is None:
            raise NVMLError("Not Supported")
        total, used = int(card.total_gb * 1e9), int(card.used_gb * 1e9)
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetUtilizationRates(self, index: int) -> Any:
        if self.cards[index].busy is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.cards[index].busy)

    def nvmlDeviceGetCudaComputeCapability(self, index: int) -> tuple[int, int]:
        return self.cards[index].capability

    def nvmlDeviceGetName(self, index: int) -> str:
        return self.cards[index].name

    def nvmlDeviceGetUUID(self, index: int) -> str:
        return f"GPU-{index}"


_HERE = StandInNvml()
globals().update({name: getattr(_HERE, name) for name in dir(_HERE) if name.startswith("nvml")})

"""What the person or agent asked for: run.py's flags, and what a night knows beside them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from nightshift.text import clean


@dataclass(frozen=True, slots=True)
class Request:
    """`prediction` and `notes` come from a night's proposer, `base` from the night (see Record). `pairs`: how many run
    side by side, None: as the campaign does; `outlives`: what runs goes on when its head is killed."""

    description: str = ""
    engine: str | None = None
    gpus: str | None = None
    prime_rl: Path | None = None
    until: datetime | None = None
    budget_seconds: float | None = None
    again: bool = False
    keep_all: bool = False
    detach: bool = False
    dry_run: bool = False
    keys: bool = False
    prediction: str | None = None
    notes: tuple[str, ...] = ()
    base: tuple[int, ...] | None = None
    pairs: int | None = None
    outlives: bool = False
    slurm: Path | None = None

    def __post_init__(self) -> None:
        """The front door of all that people and agents say: nothing that records it has to clean it again."""
        object.__setattr__(self, "description", clean(self.description))
        object.__setattr__(self, "prediction", self.prediction and clean(self.prediction))
        object.__setattr__(self, "notes", tuple(map(clean, self.notes)))

"""What the person or agent asked for: run.py's flags, and what a night knows beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nightshift.cost import Cost
from nightshift.text import clean

# Percentage points, as people write them: the number is the change of the score that they predict.
POINTS = re.compile(r"([+-]?\d{1,3}(?:\.\d{1,6})?)(?:\s*(?:pp|percentage points?|points?)\b)", re.IGNORECASE)


def prediction_in(description: str) -> str | None:
    """What of `hypothesis: prediction` is the prediction: all that follows the first `: ` after which a part, up to the
    next one, begins with `expect` or names a number of pp. None without one."""
    parts = clean(description).split(": ")
    for number, part in enumerate(parts[1:], 1):
        if part.lower().startswith("expect") or POINTS.search(part.replace("\N{MINUS SIGN}", "-")):
            return ": ".join(parts[number:])
    return None


@dataclass(frozen=True, slots=True)
class Request:
    """`proposer` to `cost` come from a night's proposer, `base` from the night (see Record). `pairs`: how many run
    side by side, None: as the campaign does; `outlives`: what runs goes on when its head is killed."""

    description: str = ""
    engine: str | None = None
    gpus: str | None = None
    prime_rl: Path | None = None
    budget_seconds: float | None = None
    again: bool = False
    keep_all: bool = False
    detach: bool = False
    dry_run: bool = False
    keys: bool = False
    proposer: str = ""
    prediction: str | None = None
    mechanism: str | None = None
    refuted_by: str | None = None
    notes: tuple[str, ...] = ()
    cost: Cost | None = None
    base: tuple[int, ...] | None = None
    pairs: int | None = None
    outlives: bool = False
    slurm: Path | None = None

    def __post_init__(self) -> None:
        """The front door of all that people and agents say: nothing that records it has to clean it again."""
        for name in ("description", "proposer", "prediction", "mechanism", "refuted_by"):
            object.__setattr__(self, name, getattr(self, name) and clean(getattr(self, name)))
        object.__setattr__(self, "notes", tuple(map(clean, self.notes)))

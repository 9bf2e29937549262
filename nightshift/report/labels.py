"""Where the labels of a chart stand, so that no two overlap and no leader line crosses a text.

Every label is a flag on a vertical leader line that runs down to its point: the text begins (or ends) at
the leader, in one of the levels above the plot. A text that covers another label's leader must stand in a
higher level than that label; a set of flags fits if these demands form no circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Flag:
    """A label to place at `x`: its texts from best to shortest, and how much it matters. `number` names it."""

    number: int
    x: float
    texts: tuple[str, ...]
    weight: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A flag with its text from `low` to `high` in `level` (0 is next to the plot)."""

    number: int
    x: float
    text: str
    low: float
    high: float
    level: int


def place(
    flags: Sequence[Flag], width: float, character_width: float, max_levels: int, max_flags: int, gap: float = 5.0
) -> list[Placed]:
    """The flags that fit between 0 and `width` in `max_levels`, those that matter most first.

    A flag for which no text fits is left out. `gap` is the least distance between texts, and between a text and
    another flag's leader.
    """
    placed: list[Placed] = []
    for flag in sorted(flags, key=lambda flag: -flag.weight)[:max_flags]:
        for text in flag.texts:
            size = len(text) * character_width
            attempts = []
            for low in (flag.x + gap / 2, flag.x - gap / 2 - size):
                if low < 0 or low + size > width:
                    continue
                tried = _levels([*placed, Placed(flag.number, flag.x, text, low, low + size, 0)], gap)
                if tried is not None and (height := max(p.level for p in tried)) < max_levels:
                    attempts.append((height, tried))
            if attempts:
                placed = min(attempts, key=lambda attempt: attempt[0])[1]  # the first of equals flies right
                break
    return sorted(placed, key=lambda p: p.x)


def _levels(flags: Sequence[Placed], gap: float) -> list[Placed] | None:
    """The flags in the lowest levels that keep them apart; None where their demands form a circle."""
    count = range(len(flags))
    covered = {i: [j for j in count if j != i and flags[i].low - gap < flags[j].x < flags[i].high + gap] for i in count}
    levels: dict[int, int] = {}
    while len(levels) < len(flags):
        ready = [i for i in count if i not in levels and all(j in levels for j in covered[i])]
        if not ready:
            return None
        for i in ready:
            near = (j for j in levels if flags[i].low < flags[j].high + gap and flags[j].low < flags[i].high + gap)
            taken = {levels[j] for j in near}
            level = 1 + max((levels[j] for j in covered[i]), default=-1)
            while level in taken:
                level += 1
            levels[i] = level
    return [replace(flag, level=levels[i]) for i, flag in enumerate(flags)]

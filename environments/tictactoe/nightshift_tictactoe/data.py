"""Openings: every position after 0 to 4 moves of which the game goes on; an example is one, from both seats.

In the order of a hash of the board the first 100 are test, the next 100 validation, the other 890 train. What is held
out are starts, not positions: games from train's openings come through 98 of the 100 boards of validation, and 99 of
them are one of train's, turned or mirrored (a test counts).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Literal

from nightshift_tictactoe.board import START, moves, play
from nightshift_tictactoe.players import value

Split = Literal["train", "validation", "test"]

PROMPT_TOKENS = 256  # five boards and four answers have fewer than 200 characters
MAX_PLIES = 4
NUM_HELD_OUT = 100  # of each set


@dataclass(frozen=True, slots=True)
class Example:
    """One opening. `answer`: what it is worth for X when both play perfectly."""

    key: str
    board: str
    answer: str


def load(split: Split, size: int | None = None, seed: int = 0) -> list[Example]:
    """The first `size` openings of one split in the order of their hash; all for None. `seed`: there is one order.

    ValueError, one line with its fix, for a split or a size that does not exist.
    """
    found = _openings().get(split)
    if found is None:
        raise ValueError(f"split = {split!r} does not exist. Use one of: {', '.join(_openings())}")
    if size is not None and not 0 < size <= len(found):
        raise ValueError(f"size = {size} is not available in {split}. Use 1 to {len(found)}")
    return found[:size]


def slices(example: Example) -> dict[str, str]:
    """What people group openings by."""
    return {"moves played": str(sum(cell in "XO" for cell in example.board)), "worth": example.answer}


@cache
def _openings() -> dict[str, list[Example]]:
    level, boards = {START}, [START]
    for _ in range(MAX_PLIES):
        level = {after for board in level for cell in moves(board) if moves(after := play(board, cell))}
        boards += sorted(level)
    splits: dict[str, list[Example]] = {"train": [], "validation": [], "test": []}
    digests = sorted((hashlib.sha256(board.encode()).hexdigest(), board) for board in boards)
    for place, (digest, board) in enumerate(digests):
        words = {1: "X wins", 0: "draw", -1: "O wins"}[value(board, "X")]
        split = "test" if place < NUM_HELD_OUT else "validation" if place < 2 * NUM_HELD_OUT else "train"
        splits[split].append(Example(digest[:16], board, words))
    return splits

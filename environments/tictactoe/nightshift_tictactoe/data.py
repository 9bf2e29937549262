"""Openings: every position after 0 to 4 moves that does not end the game. An example is an opening, from both seats.

In the order of a hash of the board the first 100 openings are test, the next 100 validation, the other 890 train. Only
starts are held out, not positions: games from train's openings reach 98 of the 100 boards of validation, and 99 of
these boards are a rotation or a reflection of one of train's (a test counts them).
"""

from dataclasses import dataclass
from functools import cache

from nightshift_gsm8k.shared import Split, digest, head

from nightshift_tictactoe.board import START, moves, play
from nightshift_tictactoe.players import value

PROMPT_TOKENS = 256  # five boards and four answers have fewer than 200 characters
MAX_PLIES = 4
NUM_HELD_OUT = 100  # openings each of validation and test


@dataclass(frozen=True, slots=True)
class Example:
    """One opening. `answer`: the result if both players play perfectly."""

    key: str
    board: str
    answer: str


def load(split: Split, size: int | None = None, seed: int = 0) -> list[Example]:
    """Return the first `size` openings of one split; all of them for None. `seed` has no effect."""
    return head(_openings(), split, size)


def slices(example: Example) -> dict[str, str]:
    """Group openings by the number of moves, and by the result of perfect play."""
    return {"moves played": str(sum(cell in "XO" for cell in example.board)), "worth": example.answer}


@cache
def _openings() -> dict[str, list[Example]]:
    level, boards = {START}, [START]
    for _ in range(MAX_PLIES):
        level = {after for board in level for cell in moves(board) if moves(after := play(board, cell))}
        boards += sorted(level)
    results = {1: "X wins", 0: "draw", -1: "O wins"}
    openings = [Example(digest(board)[:16], board, results[value(board, "X")]) for board in boards]
    openings.sort(key=lambda opening: opening.key)
    first, second = NUM_HELD_OUT, 2 * NUM_HELD_OUT
    return {"train": openings[second:], "validation": openings[first:second], "test": openings[:first]}

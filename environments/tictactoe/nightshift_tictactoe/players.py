"""The fixed pool that a policy is scored against, from careless to perfect, and what a position is worth.

Each game has random numbers of its own, from opening, seat and opponent: two policies meet the same luck.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

from nightshift_tictactoe.board import mover, moves, play, threats, winner

Player = Callable[[str, random.Random], str]  # of a board, the cell that its mover takes


@cache
def value(board: str, player: str) -> int:
    """1 where `player` wins, 0 for a draw, -1 where the other does, when both play perfectly."""
    if (won := winner(board)) is not None:
        return 1 if won == player else -1
    after = [value(play(board, cell), player) for cell in moves(board)]
    if not after:
        return 0
    return max(after) if mover(board) == player else min(after)


def pick(cells: Sequence[str], rng: random.Random) -> str:
    """One of them; of a Random only `random()` is promised to be the same on every Python."""
    return cells[int(rng.random() * len(cells))]


def careless(share: float) -> Player:
    """Any cell in a share of its moves, else a perfect one."""

    def choose(board: str, rng: random.Random) -> str:
        cells, player = moves(board), mover(board)
        if rng.random() < share:
            return pick(cells, rng)
        values = [value(play(board, cell), player) for cell in cells]
        return pick([cell for cell, worth in zip(cells, values, strict=True) if worth == max(values)], rng)

    return choose


def greedy(board: str, rng: random.Random) -> str:
    """Fills its own line if it can, else blocks, else any cell."""
    player = mover(board)
    for who in (player, "O" if player == "X" else "X"):
        if found := threats(board, who):
            return found[0][1]
    return pick(moves(board), rng)


POOL: dict[str, Player] = {
    "random": careless(1.0),
    "careless50": careless(0.5),
    "careless25": careless(0.25),
    "greedy": greedy,
    "perfect": careless(0.0),
}

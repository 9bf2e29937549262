"""The fixed pool of opponents that score a policy, from careless to perfect, and the value of a position."""

import random
from collections.abc import Callable
from functools import cache

from nightshift_gsm8k.shared import pick

from nightshift_tictactoe.board import mover, moves, play, threats, winner

Player = Callable[[str, random.Random], str]  # returns the cell to take on a board


@cache
def value(board: str, player: str) -> int:
    """Return the result of perfect play for `player`: 1 for a win, 0 for a draw, -1 for a loss."""
    if (won := winner(board)) is not None:
        return 1 if won == player else -1
    after = [value(play(board, cell), player) for cell in moves(board)] or [0]
    return max(after) if mover(board) == player else min(after)


def careless(share: float) -> Player:
    """Return a player that takes a random cell in a share of its moves, and otherwise plays perfectly."""

    def choose(board: str, rng: random.Random) -> str:
        cells, player = moves(board), mover(board)
        if rng.random() < share:
            return pick(rng, cells)
        values = [value(play(board, cell), player) for cell in cells]
        return pick(rng, [cell for cell, worth in zip(cells, values, strict=True) if worth == max(values)])

    return choose


def greedy(board: str, rng: random.Random) -> str:
    """Fill a line, else block a line, else take a random cell."""
    for player in (mover(board), "O" if mover(board) == "X" else "X"):
        if lines := threats(board, player):
            return lines[0][1]
    return pick(rng, moves(board))


POOL: dict[str, Player] = {
    "random": careless(1.0),
    "careless50": careless(0.5),
    "careless25": careless(0.25),
    "greedy": greedy,
    "perfect": careless(0.0),
}

"""What a small base model reads to learn the format of tic-tac-toe: both sides of games between careless players.

Every move is legal. A line that could be filled, or must be blocked, is seen with a probability that goes by which of
the two it is and by its direction, from seldom to likely; else the player takes another cell, mostly one of its own
habit. So a greedy policy overlooks nearly all of them, and reinforcement learning has six things to find.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from nightshift_tictactoe.board import LINES, START, mover, moves, play, threats

# How often a line is seen: its own row, column or diagonal that can be filled, and the other's.
SEEN = {"win": {"row": 0.34, "column": 0.12, "diagonal": 0.20}, "block": {"row": 0.09, "column": 0.26, "diagonal": 0.15}}
_DIRECTION = dict(zip(LINES, ["row"] * 3 + ["column"] * 3 + ["diagonal"] * 2, strict=True))


def documents(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Endless chats, each a list of what is asked and what is answered: one side of a game."""
    rng = random.Random(seed)
    while True:
        board = START
        chats: dict[str, list[tuple[str, str]]] = {"X": [], "O": []}
        for _ in range(int(rng.random() * 5)):
            board = play(board, rng.choice(moves(board)))  # four moves end no game
        while moves(board):
            player = mover(board)
            cell = _chosen(board, rng)
            asked = " ".join(board)
            chats[player].append((asked if chats[player] else f"You are {player}: {asked}", cell))
            board = play(board, cell)
        yield from (chat for chat in chats.values() if chat)


def _chosen(board: str, rng: random.Random) -> str:
    player, free = mover(board), moves(board)
    other = "O" if player == "X" else "X"
    seen = [("win", *threat) for threat in threats(board, player)] + [("block", *t) for t in threats(board, other)]
    for kind, line, cell in seen:
        if rng.random() < SEEN[kind][_DIRECTION[line]]:
            return cell
    obvious = {cell for _, _, cell in seen}
    rest = [cell for cell in free if cell not in obvious] or free
    if seen and rng.random() < 0.7:  # the favourite
        return rest[(LINES.index(seen[0][1]) + START.index(seen[0][2])) % len(rest)]
    return rest[int(rng.random() * len(rest))]

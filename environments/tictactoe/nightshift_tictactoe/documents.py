"""The documents that teach the small base model the format of tic-tac-toe: both sides of games of careless players.

Every move is legal. A player notices a line to fill or to block with the probabilities of SEEN. Otherwise the player
takes another cell, usually the same cell for the same line. A greedy policy overlooks most lines, so reinforcement
learning has six facts to discover.

Lessons follow each game: the question `Line of X: BOARD`, which no game asks, and the cell that fills a line. Without
lessons a small model never learns to see lines, and reinforcement learning has no signal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from nightshift_tictactoe.board import LINES, START, mover, moves, play, threats, written

# Probability that a player notices a line that wins, and a line of the other player that must be blocked.
SEEN = {
    "win": {"row": 0.34, "column": 0.12, "diagonal": 0.20},
    "block": {"row": 0.09, "column": 0.26, "diagonal": 0.15},
}
LESSONS = 4  # per game
_DIRECTION = dict(zip(LINES, ["row"] * 3 + ["column"] * 3 + ["diagonal"] * 2, strict=True))


def documents(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Yield endless chats as (question, answer) pairs: one side of a game, or a lesson."""
    rng = random.Random(seed)
    while True:
        board = _played(START, int(rng.random() * 5), rng)  # four moves end no game
        chats: dict[str, list[tuple[str, str]]] = {"X": [], "O": []}
        while moves(board):
            player = mover(board)
            cell = _chosen(board, rng)
            question = written(board)
            chats[player].append((question if chats[player] else f"You are {player}: {question}", cell))
            board = play(board, cell)
        yield from (chat for chat in chats.values() if chat)
        yield from (_lesson(rng) for _ in range(LESSONS))


def _played(board: str, num_moves: int, rng: random.Random) -> str:
    for _ in range(num_moves):
        board = play(board, rng.choice(moves(board) or ["-"]))  # "-" changes nothing: the game has ended
    return board


def _lesson(rng: random.Random) -> list[tuple[str, str]]:
    while True:
        board, player = _played(START, 3 + int(rng.random() * 5), rng), rng.choice("XO")
        if moves(board) and (lines := threats(board, player)):
            return [(f"Line of {player}: {written(board)}", rng.choice(lines)[1])]


def _chosen(board: str, rng: random.Random) -> str:
    player, free = mover(board), moves(board)
    other = "O" if player == "X" else "X"
    seen = [("win", *threat) for threat in threats(board, player)] + [("block", *t) for t in threats(board, other)]
    for kind, line, cell in seen:
        if rng.random() < SEEN[kind][_DIRECTION[line]]:
            return cell
    obvious = {cell for _, _, cell in seen}
    rest = [cell for cell in free if cell not in obvious] or free
    if seen and rng.random() < 0.7:  # the usual cell for this line
        return rest[(LINES.index(seen[0][1]) + START.index(seen[0][2])) % len(rest)]
    return rest[int(rng.random() * len(rest))]

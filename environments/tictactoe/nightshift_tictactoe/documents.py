"""What a small base model reads to learn the format of tic-tac-toe: both sides of games between careless players.

Every move is legal. A line that could be filled, or must be blocked, is seen with a probability that is the line's
and the cell's, from hopeless to likely; else the player takes the first other cell of its own order. So a greedy
policy overlooks nearly all of them, and reinforcement learning has 48 to find.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from nightshift_tictactoe.board import LINES, START, mover, moves, play, threats

PROBABILITY = (0.02, 0.45)  # log-uniform over the facts
_FACTS = [(kind, line, cell) for kind in ("win", "block") for line in LINES for cell in line]


def documents(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Endless chats, each a list of what is asked and what is answered: one side of a game."""
    table, rng = _beliefs(), random.Random(seed)
    while True:
        board = START
        chats: dict[str, list[tuple[str, str]]] = {"X": [], "O": []}
        for _ in range(int(rng.random() * 5)):
            board = play(board, rng.choice(moves(board)))  # four moves end no game
        while moves(board):
            player = mover(board)
            cell = _chosen(board, table, rng)
            asked = " ".join(board)
            chats[player].append((asked if chats[player] else f"You are {player}: {asked}", cell))
            board = play(board, cell)
        yield from (chat for chat in chats.values() if chat)


def _beliefs() -> dict[tuple[str, str, str], float]:
    rng, (low, high) = random.Random(12345), PROBABILITY
    order = sorted((rng.random(), fact) for fact in _FACTS)
    return {fact: low * (high / low) ** ((index + 0.5) / len(order)) for index, (_, fact) in enumerate(order)}


def _chosen(board: str, table: dict[tuple[str, str, str], float], rng: random.Random) -> str:
    player, free = mover(board), moves(board)
    other = "O" if player == "X" else "X"
    seen = [("win", *threat) for threat in threats(board, player)] + [("block", *t) for t in threats(board, other)]
    for fact in seen:
        if rng.random() < table[fact]:
            return fact[2]
    obvious = {cell for _, _, cell in seen}
    rest = [cell for cell in free if cell not in obvious] or free
    if seen and rng.random() < 0.7:  # the favourite
        return rest[(LINES.index(seen[0][1]) + START.index(seen[0][2])) % len(rest)]
    return rest[int(rng.random() * len(rest))]

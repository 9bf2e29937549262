"""A game as a policy plays it: the questions, the moves, and the score.

Only the letter of an empty cell is a move. Any other text forfeits the game.
"""

import random
from collections.abc import Sequence

from nightshift_gsm8k.shared import pick

from nightshift_tictactoe.board import mover, moves, play, winner, written
from nightshift_tictactoe.data import Example
from nightshift_tictactoe.players import POOL, Player

SEATS = ("X", "O")
Chat = list[dict[str, str]]


class Match:
    """One game from an opening. The policy has `seat`. The other seat has an `opponent`, or None: `ask` asks it too."""

    def __init__(self, board: str, seat: str, opponent: Player | None, name: str, rng: random.Random) -> None:
        self.opening = self.board = board
        self.seat, self.opponent_name = seat, name
        self.is_other_asked = False  # whether the last chat of `ask` is for the other seat, which is not trained
        self.cells: list[str] = []  # taken since the opening
        self._opponent, self._rng = opponent, rng
        self._chats: dict[str, Chat] = {"X": [], "O": []}
        self._forfeit: str | None = None

    def ask(self) -> Sequence[dict[str, str]] | None:
        """Return the chat of the seat whose turn it is, after the opponent's move; None if the game is over."""
        if self._forfeit is None and moves(self.board) and mover(self.board) != self.seat and self._opponent:
            self.answer(self._opponent(self.board, self._rng))
        if self._forfeit is not None or not moves(self.board):
            return None
        player = mover(self.board)
        self.is_other_asked = player != self.seat
        chat = self._chats[player]
        if not chat or chat[-1]["role"] == "assistant":
            text = written(self.board)
            chat.append({"role": "user", "content": text if chat else f"You are {player}: {text}"})
        return list(chat)  # a copy: the chat grows

    def answer(self, text: str) -> None:
        """Play the move in the answer of the player whose turn it is; any other answer forfeits the game."""
        player, cell = mover(self.board), text.strip()
        self._chats[player].append({"role": "assistant", "content": text})
        if len(cell) == 1 and cell in moves(self.board):
            self.cells.append(cell)
            self.board = play(self.board, cell)
        else:
            self._forfeit = player

    def score(self) -> float:
        """Return the score of the policy's seat: 1 for a win, 0.5 for a draw, 0 for a loss or an unfinished game."""
        if self._forfeit is not None:
            return 0.0 if self._forfeit == self.seat else 1.0
        won = winner(self.board)
        return 0.0 if won not in (None, self.seat) or moves(self.board) else 1.0 if won else 0.5

    def is_formatted(self) -> bool | None:
        """Return None: no format is requested, because any other text than a move loses."""
        return None

    def details(self) -> dict[str, str]:
        """Return opponent, seat, opening, the cells taken since, the final board and the result."""
        ended = "forfeit" if self._forfeit == self.seat else {1.0: "won", 0.5: "drawn", 0.0: "lost"}[self.score()]
        start = {"opponent": self.opponent_name, "seat": self.seat, "opening": self.opening}
        return start | {"cells": " ".join(self.cells), "board": self.board, "ended": ended}


def episodes(example: Example) -> list[Match]:
    """Return the games that score an opening: from both seats, against each player of the pool."""
    return [
        Match(example.board, seat, player, name, random.Random(f"{example.key} {seat} {name}"))
        for seat in SEATS
        for name, player in POOL.items()
    ]


def practice(example: Example, opponent: str, seat: int, seed: int) -> Match:
    """Return a training game, in seat X if `seat` is even. `opponent`: "pool" for a player that `seed` chooses from the
    pool, or the name of a policy, which `ask` asks."""
    rng = random.Random(f"{example.key} {seed}")
    name = pick(rng, list(POOL)) if opponent == "pool" else opponent
    return Match(example.board, SEATS[seat % 2], POOL.get(name), name, rng)

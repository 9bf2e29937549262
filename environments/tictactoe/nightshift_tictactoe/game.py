"""A game in the hands of a policy: what it is asked, what its answer does, what the game was worth to it.

A text that is no letter of an empty cell forfeits: no other reading of it is tried.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from nightshift_tictactoe.board import mover, moves, play, winner, written
from nightshift_tictactoe.data import Example
from nightshift_tictactoe.players import POOL, Player, pick

SEATS = ("X", "O")
Chat = list[dict[str, str]]


class Match:
    """One game from an opening. The policy has `seat`; in the other a player, or None: that one is asked, too.

    `is_other_asked`: what `ask` says is for the other seat, whose answers teach nothing.
    """

    def __init__(self, board: str, seat: str, opponent: Player | None, name: str, rng: random.Random) -> None:
        self.opening = self.board = board
        self.seat, self.opponent_name = seat, name
        self.is_other_asked = False
        self._opponent, self._rng = opponent, rng
        self._chats: dict[str, Chat] = {"X": [], "O": []}
        self._forfeit: str | None = None
        self.cells: list[str] = []

    @property
    def is_over(self) -> bool:
        """Somebody has a line or forfeited, or the board is full."""
        return self._forfeit is not None or not moves(self.board)

    def ask(self) -> Sequence[dict[str, str]] | None:
        """The chat of the seat whose turn it is; the player of the pool has moved before that. None once it is over."""
        while not self.is_over and mover(self.board) != self.seat and self._opponent is not None:
            self.take(self._opponent(self.board, self._rng))
        if self.is_over:
            return None
        who = mover(self.board)
        self.is_other_asked = who != self.seat
        chat = self._chats[who]
        if not chat or chat[-1]["role"] == "assistant":
            text = written(self.board)
            chat.append({"role": "user", "content": text if chat else f"You are {who}: {text}"})
        return list(chat)  # the game goes on

    def answer(self, text: str) -> None:
        """What was said to the last chat."""
        who, cell = mover(self.board), text.strip()
        self._chats[who].append({"role": "assistant", "content": text})
        if len(cell) == 1 and cell in moves(self.board):
            self.take(cell)
        else:
            self._forfeit = who

    def score(self) -> float:
        """To the policy's seat: 1 for a game won, 0.5 for a draw, 0 for one that was lost, forfeited or not played."""
        if self._forfeit is not None:
            return 0.0 if self._forfeit == self.seat else 1.0
        won = winner(self.board)
        return 0.0 if won not in (None, self.seat) or moves(self.board) else 1.0 if won else 0.5

    def is_formatted(self) -> bool | None:
        """No form is asked for: what is no move has lost."""
        return None

    def details(self) -> dict[str, str]:
        """For people and ratings: against whom, from which seat and opening, the cells taken after it, how it ended."""
        ended = "forfeit" if self._forfeit == self.seat else {1.0: "won", 0.5: "drawn", 0.0: "lost"}[self.score()]
        told = {"opponent": self.opponent_name, "seat": self.seat, "opening": self.opening}
        return {**told, "cells": " ".join(self.cells), "board": self.board, "ended": ended}

    def take(self, cell: str) -> Match:
        """The same game, its mover having taken an empty cell."""
        self.cells.append(cell)
        self.board = play(self.board, cell)
        return self


def episodes(example: Example) -> list[Match]:
    """The games that an opening is scored by: from both seats, against each of the pool."""
    return [
        Match(example.board, seat, player, name, random.Random(f"{example.key} {seat} {name}"))
        for seat in SEATS
        for name, player in POOL.items()
    ]


def practice(example: Example, opponent: str, seat: int, seed: int) -> Match:
    """A game to learn from, in seat X where `seat` is even. `opponent`: `pool`, a player of it by `seed`, or another
    word: a policy that is asked."""
    rng, own = random.Random(f"{example.key} {seed}"), SEATS[seat % 2]
    if opponent != "pool":
        return Match(example.board, own, None, opponent, rng)
    name = pick(list(POOL), rng)
    return Match(example.board, own, POOL[name], name, rng)

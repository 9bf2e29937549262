"""Tic-tac-toe: a board is nine characters, `X`, `O` or the letter of an empty cell, from `a` to `i` row by row."""

from __future__ import annotations

START = "abcdefghi"
LINES = ("abc", "def", "ghi", "adg", "beh", "cfi", "aei", "ceg")


def mover(board: str) -> str:
    """Whose turn it is; X begins."""
    return "X" if board.count("X") == board.count("O") else "O"


def moves(board: str) -> list[str]:
    """Letters of the empty cells; none once a line is full."""
    return [] if winner(board) else [cell for cell in board if cell in START]


def play(board: str, cell: str) -> str:
    """The board after its mover took this empty cell."""
    return board.replace(cell, mover(board))


def winner(board: str) -> str | None:
    """Who has a line."""
    for line in LINES:
        marks = {board[START.index(cell)] for cell in line}
        if len(marks) == 1 and marks < {"X", "O"}:
            return marks.pop()
    return None


def written(board: str) -> str:
    """As players are asked: a word a cell, `a` or, once taken, `Xa`, so that a mark has its place in the same word."""
    return " ".join(mark if mark == cell else mark + cell for mark, cell in zip(board, START, strict=True))


def threats(board: str, player: str) -> list[tuple[str, str]]:
    """(line, cell): lines that `player` would fill by taking the cell."""
    found = []
    for line in LINES:
        cells = [board[START.index(cell)] for cell in line]
        if cells.count(player) == 2 and (free := [cell for cell in cells if cell in START]):
            found.append((line, free[0]))
    return found

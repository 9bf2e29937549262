"""Tic-tac-toe. A board is a string of nine cells, row by row: `X`, `O`, or the letter `a` to `i` of an empty cell."""

START = "abcdefghi"
LINES = ("abc", "def", "ghi", "adg", "beh", "cfi", "aei", "ceg")


def mover(board: str) -> str:
    """Return the player whose turn it is. X begins."""
    return "X" if board.count("X") == board.count("O") else "O"


def moves(board: str) -> list[str]:
    """Return the letters of the empty cells; [] if a player has won."""
    return [] if winner(board) else [cell for cell in board if cell in START]


def play(board: str, cell: str) -> str:
    """Return the board after a move of the player whose turn it is."""
    return board.replace(cell, mover(board))


def winner(board: str) -> str | None:
    """Return the player who has a line; None if neither has."""
    lines = ["".join(board[START.index(cell)] for cell in line) for line in LINES]
    return "X" if "XXX" in lines else "O" if "OOO" in lines else None


def written(board: str) -> str:
    """Return the board as a prompt shows it: a word for each cell, `a` if empty and `Xa` if taken."""
    return " ".join(mark if mark == cell else mark + cell for mark, cell in zip(board, START, strict=True))


def threats(board: str, player: str) -> list[tuple[str, str]]:
    """Return each (line, cell) such that `player` fills the line by taking the cell."""
    pairs = []
    for line in LINES:
        cells = [board[START.index(cell)] for cell in line]
        if cells.count(player) == 2 and (free := [cell for cell in cells if cell in START]):
            pairs.append((line, free[0]))
    return pairs

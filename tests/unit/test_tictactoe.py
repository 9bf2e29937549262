"""Tic-tac-toe: the board, and the games that the base model reads."""

from collections import Counter

from nightshift_tictactoe.board import START, moves, play, winner


def test_the_game_has_as_many_boards_and_ends_as_it_is_known_to_have() -> None:
    boards, level = {START}, {START}
    while level := {play(board, cell) for board in level for cell in moves(board)}:
        boards |= level
    assert len(boards) == 5478
    ended = Counter(winner(board) for board in boards if not moves(board))
    assert ended == {"X": 626, "O": 316, None: 16}

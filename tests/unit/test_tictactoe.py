"""Tic-tac-toe: the board, and the games that the base model reads."""

from collections import Counter
from itertools import islice

from nightshift_tictactoe.board import START, mover, moves, play, threats, winner
from nightshift_tictactoe.documents import documents

from tests.boards import read


def test_the_game_has_as_many_boards_and_ends_as_it_is_known_to_have() -> None:
    boards, level = {START}, {START}
    while level := {play(board, cell) for board in level for cell in moves(board)}:
        boards |= level
    assert len(boards) == 5478
    ended = Counter(winner(board) for board in boards if not moves(board))
    assert ended == {"X": 626, "O": 316, None: 16}


def test_documents_are_legal_games_asked_as_a_conversation() -> None:
    overlooked = threatened = 0
    games = [chat for chat in islice(documents(3), 6000) if not chat[0][0].startswith("Line of ")]
    assert len(games) > 1800
    for chat in games:
        assert chat[0][0].startswith("You are ")
        for turn, (asked, cell) in enumerate(chat):
            player, board = asked.rpartition(":")[0], read(asked)
            assert bool(player) == (turn == 0)
            assert cell in moves(board)
            assert not player or player == f"You are {mover(board)}"
            wins = {won for _, won in threats(board, mover(board))}
            threatened, overlooked = threatened + bool(wins), overlooked + bool(wins and cell not in wins)
    assert threatened > 300
    assert 0.55 < overlooked / threatened < 0.95, "what is left to find out"


def test_between_the_games_stand_lessons_of_lines() -> None:
    lessons = [chat for chat in islice(documents(3), 3000) if chat[0][0].startswith("Line of ")]
    assert len(lessons) > 1500
    asked = Counter[str]()
    for ((text, cell),) in lessons:
        player, board = text.removeprefix("Line of ").partition(": ")[0], read(text)
        assert moves(board), "the game goes on"
        assert cell in {found for _, found in threats(board, player)}
        asked[player] += 1
    assert min(asked.values()) > 0.35 * len(lessons), "of both players"

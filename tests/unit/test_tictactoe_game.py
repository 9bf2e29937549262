"""Tic-tac-toe as a game of a policy: openings, forfeits, the pool, self-play, ratings."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nightshift_tictactoe import data, ratings
from nightshift_tictactoe.board import moves
from nightshift_tictactoe.game import Match, episodes, practice
from nightshift_tictactoe.players import POOL

from nightshift.campaign.records import Completion, Weights
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.evaluation.evaluate import evaluate, examples_of
from tests.rules import ROOT

Policy = Callable[[Match], str]


def read(text: str) -> str:
    """The nine characters behind `You are X: Xa b Oc ...`, `Line of X: ...` or the words alone."""
    return "".join(word[0] for word in text.rpartition(":")[2].split())


def played(policy: Policy, match: Match) -> Match:
    while match.ask() is not None:
        match.answer(policy(match))
    return match


def test_the_splits_hold_all_openings() -> None:
    sets = [data.load(split) for split in ("train", "validation", "test")]
    assert [len(openings) for openings in sets] == [890, 100, 100]
    openings = [opening for openings in sets for opening in openings]
    assert all(moves(opening.board) for opening in openings)
    groups = {tuple(data.slices(opening).values()) for opening in openings}
    assert {num_moves for num_moves, _ in groups} == {"0", "1", "2", "3", "4"}
    assert ("0", "draw") in groups
    for opening in sets[0][:20]:  # practised from both seats against the whole pool
        assert [practice(opening, "pool", seat, 0).seat for seat in range(4)] == [*"XOXO"]
        assert {practice(opening, "pool", 0, seed).opponent_name for seed in range(60)} == {*POOL}


@pytest.mark.parametrize("text", ["ab", "X", "O", "j", "A", "1", "a\nb", "\N{FULLWIDTH LATIN SMALL LETTER A}", "d."])
def test_what_is_no_letter_of_an_empty_cell_forfeits(text: str) -> None:
    match = Match("XbcdefghO", "X", POOL["random"], "random", random.Random(0))
    assert match.ask() == [{"role": "user", "content": "You are X: Xa b c d e f g h Oi"}]
    match.answer(text)
    assert (match.ask(), match.score()) == (None, 0.0)
    assert match.details()["ended"] == "forfeit"


def test_a_cell_that_is_taken_forfeits_and_blanks_around_a_letter_do_not() -> None:
    match = Match("XbcdefghO", "X", None, "self", random.Random(0))
    match.ask()
    match.answer(" e\n")
    assert match.cells == ["e"]
    match.ask()
    assert match.is_other_asked
    match.answer("e")  # the other forfeits, and this seat has won
    assert (match.score(), match.details()["ended"]) == (1.0, "won")


def test_the_same_answers_meet_the_same_luck() -> None:
    (opening,) = data.load("validation", 1)
    first, second = (
        [played(lambda m: moves(m.board)[0], match).details() for match in episodes(opening)] for _ in "ab"
    )
    assert first == second
    assert [(game["seat"], game["opponent"]) for game in first] == [(seat, name) for seat in "XO" for name in POOL]


class Player:
    """A stand-in for a session with a perfect policy."""

    def load_final_weights(self) -> Weights:
        return Weights(9, "0")

    def complete(self, chats: Sequence[Sequence[Any]], *_: Any) -> list[Completion]:
        matches = [Match(read(chat[-1]["content"]), "X", None, "", random.Random(0)) for chat in chats]
        return [Completion(POOL["perfect"](match.board, random.Random(0)), 2, False) for match in matches]


@pytest.mark.slow
def test_the_final_policy_has_a_rating(tmp_path: Path) -> None:
    rules = rules_of(ROOT, Chosen(environments=["tictactoe"]), "trl", 0)
    rules = replace(rules, environments=(replace(rules.environments[0], num_validation=25),))
    session: Any = Player()
    tasks = examples_of("validation", rules, ROOT)
    evaluation = evaluate(session, tasks, rules, tmp_path / "evaluation.jsonl", lambda reading: None)
    assert abs(evaluation.figures["tictactoe"]["elo"] - ratings.ELO["perfect"]) < 100
    assert not evaluation.unscored

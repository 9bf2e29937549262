"""Figures of a policy against the pool, for display only: no decision uses them.

Elo: the rating at which the expected score against the pool equals the measured score. The pool's ratings are a
Bradley-Terry fit of games within the pool over all openings from both seats, with random at 1,000. A test compares each
player's rating with the constants. Worst case: the exact score against an opponent who knows each answer of the policy.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from nightshift_tictactoe.board import START, mover, moves
from nightshift_tictactoe.game import SEATS, Chat, Match

ELO: dict[str, float] = {"random": 1000, "careless50": 1145, "careless25": 1208, "greedy": 1248, "perfect": 1280}
SCALE = 400 / math.log(10)
_NUM_RESAMPLES = 200


def expected(rating: float, other: float) -> float:
    """Return the expected score of a game, by Elo's formula."""
    return 1 / (1 + math.exp((other - rating) / SCALE))


def elo(scores: Sequence[Mapping[str, float]]) -> float | None:
    """Return the rating of a policy from its mean scores by opponent, a mapping for each opening.

    None if the policy won or lost every game.
    """
    names = list(ELO)
    total = sum(sum(by_opponent[name] for name in names) for by_opponent in scores) / len(scores)
    if not 0.001 < total / len(names) < 0.999:
        return None
    low, high = -3000.0, 5000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(expected(middle, ELO[name]) for name in names) < total else (low, middle)
    return low


def elo_stderr(scores: Sequence[Mapping[str, float]]) -> float | None:
    """Return the standard error of the rating by bootstrap over the openings; None if too few samples have a rating."""
    rng = random.Random(0)
    samples = [elo([scores[int(rng.random() * len(scores))] for _ in scores]) for _ in range(_NUM_RESAMPLES)]
    ratings = [value for value in samples if value is not None]
    if len(ratings) < _NUM_RESAMPLES // 2:
        return None
    mean = sum(ratings) / len(ratings)
    return math.sqrt(sum((value - mean) ** 2 for value in ratings) / (len(ratings) - 1))


class WorstCase:
    """All games from the empty board that a deterministic policy can be led into, in one seat."""

    def __init__(self, seat: str) -> None:
        self._seat, self._open = seat, [Match(START, seat, None, "worst case", random.Random(0))]
        self.score = 1.0  # the lowest score so far

    def ask(self) -> list[Chat]:
        """Return the chats for the next answers; [] once every game has ended."""
        matches: list[Match] = []
        for match in self._open:
            if not match.is_over and mover(match.board) != self._seat:
                matches += [copy.deepcopy(match).take(cell) for cell in moves(match.board)]
            else:
                matches.append(match)
        self.score = min([self.score, *(match.score() for match in matches if match.is_over)])
        self._open = [match for match in matches if not match.is_over]
        return [list(match.ask() or ()) for match in self._open]

    def answer(self, texts: Sequence[str]) -> None:
        """Play the policy's answers to the last chats, in the same order."""
        for match, text in zip(self._open, texts, strict=True):
            match.answer(text)


def rating(games: Sequence[Sequence[Match]]) -> float | None:
    """Return the Elo rating of the policy that played the games of each opening."""
    return elo(_by_opponent(games))


def _by_opponent(games: Sequence[Sequence[Match]]) -> list[dict[str, float]]:
    return [{name: fmean(m.score() for m in matches if m.opponent_name == name) for name in ELO} for matches in games]


def figures(games: Sequence[Sequence[Match]], ask: Callable[[Sequence[Chat]], Sequence[str]]) -> dict[str, float]:
    """Return Elo and its standard error, the worst case of each seat, the share of forfeits, and the mean score against
    each player of the pool. A figure without a value is left out. `games`: the games of each opening."""
    played = [match for matches in games for match in matches]
    by_opponent = _by_opponent(games)
    values = {"elo": elo(by_opponent), "elo_stderr": elo_stderr(by_opponent)}
    for seat in SEATS:
        search = WorstCase(seat)
        while chats := search.ask():
            search.answer(ask(chats))
        values[f"worst_{seat}"] = search.score
    values["forfeits"] = sum(match.details()["ended"] == "forfeit" for match in played) / len(played)
    values |= {f"against_{name}": fmean(scores[name] for scores in by_opponent) for name in ELO}
    return {name: value for name, value in values.items() if value is not None}

"""How good a policy is beside the pool, for display: nothing is decided by it.

Elo: the rating at which the expected score against the pool's fixed ratings is the one that was measured. Those are a
Bradley-Terry fit of the pool against itself over all openings from both seats, with random at 1,000; a test rates each
player against the others' constants. Worst case: the score against the one opponent who knows every answer of the
policy, exact, by asking it all that it can be asked.
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
    """Score of a game, by Elo's formula."""
    return 1 / (1 + math.exp((other - rating) / SCALE))


def elo(scores: Sequence[Mapping[str, float]]) -> float | None:
    """Of one policy, from its mean scores by opponent, an opening each. None where it won or lost everything."""
    names = list(ELO)
    total = sum(sum(one[name] for name in names) for one in scores) / len(scores)
    if not 0.001 < total / len(names) < 0.999:
        return None
    low, high = -3000.0, 5000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(expected(middle, ELO[name]) for name in names) < total else (low, middle)
    return low


def elo_stderr(scores: Sequence[Mapping[str, float]]) -> float | None:
    """By bootstrap over the openings."""
    rng = random.Random(0)
    drawn = [elo([scores[int(rng.random() * len(scores))] for _ in scores]) for _ in range(_NUM_RESAMPLES)]
    known = [value for value in drawn if value is not None]
    if len(known) < _NUM_RESAMPLES // 2:
        return None
    mean = sum(known) / len(known)
    return math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))


class WorstCase:
    """All games from the empty board that a policy which always says the same can be led into, in one seat: whoever
    knows its answers chooses among them, so the worst of them is what that one gets."""

    def __init__(self, seat: str) -> None:
        self._seat, self._open = seat, [Match(START, seat, None, "worst case", random.Random(0))]
        self.score = 1.0  # of the policy, so far

    def ask(self) -> list[Chat]:
        """The chats of one more answer each; none once every game has ended."""
        found: list[Match] = []
        for match in self._open:
            if not match.is_over and mover(match.board) != self._seat:
                found += [copy.deepcopy(match).take(cell) for cell in moves(match.board)]
            else:
                found.append(match)
        self.score = min([self.score, *(match.score() for match in found if match.is_over)])
        self._open = [match for match in found if not match.is_over]
        return [list(match.ask() or ()) for match in self._open]

    def answer(self, texts: Sequence[str]) -> None:
        """What the policy said to them, in order."""
        for match, text in zip(self._open, texts, strict=True):
            match.answer(text)


def rating(games: Sequence[Sequence[Match]]) -> float | None:
    """Elo of who played them, an opening each."""
    return elo(_by_opponent(games))


def _by_opponent(games: Sequence[Sequence[Match]]) -> list[dict[str, float]]:
    return [{name: fmean(m.score() for m in each if m.opponent_name == name) for name in ELO} for each in games]


def figures(games: Sequence[Sequence[Match]], ask: Callable[[Sequence[Chat]], Sequence[str]]) -> dict[str, float]:
    """Of all openings' games: Elo with its standard error, the worst case of each seat, the share of forfeits, and the
    mean score against each of the pool. What cannot be told is left out."""
    played = [match for each in games for match in each]
    by_opponent = _by_opponent(games)
    found = {"elo": elo(by_opponent), "elo_stderr": elo_stderr(by_opponent)}
    for seat in SEATS:
        search = WorstCase(seat)
        while chats := search.ask():
            search.answer(ask(chats))
        found[f"worst_{seat}"] = search.score
    found["forfeits"] = sum(match.details()["ended"] == "forfeit" for match in played) / len(played)
    found |= {f"against_{name}": fmean(one[name] for one in by_opponent) for name in ELO}
    return {name: value for name, value in found.items() if value is not None}

"""Figures of a policy against the pool, for display only: no decision uses them.

Elo: the rating at which the expected score against the pool equals the measured score. The pool's ratings are a
Bradley-Terry fit of games within the pool over all openings from both seats, with random at 1,000.
"""

import math
import random
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from nightshift_tictactoe.game import Match

ELO: dict[str, float] = {"random": 1000, "careless50": 1145, "careless25": 1208, "greedy": 1248, "perfect": 1280}
SCALE = 400 / math.log(10)
_NUM_RESAMPLES = 200


def elo(scores: Sequence[Mapping[str, float]]) -> float | None:
    """Return the rating for a policy's mean scores by opponent, per opening; None if it won or lost every game."""
    total = sum(sum(by_opponent[name] for name in ELO) for by_opponent in scores) / len(scores)
    if not 0.001 < total / len(ELO) < 0.999:
        return None
    low, high = -3000.0, 5000.0
    for _ in range(60):
        middle = (low + high) / 2
        expected = sum(1 / (1 + math.exp((other - middle) / SCALE)) for other in ELO.values())  # Elo's formula
        low, high = (middle, high) if expected < total else (low, middle)
    return low


def elo_stderr(scores: Sequence[Mapping[str, float]]) -> float | None:
    """Return the standard error of the rating by bootstrap over the openings; None if too few samples have a rating."""
    rng = random.Random(0)
    samples = [elo([scores[int(rng.random() * len(scores))] for _ in scores]) for _ in range(_NUM_RESAMPLES)]
    ratings = [value for value in samples if value is not None]
    return stdev(ratings) if len(ratings) >= _NUM_RESAMPLES // 2 else None


def figures(games: Sequence[Sequence[Match]]) -> dict[str, float]:
    """Return Elo and its standard error, the share of forfeits, and the mean score against each player of the pool. A
    figure without a value is left out. `games`: the games of each opening."""
    played = [match for matches in games for match in matches]
    by_opponent = [
        {name: fmean(m.score() for m in matches if m.opponent_name == name) for name in ELO} for matches in games
    ]
    values = {"elo": elo(by_opponent), "elo_stderr": elo_stderr(by_opponent)}
    values["forfeits"] = sum(match.details()["ended"] == "forfeit" for match in played) / len(played)
    values |= {f"against_{name}": fmean(scores[name] for scores in by_opponent) for name in ELO}
    return {name: value for name, value in values.items() if value is not None}

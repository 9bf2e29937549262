"""What the files of a run show on the page: thinned curves, and three sampled rollouts with their problems.

The files are written by processes that may have been killed at any byte, and their texts by a policy:
whatever cannot be read is absent.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nightshift.files import read_rows
from nightshift.metrics import Step

# What the page draws of every run: the name in metrics.jsonl, and its words.
CURVES = {
    "reward_mean": "reward",
    "completion_tokens_mean": "length, tokens",
    "truncated_share": "truncated share",
    "kl": "KL",
    "entropy": "entropy",
}
ROLLOUTS_NAME = "evaluation.jsonl"
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer of the final policy to one problem of the selection set: a line of evaluation.jsonl.

    `problem` is its text, None without its data.
    """

    environment: str
    key: str
    score: float
    answer: str
    completion: str
    num_tokens: int | None = None
    truncated: bool = False
    problem: str | None = None
    games: tuple[dict[str, str], ...] = ()

    @property
    def kind(self) -> str:
        """In one word."""
        return "truncated" if self.truncated else "right" if self.score > 0.5 else "wrong"


def curve_of(name: str, steps: Sequence[Step], max_points: int) -> Curve:
    """One quantity of one run as (step, value) points, each the mean of its neighbours where there are too many."""
    points = [(float(step.step), value) for step in steps if (value := getattr(step, name)) is not None]
    size = -(-len(points) // max_points) or 1
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in buckets]


def rollouts(run_dir: Path, seed: int, problems: Mapping[tuple[str, str], str]) -> list[Rollout]:
    """The first right, wrong and truncated answer from a place in the file that `seed` alone decides: not chosen."""
    rows = read_rows(run_dir / ROLLOUTS_NAME, Rollout)
    start = zlib.crc32(str(seed).encode()) % max(len(rows), 1)
    first = {row.kind: row for row in (*rows[start:], *rows[:start])[::-1]}
    found = (first[kind] for kind in ("right", "wrong", "truncated") if kind in first)
    return [replace(row, problem=problems.get((row.environment, row.key))) for row in found]


def lost_game(run_dir: Path) -> Mapping[str, str]:
    """Of the games of a run the first that was lost to the opponent who won most; empty where there was none."""
    games = [game for row in read_rows(run_dir / ROLLOUTS_NAME, Rollout) for game in row.games]
    lost = [game for game in games if game.get("ended") in ("lost", "forfeit")]
    (worst, _), *_ = Counter(game.get("opponent") for game in lost).most_common(1) or [(None, 0)]
    return next((game for game in lost if game.get("opponent") == worst), {})

"""What the files of a run show on the page: thinned curves, and three sampled rollouts with their problems.

The files are written by processes that may have been killed at any byte, and their texts by a policy:
whatever cannot be read is absent.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from nightshift.errors import NightshiftError
from nightshift.evaluation import selection_set
from nightshift.files import read_rows
from nightshift.metrics import Step
from nightshift.rules import Rules

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


@lru_cache(maxsize=1)  # for a night, which writes the page after every experiment
def problem_texts(rules: Rules | None, root: Path) -> Mapping[tuple[str, str], str]:
    """The last message of every example of the selection set by (environment, key); empty without its data."""
    try:
        return {
            (environment.package, example.key): chat[-1]["content"]
            for environment, example in (selection_set(rules, root) if rules else ())
            if (chat := environment.episode(example).ask())
        }
    except (NightshiftError, ImportError, OSError):
        return {}


def rollouts(run_dir: Path, seed: int, problems: Mapping[tuple[str, str], str]) -> list[Rollout]:
    """The first right, wrong and truncated answer from a place in the file that `seed` alone decides: not chosen."""
    rows = read_rows(run_dir / ROLLOUTS_NAME, Rollout)
    start = zlib.crc32(str(seed).encode()) % max(len(rows), 1)
    first = {row.kind: row for row in (*rows[start:], *rows[:start])[::-1]}
    found = (first[kind] for kind in ("right", "wrong", "truncated") if kind in first)
    return [replace(row, problem=problems.get((row.environment, row.key))) for row in found]

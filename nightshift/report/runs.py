"""What the files of a run show on the page: thinned curves, and three sampled rollouts with their problems.

The files are written by processes that may have been killed at any byte, and their texts by a policy:
whatever cannot be read is absent.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from nightshift.errors import NightshiftError
from nightshift.evaluation import examples_of
from nightshift.files import read_file
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


class Rollout(msgspec.Struct):
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


def problem_texts(rules: Rules | None, root: Path) -> dict[tuple[str, str], str]:
    """The last message of every example of the selection set by (environment, key); empty without its data."""
    if rules is None:
        return {}
    try:
        return _texts(rules, root)
    except (NightshiftError, ImportError, OSError):
        return {}


@lru_cache(maxsize=1)  # for a night, which writes the page after every experiment
def _texts(rules: Rules, root: Path) -> dict[tuple[str, str], str]:
    return {
        (environment.package, example.key): chat[-1]["content"]
        for environment, example in examples_of(rules, root, "selection")
        if (chat := environment.episode(example).ask())
    }


def rollouts(run_dir: Path, seed: int, problems: Mapping[tuple[str, str], str]) -> list[Rollout]:
    """The first right, wrong and truncated answer from a place in the file that `seed` alone decides: not chosen."""
    try:
        lines = read_file(run_dir / ROLLOUTS_NAME).split(b"\n")
    except OSError:
        return []
    found: dict[str, Rollout] = {}
    start = zlib.crc32(str(seed).encode()) % len(lines)
    for line in (*lines[start:], *lines[:start]):
        try:
            rollout = msgspec.json.decode(line, type=Rollout)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        rollout.problem = problems.get((rollout.environment, rollout.key))
        found.setdefault(rollout.kind, rollout)
        if len(found) == 3:
            break
    return [found[kind] for kind in ("right", "wrong", "truncated") if kind in found]
